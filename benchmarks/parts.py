"""Where a step's CPU time goes: by part of the step on the thread that runs it, and what other threads take."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist

from benchmarks import harness
from megalite.comm import start_all_reduce
from megalite.mesh import Axis

Enter = Callable[[str], None]
"""Told the part of a step that begins."""
PARTS = ("forward", "backward", "sums", "norm and clip", "update", "gathers")
OTHERS, ALL = "other threads", "all"


def silently(part: str) -> None:
    """An `Enter` that nobody listens to."""


class Clock:
    """CPU seconds of the thread that calls `enter`, by the part it is in; waiting is left out."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._part, self._since = "", 0.0

    def enter(self, part: str) -> None:
        now = time.thread_time()
        self.seconds[self._part] = self.seconds.get(self._part, 0.0) + now - self._since
        self._part, self._since = part, now


def cpu_milliseconds(
    sides: Mapping[str, tuple[Callable[[], object], Clock]], *, world: Axis, rounds: int
) -> dict[str, dict[str, float]]:
    """Side -> part -> CPU ms of a step, all ranks together, the median of rounds in turn after two that do not count.

    sides: each with its step, and the clock that the step tells of its parts.
    """
    columns = (*PARTS, OTHERS, ALL)
    taken = torch.zeros(len(sides), len(columns), 2 + rounds, dtype=torch.float64)
    for turn in range(2 + rounds):
        for number, (step, clock) in enumerate(sides.values()):
            dist.barrier(world.group)
            start = time.process_time()
            clock.enter("")
            clock.seconds.clear()
            step()
            clock.enter("")
            dist.barrier(world.group)  # what Gloo's threads still do for the others is this step's
            whole = time.process_time() - start
            mine = [clock.seconds.get(part, 0.0) for part in PARTS]
            taken[number, :, turn] = torch.tensor([*mine, whole - sum(mine), whole])
    summed = start_all_reduce(taken, world).wait()[:, :, 2:].tolist()
    return {
        side: {column: 1000 * statistics.median(values) for column, values in zip(columns, rows, strict=True)}
        for side, rows in zip(sides, summed, strict=True)
    }


def report(title: str, rows: Sequence[tuple[str, Mapping[str, float]]]) -> str:
    """A table of CPU ms, one row a side."""
    columns = (*PARTS, OTHERS, ALL)
    cells = [(name, *(f"{parts[column]:.1f}" for column in columns)) for name, parts in rows]
    return harness.table((title, *columns), cells)

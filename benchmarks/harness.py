"""What benchmarks share: sides that run in turn on the same ranks, medians of ratios, aligned tables."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megalite.comm import start_all_reduce
from megalite.mesh import Axis
from tests.counting import count

Name = TypeVar("Name")


class Side(NamedTuple):
    """One thing that is timed: `step` runs on the first `ranks` ranks of the world; the others wait."""

    step: Callable[[], Any]
    ranks: int


class Times(NamedTuple):
    """Of one side, a number for each round. seconds: the slowest rank's, from a common start. cpu_seconds: of all ranks
    and their threads together, waiting left out; other work on the machine moves it less than the clock."""

    seconds: list[float]
    cpu_seconds: list[float]


def in_turn(sides: Mapping[Name, Side], *, world: Axis, rounds: int, warm_up: int = 1) -> dict[Name, Times]:
    """Runs A B C A B C ..., `warm_up` rounds and then those that count.

    So whatever else the machine does, it does to all sides alike, and sides are compared within a round.
    """
    clock, cpu = torch.zeros(2, len(sides), warm_up + rounds, dtype=torch.float64)
    for turn in range(warm_up + rounds):
        for number, side in enumerate(sides.values()):
            dist.barrier(world.group)
            if world.rank < side.ranks:
                start, cpu_start = time.perf_counter(), time.process_time()
                side.step()
                clock[number, turn] = time.perf_counter() - start
                cpu[number, turn] = time.process_time() - cpu_start
    slowest = start_all_reduce(clock, world, op="max").wait()[:, warm_up:].tolist()
    summed = start_all_reduce(cpu, world).wait()[:, warm_up:].tolist()
    return {name: Times(*both) for name, *both in zip(sides, slowest, summed, strict=True)}


MILLISECONDS = ("ms", "best ms", "CPU ms")


def milliseconds(times: Times) -> tuple[str, str, str]:
    """Of a round, under those headings: the median, the fastest (the machine left alone), and the CPU's median."""
    values = statistics.median(times.seconds), min(times.seconds), statistics.median(times.cpu_seconds)
    return tuple(f"{1000 * value:.0f}" for value in values)  # type: ignore[return-value]


class Ratio(NamedTuple):
    """Median of the ratios of paired times, and the quartiles around it."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Of above[i] / below[i]."""
    ratios = [a / b for a, b in zip(above, below, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), low, high)


class bytes_sent(count):
    """`count` that also sees what DTensor issues below its own dispatch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # DTensor's own dispatch comes first; what it makes of the operator comes back here
        return super().__torch_dispatch__(func, types, args, kwargs)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned text: the first column to the left, the others to the right."""
    cells = [tuple(header), *(tuple(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])

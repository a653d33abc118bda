"""`Meter`: how long a rank's step takes, how much of it the rank waits, and which rank all others wait for.

In synchronous training all ranks take equally long for a step, since each waits for the slowest: what tells them apart
is waiting. The slowest rank is the one that waits least.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from megalite.comm import Call, Observer, start_all_gather
from megalite.cost.memory import GIB
from megalite.mesh import Axis


class Times(NamedTuple):
    """Of one step of one rank, in seconds: all of it; of that, reading data; of that, waiting in collectives."""

    step_seconds: float
    data_seconds: float
    wait_seconds: float


class Meter(Observer):
    """Measures steps: `reading()` begins one, `end()` ends it. While it observes, waiting is added up.

    On the CPU what counts is the time that this process is blocked in a collective's wait; on CUDA, where the host goes
    on, the time that the stream stands still for it, by events.
    """

    def __init__(self, *, device: str) -> None:
        self.device = device
        self.watch: Stopwatch = HostStopwatch() if device == "cpu" else StreamStopwatch()
        self.began = time.perf_counter()
        self.data_seconds = 0.0
        self.since_look: list[Times] = []

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A step begins, with reading its data."""
        self.watch.reset()
        self.began = time.perf_counter()
        yield
        self.data_seconds = time.perf_counter() - self.began

    def end(self) -> Times:
        """The step's work is done: its results have been read by the host."""
        times = Times(time.perf_counter() - self.began, self.data_seconds, self.watch.seconds())
        self.since_look.append(times)
        return times

    def waiting(self, call: Call) -> None:
        self.watch.start()

    def waited(self, call: Call) -> None:
        self.watch.stop()

    def look(self, world: Axis) -> Look:
        """All ranks' mean times of the steps since the last look. Every rank calls it, at the same step."""
        steps = len(self.since_look)
        sums = [sum(times.step_seconds for times in self.since_look), sum(t.wait_seconds for t in self.since_look)]
        self.since_look.clear()
        mine = torch.tensor([sums], dtype=torch.float64, device=self.device) / max(steps, 1)
        every = start_all_gather(mine, world).wait().tolist()
        return Look([step for step, _ in every], [wait for _, wait in every])

    def memory(self) -> dict[str, float]:
        """The most that this rank has held so far: of the GPU by torch, or of the machine by the whole process."""
        if self.device != "cpu":
            return {"memory/max_allocated_gib": torch.cuda.max_memory_allocated(self.device) / GIB}
        unit = 1 if sys.platform == "darwin" else 1024
        return {"memory/max_resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / GIB}


@dataclass(frozen=True)
class Look:
    """Every rank's seconds a step, and of these its seconds of waiting, by rank."""

    step_seconds: Sequence[float]
    wait_seconds: Sequence[float]

    @property
    def slowest(self) -> int:
        """The rank that waits least, since the others wait for it."""
        return min(range(len(self.wait_seconds)), key=lambda rank: self.wait_seconds[rank])

    def metrics(self) -> dict[str, float]:
        return {
            "perf/slowest_rank": self.slowest,
            "perf/step_seconds_max": max(self.step_seconds),
            "perf/wait_seconds_min": min(self.wait_seconds),
            "perf/wait_seconds_max": max(self.wait_seconds),
        }

    def describe(self) -> str:
        least, most = min(self.wait_seconds), max(self.wait_seconds)
        return (
            f"ranks: step {max(self.step_seconds):.3g} s; waiting {least:.2g} to {most:.2g} s; "
            f"slowest is rank {self.slowest} (waits least, {least:.2g} s)"
        )


class Stopwatch(Protocol):
    """Adds up the time between `start` and `stop`."""

    def reset(self) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def seconds(self) -> float: ...


class HostStopwatch:
    """By this process's clock."""

    def __init__(self) -> None:
        self.total = self.since = 0.0

    def reset(self) -> None:
        self.total = 0.0

    def start(self) -> None:
        self.since = time.perf_counter()

    def stop(self) -> None:
        self.total += time.perf_counter() - self.since

    def seconds(self) -> float:
        return self.total


class StreamStopwatch:
    """By events on the current CUDA stream; `seconds` waits for the last of them."""

    def __init__(self) -> None:
        self.pairs: list[list[torch.cuda.Event]] = []

    def reset(self) -> None:
        self.pairs.clear()

    def start(self) -> None:
        self.pairs.append([_recorded()])

    def stop(self) -> None:
        self.pairs[-1].append(_recorded())

    def seconds(self) -> float:
        total = 0.0
        for start, *stop in self.pairs:
            for event in stop:  # none if the wait has failed
                event.synchronize()
                total += start.elapsed_time(event) / 1000
        return total


def _recorded() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event

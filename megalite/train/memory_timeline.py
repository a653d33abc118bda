"""What a rank's memory holds, when, and of which kind: from the allocations that the profiler saw.

Words: a *life* is one allocation from its birth to its death; a *mark* says of a place in memory, at one moment, what
kind it is; an *action* is the range of one forward or backward pass of a micro-batch (F0@0, BW0@0).

| kind        | what counts                                                                                          |
|-------------|------------------------------------------------------------------------------------------------------|
| parameters  | Zero's flat weights and master weights, and parameters that are not trained                          |
| gradients   | Zero's flat gradients; what backward leaves for a parameter, from its allocation on                  |
| optimizer   | what the optimizer keeps from step to step (AdamW: two moments)                                      |
| activations | made in a forward and alive after its end: what backward needs                                       |
| temporaries | freed before the action, or the time between two actions, in which it was made is over               |
| other       | all else: batches, losses, and what nobody has named of the memory held when the recording began      |

The first three are known by their places; the rest follows from birth and death alone. Nothing is guessed from sizes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from megalite.zero import Zero

KINDS = ("parameters", "gradients", "optimizer", "activations", "temporaries", "other")
CUDA_BLOCK_BYTES = 512  # the caching allocator hands out multiples of it, and reports them


class Range(NamedTuple):
    """A named stretch of time, on the profiler's clock."""

    name: str
    start_ns: int
    end_ns: int


class Change(NamedTuple):
    """Memory at `place` was allocated, or freed where nbytes is negative."""

    time_ns: int
    place: int
    nbytes: int


class Mark(NamedTuple):
    """What was at `place` at this moment is of this kind."""

    time_ns: int
    place: int
    kind: str


class Held(NamedTuple):
    """A storage of known kind."""

    kind: str
    nbytes: int


@dataclass(eq=False)
class Life:
    """An allocation. birth, death: numbers of changes; None if it was there before, or is there at the end."""

    nbytes: int
    birth: int | None
    death: int | None = None
    kind: str | None = None


@dataclass(frozen=True, eq=False)
class Timeline:
    """bytes[i, k]: held of KINDS[k] from microseconds[i] on; row 0 is what was held when the recording began.

    ranges: steps and actions; their times, like the timeline's, are microseconds since the first of them began.
    """

    device: str
    microseconds: npt.NDArray[np.float64]
    bytes: npt.NDArray[np.int64]
    ranges: Sequence[tuple[str, float, float]]

    def at(self, row: int, moment: float | None = None) -> dict[str, Any]:
        """One moment, by default the row's first: when, in which step and action, bytes in total and by kind."""
        moment = float(self.microseconds[row]) if moment is None else moment
        inside = [name for name, start, end in self.ranges if start <= moment <= end]
        levels = dict(zip(KINDS, self.bytes[row].tolist(), strict=True))
        return {"microseconds": moment, "in": inside, "total": sum(levels.values()), "bytes": levels}

    def peak(self) -> dict[str, Any]:
        """The first moment at which most is held."""
        return self.at(int(self.bytes.sum(axis=1).argmax()))

    def steps(self) -> dict[str, dict[str, Any]]:
        """Each step's begin, peak and end."""
        found = {}
        for name, start, end in self.ranges:
            if name.startswith("step "):
                first, last = self.row(start), self.row(end)
                highest = first + int(self.bytes[first : last + 1].sum(axis=1).argmax())
                found[name] = {
                    "begin": self.at(first, start),
                    "peak": self.at(highest, max(start, float(self.microseconds[highest]))),
                    "end": self.at(last, end),
                }
        return found

    def row(self, moment: float) -> int:
        """The row that holds at this time."""
        return max(int(np.searchsorted(self.microseconds, moment, side="right")) - 1, 0)

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "peak": self.peak(),
            "steps": self.steps(),
            "ranges": [list(one) for one in self.ranges],
            "microseconds": self.microseconds.tolist(),
            "bytes": {kind: self.bytes[:, column].tolist() for column, kind in enumerate(KINDS)},
        }


def held_storages(zero: Zero, stages: Iterable[torch.nn.Module]) -> dict[int, Held]:
    """Place -> what is there, of all that is kept from step to step. A storage of several names is there once."""
    kinds: list[tuple[str, list[torch.Tensor]]] = [("parameters", [p for stage in stages for p in stage.parameters()])]
    for unit in zero.units:
        live = unit.live()
        kinds += [("parameters", live["weights"] + live["masters"]), ("gradients", live["gradients"])]
    for state in zero.optimizer.state.values():
        kinds.append(("optimizer", [value for value in state.values() if isinstance(value, torch.Tensor)]))
    found: dict[int, Held] = {}
    for kind, tensors in kinds:
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() and tensor.device == zero.device:
                unit_bytes = CUDA_BLOCK_BYTES if tensor.is_cuda else 1
                found.setdefault(storage.data_ptr(), Held(kind, -(-storage.nbytes() // unit_bytes) * unit_bytes))
    return found


def read_tree(tree: Iterable[Any], *, device: torch.device, names: set[str]) -> tuple[list[Change], list[Range]]:
    """From the profiler's event tree: the changes on a device and the ranges of these names, both in order of time."""
    from torch._C._profiler import _EventType

    changes: list[Change] = []
    ranges: list[Range] = []
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += reversed(event.children)  # so that what has equal times stays in its order
        kind, fields = event.typed
        if kind == _EventType.Allocation:
            if fields.device == device:
                changes.append(Change(event.start_time_ns, fields.ptr, fields.alloc_size))
        elif event.name in names:
            ranges.append(Range(event.name, event.start_time_ns, event.end_time_ns))
    return sorted(changes, key=lambda change: change.time_ns), sorted(ranges, key=lambda one: one.start_ns)


def timeline(
    changes: Sequence[Change],
    *,
    device: str,
    ranges: Sequence[Range],
    marks: Sequence[Mark],
    before: Mapping[int, Held],
    before_bytes: int | None = None,
) -> Timeline:
    """Each change's kind, summed up. ranges: steps and actions.

    before: what was held when the recording began, and before_bytes all of it where the device can tell (CUDA). What
    is freed and was never seen to be allocated was held before, too.
    """
    lives = _lives(changes, before)
    times = [change.time_ns for change in changes]
    _apply(marks, lives, times)
    actions = [one for one in ranges if not one.name.startswith("step ")]
    deltas = np.zeros((len(changes) + 1, len(KINDS)), dtype=np.int64)
    for life in (life for place in lives.values() for life in place):
        column = KINDS.index(life.kind or _kind(life, times, actions))
        deltas[0 if life.birth is None else life.birth + 1, column] += life.nbytes
        if life.death is not None:
            deltas[life.death + 1, column] -= life.nbytes
    if before_bytes is not None:
        deltas[0, KINDS.index("other")] += max(before_bytes - int(deltas[0].sum()), 0)
    start = ranges[0].start_ns if ranges else times[0] if times else 0
    moments = np.array([start, *times], dtype=np.int64)
    scaled = [(one.name, (one.start_ns - start) / 1e3, (one.end_ns - start) / 1e3) for one in ranges]
    return Timeline(device, (moments - start) / 1e3, deltas.cumsum(axis=0), scaled)


def _lives(changes: Sequence[Change], before: Mapping[int, Held]) -> dict[int, list[Life]]:
    """Place -> the allocations that were there, one after the other."""
    lives = {place: [Life(held.nbytes, None, kind=held.kind)] for place, held in before.items()}
    for number, change in enumerate(changes):
        here = lives.setdefault(change.place, [])
        last = here[-1] if here and here[-1].death is None else None
        if last is not None:
            last.death = number  # also where its end was not seen: the CPU reports no end of what began unseen
        if change.nbytes > 0:
            here.append(Life(change.nbytes, number))
        elif last is None:
            here.append(Life(-change.nbytes, None, number, "other"))
    return lives


def _apply(marks: Sequence[Mark], lives: Mapping[int, Sequence[Life]], times: Sequence[int]) -> None:
    for mark in marks:
        for life in lives.get(mark.place, ()):
            born = life.birth is None or times[life.birth] <= mark.time_ns
            if born and (life.death is None or times[life.death] >= mark.time_ns):
                life.kind = life.kind or mark.kind


def _kind(life: Life, times: Sequence[int], actions: Sequence[Range]) -> str:
    """Of a life that no mark has named. actions: in order, none within another."""
    if life.birth is None:
        return "other"
    born = _stretch(times[life.birth], actions)
    if life.death is not None and _stretch(times[life.death], actions) == born:
        return "temporaries"
    inside, action = born
    return "activations" if inside and actions[action].name.startswith("F") else "other"


def _stretch(time_ns: int, actions: Sequence[Range]) -> tuple[bool, int]:
    """(True, number of the action that goes on) or (False, number of the one that was last)."""
    number = bisect.bisect_right(actions, time_ns, key=lambda one: one.start_ns) - 1
    return number >= 0 and time_ns <= actions[number].end_ns, number

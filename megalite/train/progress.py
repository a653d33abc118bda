"""How far this rank has come, and what it waits for: seen by an observer of its collectives and from its stack."""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from types import FrameType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from megalite.comm.observe import Call, Observer
from megalite.mesh import Axis

RECENT = 64
"""Collectives of an axis whose names are kept: ranks of one group are apart by what may be in flight, never more."""
MOST_MARKS = 256
_C10D = "torch.distributed.distributed_c10d"
_PASSED_THROUGH = (__name__, "megalite.comm", "megalite.mesh", "torch", "threading", "contextlib", "selectors", "queue")


class Mark(Protocol):
    """A point in a device's work, such as a CUDA event."""

    def query(self) -> bool:
        """Whether the device has come past it."""


@dataclass(frozen=True)
class Waiting:
    """A collective that this rank has been in since a moment of time.monotonic(). number: of its axis, from 1."""

    operation: str
    axis: str
    ranks: tuple[int, ...]
    payload_bytes: int
    number: int
    since: float


@dataclass
class State:
    """What a rank says of itself when a job ends.

    counts: axis -> collectives begun; recent: axis -> their last names, the newest at the end. waits_in: as text, ""
    if it computes. at: where its main thread stands, "file:line in function".
    """

    rank: int
    step: int
    counts: dict[str, int] = field(default_factory=dict)
    recent: dict[str, list[str]] = field(default_factory=dict)
    waits_in: str = ""
    at: str = ""

    def dumps(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> State:
        return cls(**json.loads(text))

    def operation(self, axis: str, number: int) -> str | None:
        """What this rank's collective of that number was, if it is still remembered."""
        back = self.counts.get(axis, 0) - number
        names = self.recent.get(axis, [])
        return names[-1 - back] if 0 <= back < len(names) else None


class Progress(Observer):
    """This rank's step and its collectives, counted by axis.

    mark: on a device that works behind the host's back, makes a mark in its work. A wait returns at once there, so a
    hang is a mark that the device does not come past.
    """

    def __init__(self, mark: Callable[[], Mark] | None = None) -> None:
        self.step = 0
        self.mark = mark
        self._counts: dict[str, int] = {}
        self._recent: dict[str, deque[str]] = {}
        self._numbers: WeakKeyDictionary[Call, int] = WeakKeyDictionary()
        # By thread, since backward may run on others. What raised stays, until that thread's next call.
        self._inside: dict[int, Waiting] = {}
        self._marks: deque[tuple[Mark, Waiting]] = deque()
        self._frame: tuple[FrameType, Waiting] | None = None

    def issuing(self, call: Call) -> None:
        name = call.axis.name
        self._counts[name] = self._numbers[call] = self._counts.get(name, 0) + 1
        self._recent.setdefault(name, deque(maxlen=RECENT)).append(call.operation)
        self._enter(call)

    def issued(self, call: Call) -> None:
        self._inside.pop(threading.get_ident(), None)

    def waiting(self, call: Call) -> None:
        self._enter(call)

    def waited(self, call: Call) -> None:
        inside = self._inside.pop(threading.get_ident(), None)
        if self.mark is not None and inside is not None:
            self._forget_passed_marks()
            if len(self._marks) < MOST_MARKS:  # the oldest are those that count
                self._marks.append((self.mark(), inside))

    @property
    def when(self) -> str:
        """As `in step 3`."""
        return when(self.step)

    def in_collective(self) -> bool:
        """Whether the calling thread is in one, or its last one raised."""
        return threading.get_ident() in self._inside

    def longest_wait(self) -> Waiting | None:
        """The collective that this rank has been in longest, of all its threads and its device; None if in none.

        Also a call of torch.distributed that no observer sees, such as the making of a group.
        """
        inside = list(self._inside.values())
        if self.mark is not None:
            self._forget_passed_marks()
            inside += [waiting for _, waiting in list(self._marks)[:1]]
        if not inside and (unseen := self._unseen()) is not None:
            inside.append(unseen)
        return min(inside, key=lambda waiting: waiting.since, default=None)

    def state(self, rank: int) -> State:
        """What this rank has to say, asked from any thread."""
        waiting = self.longest_wait()
        recent = {name: list(names) for name, names in list(self._recent.items())}
        waits_in = "" if waiting is None else describe(waiting)
        return State(rank, self.step, dict(self._counts), recent, waits_in, place_of_main())

    def _enter(self, call: Call) -> None:
        axis: Axis = call.axis
        number = self._numbers.get(call, self._counts.get(axis.name, 0))
        self._inside[threading.get_ident()] = Waiting(
            call.operation, axis.name, axis.ranks, call.payload_bytes, number, time.monotonic()
        )

    def _forget_passed_marks(self) -> None:
        while self._marks and self._marks[0][0].query():
            self._marks.popleft()

    def _unseen(self) -> Waiting | None:
        frames = [frame for frame, _ in traceback.walk_stack(main_frame()) if frame.f_globals.get("__name__") == _C10D]
        if not frames:
            self._frame = None
        elif self._frame is None or self._frame[0] is not frames[-1]:  # held, so that no later frame is taken for it
            name = frames[-1].f_code.co_name
            self._frame = (frames[-1], Waiting(name, "", (), 0, 0, time.monotonic()))
        return None if self._frame is None else self._frame[1]


def when(step: int) -> str:
    return f"in step {step}" if step else "before the first step"


def describe(waiting: Waiting) -> str:
    """As `all_reduce over dp, number 12, 4,096 bytes`."""
    if not waiting.axis:
        return waiting.operation
    return f"{waiting.operation} over {waiting.axis}, number {waiting.number}, {waiting.payload_bytes:,} bytes"


def main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


def place_of_main() -> str:
    """Where the main thread stands: its innermost frame that is neither torch's nor of what all collectives share."""
    frames: list[FrameType] = [frame for frame, _ in traceback.walk_stack(main_frame())]
    if not frames:
        return "its end"
    own = [frame for frame in frames if not _passed_through(frame.f_globals)]
    frame = (own or frames)[0]
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _passed_through(names: dict[str, Any]) -> bool:
    name = str(names.get("__name__", ""))
    return any(name == other or name.startswith(f"{other}.") for other in _PASSED_THROUGH)

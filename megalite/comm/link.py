"""`Link`: a network as slow as one likes, under any run on the CPU; it takes no processor, only time.

    with observe(Link({"tp": Wire(bytes_per_second=1e9, latency_seconds=1e-3)})):
        ...                                                 whatever crosses tp takes at least so long

A wire carries one collective of this rank at a time, in the order in which they are issued. At issue

    deadline = max(now, the end of the one before) + latency + bytes sent / bandwidth

is noted, the backend does its work meanwhile, and who waits for the result sleeps until the deadline. What is issued
early enough and waited for late enough costs nothing: that is overlap, and it shows on two cores as on thousands.

Each rank has its own clock: it sees its own bytes, and waits for a late peer as it always does. A message from one rank
to another is timed by who reads it: from when it came, if it was waited for; one that was there before has travelled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from megalite.comm.observe import Call, Observer
from megalite.comm.timeline import Timeline
from megalite.mesh import Axis

CROSSING: Mapping[str, frozenset[str]] = {
    "dp": frozenset({"dp", "dense_data", "stage", "world"}),
    "cp": frozenset({"cp", "dense_data", "stage", "world"}),
    "tp": frozenset({"tp", "stage", "world"}),
    "pp": frozenset({"pp", "world"}),
    "edp": frozenset({"edp", "expert_data", "stage", "world"}),
    "ep": frozenset({"ep", "stage", "world"}),
    "etp": frozenset({"etp", "stage", "world"}),
}
"""Axis of a layout -> the mesh's axes that join ranks which differ along it; so do parts of these (`Mesh.divide`)."""

SENT: Mapping[str, Callable[[int, int], float]] = {
    "all_reduce": lambda payload, n: 2 * (n - 1) * payload / n,
    "all_gather": lambda payload, n: (n - 1) * payload,  # what is handed over is one rank's part of the result
    "reduce_scatter": lambda payload, n: (n - 1) * payload / n,
    "all_to_all": lambda payload, n: (n - 1) * payload / n,  # equal parts are assumed
    "ring_shift": lambda payload, n: payload,
    "broadcast": lambda payload, n: payload,  # along a chain
    "receive": lambda payload, n: payload,  # one way; the sender goes on, and the time is its reader's
}
"""Operation -> bytes that a rank sends of a payload over n ranks, by a ring."""

MESSAGES = frozenset({"send", "receive"})
BLOCKED_SECONDS = 2e-4
"""Who waits longer for a message has waited until it came; a shorter wait is that of a message that was there."""

LANES = {
    "all_gather": "gathers",
    "all_reduce": "reductions",
    "reduce_scatter": "reductions",
    "receive": "messages",
}


class Wire(NamedTuple):
    """What joins a rank to its neighbours on one axis."""

    bytes_per_second: float
    latency_seconds: float = 0.0


class Link(Observer):
    """The wires of a rank. wires: axis of the layout -> Wire, or such a pair; other axes stay as fast as they are.

    overlap: False sleeps at issue, so that nothing can be hidden: what a program without overlap would take.
    timeline: where what travels is noted. Raises ValueError for an unknown axis, or a wire that carries nothing.
    """

    delays = True

    def __init__(
        self,
        wires: Mapping[str, tuple[float, float]],
        *,
        overlap: bool = True,
        timeline: Timeline | None = None,
    ) -> None:
        self.wires = {axis: Wire(*wire) for axis, wire in wires.items()}
        for axis, wire in self.wires.items():
            if axis not in CROSSING:
                raise ValueError(f"a link of axis {axis} is unknown; take one of {', '.join(CROSSING)}")
            if not (wire.bytes_per_second > 0 and wire.latency_seconds >= 0):
                raise ValueError(f"a link of axis {axis} needs bytes_per_second > 0 and latency_seconds >= 0: {wire}")
        self.overlap, self.timeline = overlap, timeline
        self._free = dict.fromkeys(self.wires, 0.0)  # when the wire has carried all it was given
        self._deadlines: WeakKeyDictionary[Call, float] = WeakKeyDictionary()

    def issuing(self, call: Call) -> None:
        if call.operation not in MESSAGES:
            self._depart(call)

    def waiting(self, call: Call) -> None:
        if call.operation == "receive":
            self._deadlines[call] = time.perf_counter()

    def waited(self, call: Call) -> None:
        if call.operation == "receive" and time.perf_counter() - self._deadlines.pop(call) > BLOCKED_SECONDS:
            self._depart(call)
        self._sleep(call)

    def _depart(self, call: Call) -> None:
        crossed = [axis for axis in self.wires if _root(call.axis).name in CROSSING[axis]]
        if not crossed:
            return
        start = max(time.perf_counter(), *(self._free[axis] for axis in crossed))
        deadline = start + max(transfer_seconds(call, self.wires[axis]) for axis in crossed)
        self._free.update(dict.fromkeys(crossed, deadline))
        self._deadlines[call] = deadline
        if self.timeline is not None:
            self.timeline.add(LANES.get(call.operation, "other transfers"), str(call), start, deadline)

    def issued(self, call: Call) -> None:
        if not self.overlap:
            self._sleep(call)

    def _sleep(self, call: Call) -> None:
        time.sleep(max(0.0, self._deadlines.get(call, 0.0) - time.perf_counter()))


def transfer_seconds(call: Call, wire: Wire) -> float:
    """How long a collective takes on a wire that is free."""
    return wire.latency_seconds + SENT[call.operation](call.payload_bytes, call.axis.size) / wire.bytes_per_second


def _root(axis: Axis) -> Axis:
    """The axis of the mesh that this one is a part of."""
    return axis if axis.parent is None else _root(axis.parent)

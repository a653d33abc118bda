"""Who watches this rank's collectives: a watchdog, a meter of waiting, a profiler's ranges.

    with observe(mine):
        ...                      mine.issuing(call), issued(call), waiting(call), waited(call) around each collective

The observers are a plain module variable, as the open WeightGradStore is and for its reason: autograd runs CUDA nodes
on threads of its own. Without observers a collective costs one look at an empty list.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megalite.mesh import Axis


@dataclass(frozen=True, eq=False)
class Call:
    """One collective of this rank. operation: as in `all_reduce`; payload_bytes: of the tensor that was handed over."""

    operation: str
    axis: Axis
    payload_bytes: int

    def __str__(self) -> str:
        return f"{self.operation} over {self.axis.name}"


class Observer:
    """What can be seen of a collective; each does nothing unless it is overridden. Called on the thread that calls.

    delays: one that takes time of its own is the innermost, so that all others see its time as the collective's.
    """

    delays = False

    def issuing(self, call: Call) -> None:
        """It is about to be handed to the backend."""

    def issued(self, call: Call) -> None:
        """It travels."""

    def waiting(self, call: Call) -> None:
        """This rank cannot go on without the result."""

    def waited(self, call: Call) -> None:
        """The result is there (on CUDA: the stream will wait for it)."""


_observers: list[Observer] = []


@contextmanager
def observe(observer: Observer) -> Iterator[None]:
    """`observer` sees every collective of this process in the block; several may look at once."""
    place = len(_observers) if observer.delays else sum(not other.delays for other in _observers)
    _observers.insert(place, observer)
    try:
        yield
    finally:
        _observers.remove(observer)


@contextmanager
def seen(call: Call, before: str, after: str) -> Iterator[None]:
    """Tell all observers, by the names of two of their methods, that something begins and, unless it raises, ends."""
    for observer in _observers:
        getattr(observer, before)(call)
    yield
    for observer in reversed(_observers):
        getattr(observer, after)(call)

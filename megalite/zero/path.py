"""The order in which units are entered, learned from one pass for the next."""

from __future__ import annotations

from typing import NamedTuple

from megalite.zero.unit import Unit


class Path:
    """The units of a pass in the order of entering: what was learned from the last pass says what comes next."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self._known: list[Unit] = []
        self._seen: list[Unit] = []
        self._returning: list[Unit] = []  # those that backward comes back to

    @property
    def is_known(self) -> bool:
        """Whether a pass has shown at least its beginning."""
        return bool(self._known or self._seen)

    @property
    def latest(self) -> list[Unit]:
        """The whole way as it is known, be it from the pass that goes on."""
        return self._known or self._seen

    @property
    def back(self) -> list[Unit]:
        """The way back, as long as no backward has shown it."""
        return self._returning[::-1]

    def expect(self, units: list[Unit]) -> None:
        """The next pass is to enter these, in this order."""
        self._known = units

    def enter(self, unit: Unit, *, following: list[Unit], returns: bool = True) -> list[Unit]:
        """Those that come after `unit`, `prefetch` of them. following: what comes after this path; where that begins
        with the same unit, it stands before them."""
        if not self._seen or self._seen[-1] is not unit:
            self._seen.append(unit)
            if returns:
                self._returning.append(unit)
        place = len(self._seen) - 1
        if place >= len(self._known) or self._known[place] is not unit:
            return []
        rest = self._known[place + 1 :]
        ahead = [*rest, *(one for one in following if one is not unit)][: self.prefetch]
        return ahead if rest or following[:1] != [unit] else [unit, *ahead]

    def end(self) -> None:
        """The pass is over, and its order is what the next one is expected to keep; one without units says nothing."""
        if self._seen:
            self._known, self._seen, self._returning = self._seen, [], []


class Way(NamedTuple):
    """Through one stage and back."""

    forward: Path
    backward: Path

    def first(self, *, in_backward: bool) -> list[Unit]:
        """What a pass is expected to enter."""
        return (self.backward.latest or self.forward.back) if in_backward else self.forward.latest

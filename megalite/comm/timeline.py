"""`Timeline`: what happened when, in lanes, as text for a terminal or as a picture.

    timeline = Timeline()
    with observe(Link(wires, timeline=timeline)), observe(timeline):
        with timeline.range("F0"): ...                       compute of one's own naming
    print(timeline.text())

A `Link` notes gathers and reductions, from when their bytes have the wire until they are there; observing, the timeline
itself notes when this rank stands still, to issue a collective or for its result.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from megalite.comm.observe import Call, Observer

LANES = ("gathers", "compute", "waits", "reductions", "other transfers")
COLOURS = {"gathers": "#4c72b0", "compute": "#55a868", "waits": "#d0d0d0", "reductions": "#c44e52"}
SHORTEST_WAIT_SECONDS = 1e-3  # below it nothing would be seen


class Event(NamedTuple):
    """start, end: seconds on the clock of time.perf_counter."""

    lane: str
    name: str
    start: float
    end: float


class Timeline(Observer):
    """Events in the order in which they were noted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._since = 0.0

    def add(self, lane: str, name: str, start: float, end: float) -> None:
        assert lane in LANES, lane
        self.events.append(Event(lane, name, start, end))

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """What happens in the block is compute, under this name."""
        start = time.perf_counter()
        yield
        self.add("compute", name, start, time.perf_counter())

    def issuing(self, call: Call) -> None:
        self._since = time.perf_counter()

    def issued(self, call: Call) -> None:
        self.waited(call)

    def waiting(self, call: Call) -> None:
        self._since = time.perf_counter()

    def waited(self, call: Call) -> None:
        now = time.perf_counter()
        if now - self._since >= SHORTEST_WAIT_SECONDS:
            self.add("waits", str(call), self._since, now)

    def between(self, start: float, end: float) -> Timeline:
        """A part of it: what begins within [start, end)."""
        part = Timeline()
        part.events = [event for event in self.events if start <= event.start < end]
        return part

    def text(self, *, width: int = 100) -> str:
        """A line a lane, `width` characters of time. A bar begins with its name, or a transfer's number in its lane."""
        if not self.events:
            return "(nothing happened)"
        first, last = self._span()
        scale = width / max(last - first, 1e-9)
        margin = max(len(lane) for lane in LANES) + 1
        end = f"{1000 * (last - first):.0f} ms"
        lines = [" " * margin + "0" + end.rjust(width - 1)]
        for lane, events in self._lanes():
            row = [" "] * width
            for number, event in enumerate(events):
                left = min(round((event.start - first) * scale), width - 1)
                length = max(1, round((event.end - first) * scale) - left)
                row[left : left + length] = _label(event, number)[:length].ljust(length, _FILL[lane])
            lines.append(lane.ljust(margin) + "".join(row).rstrip())
        return "\n".join(lines)

    def draw(self, path: Path, *, title: str = "") -> None:
        """The same as a picture; its kind by the path's ending. Needs the extra `plot`."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ValueError("drawing needs matplotlib, which is not there: pip install 'megalite[plot]'") from error

        lanes = self._lanes()
        first, _ = self._span()
        figure = Figure(figsize=(14, 0.6 * len(lanes) + 1.4), layout="constrained")
        axes = figure.subplots()
        for height, (lane, events) in enumerate(reversed(lanes)):
            bars = [(1000 * (event.start - first), 1000 * (event.end - event.start)) for event in events]
            axes.broken_barh(
                bars, (height - 0.4, 0.8), facecolors=COLOURS.get(lane, "#8c8c8c"), edgecolors="white", linewidth=0.8
            )
            for number, (event, (left, length)) in enumerate(zip(events, bars, strict=True)):
                label = _label(event, number)
                axes.text(left + length / 2, height, label, ha="center", va="center", fontsize=8, clip_on=True)
        axes.set_yticks(range(len(lanes)), [lane for lane, _ in reversed(lanes)])
        axes.set_xlabel("milliseconds")
        axes.set_title(title)
        axes.margins(x=0)
        figure.savefig(path, dpi=120)

    def _lanes(self) -> list[tuple[str, list[Event]]]:
        """Those with events, from above to below."""
        found = [(lane, [event for event in self.events if event.lane == lane]) for lane in LANES]
        return [(lane, events) for lane, events in found if events]

    def _span(self) -> tuple[float, float]:
        return min(event.start for event in self.events), max(event.end for event in self.events)


_FILL = {"gathers": "=", "compute": "#", "waits": ".", "reductions": "=", "other transfers": "="}


def _label(event: Event, number: int) -> str:
    """Of compute its name, of what travels its number; of waiting none."""
    return {"compute": event.name, "waits": ""}.get(event.lane, str(number + 1))

"""How far a long run is: a bar on a terminal, a line now and then elsewhere; both on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from megalite.data.encode import Counts

LINE_SECONDS = 10.0
REFRESHES_PER_SECOND = 5.0
MEGABYTE = 1e6


class Display:
    """`show` is called as often as one likes. total_bytes, read_bytes: of the input's files.

    begun_bytes: what an earlier run had read already, which says nothing of this one's speed.
    """

    def __init__(self, console: Console, total_bytes: int, begun_bytes: int) -> None:
        self._console, self._total, self._begun = console, max(1, total_bytes), begun_bytes
        self._start = self._last = time.monotonic()
        self._bar = Progress(
            BarColumn(), TextColumn("{task.percentage:.0f}%  {task.description}  eta"), TimeRemainingColumn(),
            console=console, auto_refresh=False, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=self._total, completed=begun_bytes)
        self._every = 1 / REFRESHES_PER_SECOND if console.is_terminal else LINE_SECONDS

    def show(self, counts: Counts, read_bytes: int) -> None:
        now = time.monotonic()
        if now - self._last < self._every:
            return
        self._last = now
        speed = (read_bytes - self._begun) / max(1e-9, now - self._start)
        text = f"{counts.documents:,} documents  {counts.tokens:,} tokens  {speed / MEGABYTE:.1f} MB/s"
        if self._console.is_terminal:
            self._bar.update(self._task, completed=read_bytes, description=text, refresh=True)
        else:
            left = f"{(self._total - read_bytes) / speed:.0f} s" if speed > 0 else "unknown"
            self._console.print(f"{100 * read_bytes / self._total:.0f}%  {text}  eta {left}", soft_wrap=True)


@contextmanager
def displayed(total_bytes: int, *, begun_bytes: int) -> Iterator[Display]:
    """A display that is gone from the terminal at the end."""
    console = Console(stderr=True, highlight=False)
    display = Display(console, total_bytes, begun_bytes)
    if not console.is_terminal:
        yield display
        return
    with display._bar:
        yield display

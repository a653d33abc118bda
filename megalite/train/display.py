"""How a run looks on a terminal: lines, or with rich a progress bar over a line that is redrawn.

Nothing here has a thread of its own: what is shown changes when a step ends, so a print can't land in the middle of it.
The cursor is never hidden, so that whatever ends the run, even a kill, leaves the terminal as it was.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REFRESH_SECONDS = 0.25
BAR_WIDTH = 40
LEAST_BAR_WIDTH = 10


class Display(Protocol):
    """What rank 0 shows while it trains."""

    def line(self, text: str) -> None:
        """A line that stays."""

    def step(self, step: int, fields: Sequence[str], *, due: bool) -> None:
        """A step has ended. fields: what there is to say of it; due: whether a plain line is wanted."""

    def close(self) -> None:
        """Nothing more comes. May be called twice."""


def open_display(choice: str, *, steps: int, console: Console | None = None) -> Display:
    """choice: auto, rich or plain (config.log.display); auto is rich where standard output is a terminal that can."""
    if choice == "plain":
        return PlainDisplay()
    from rich.console import Console

    console = console or Console(force_terminal=True if choice == "rich" else None)
    if choice == "auto" and (not console.is_terminal or console.is_dumb_terminal):
        return PlainDisplay()
    return RichDisplay(console, steps=steps)


class PlainDisplay:
    """Lines on standard output, each written out at once."""

    def line(self, text: str) -> None:
        print(text, flush=True)

    def step(self, step: int, fields: Sequence[str], *, due: bool) -> None:
        if due:
            print("  ".join(fields), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class RichDisplay:
    """A bar, and the present step's fields under it, at the foot of the terminal; other lines go above.

    Drawn again at most every REFRESH_SECONDS, on the thread that trains. What others print to standard output and
    standard error goes above as well.
    """

    def __init__(self, console: Console, *, steps: int) -> None:
        from rich.live import Live

        self.console, self.steps = console, steps
        self.now, self.fields, self.drawn = 0, list[str](), -math.inf
        self.live = Live(console=console, auto_refresh=False, get_renderable=self._render)
        self.live.start()
        console.show_cursor(True)

    def line(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, step: int, fields: Sequence[str], *, due: bool) -> None:
        self.now, self.fields = step, list(fields)
        now = time.monotonic()
        if now - self.drawn >= REFRESH_SECONDS:
            self.live.refresh()
            self.drawn = now

    def close(self) -> None:
        if self.live.is_started:
            self.live.stop()  # draws what is last

    def _render(self) -> RenderableType:
        from rich.console import Group
        from rich.padding import Padding
        from rich.progress_bar import ProgressBar
        from rich.text import Text

        width = self.console.width
        lines = [Text(line, no_wrap=True, overflow="ellipsis") for line in fold(self.fields, width)]
        bar = min(BAR_WIDTH, width)
        if not self.fields or bar < LEAST_BAR_WIDTH:
            return Group(*lines)
        drawn = ProgressBar(total=self.steps, completed=self.now, width=bar)
        return Group(Padding(drawn, 0, expand=False), *lines)  # a bar alone would not end its line


def fold(fields: Sequence[str], width: int) -> list[str]:
    """Fields as lines of at most `width`, two spaces between them; a field is never broken, and may alone be longer."""
    lines: list[str] = []
    for field in fields:
        if lines and len(lines[-1]) + 2 + len(field) <= width:
            lines[-1] += f"  {field}"
        else:
            lines.append(field)
    return lines


def step_fields(step: int, metrics: Mapping[str, float], *, steps: int, eta_seconds: float) -> list[str]:
    """What a person sees of a step."""
    rate, each = metrics["perf/tokens_per_sec"], metrics["perf/tokens_per_sec_per_rank"]
    memory = max((value for name, value in metrics.items() if name.startswith("memory/")), default=0.0)
    fields = [
        f"step {step:>{len(str(steps))}}/{steps}",
        f"loss {metrics['train/loss']:.4f}",
        f"grad_norm {metrics['train/grad_norm']:.3f}",
        f"lr {metrics['train/lr']:.2e}",
        f"{rate:,.0f} tokens/s ({each:,.0f} a rank)",
        f"mfu {metrics['perf/mfu']:.1%}" if "perf/mfu" in metrics else "mfu n/a",
        f"memory {memory:.2f} GiB",
        f"eta {duration(eta_seconds)}",
    ]
    return fields if math.isfinite(metrics["train/grad_norm"]) else [*fields, "skipped: its gradient is not finite"]


def validation_line(step: int, metrics: Mapping[str, float]) -> str:
    """All val/ metrics of a step, or empty if it has none."""
    values = [f"{name.removeprefix('val/')} {value:.4f}" for name, value in metrics.items() if name.startswith("val/")]
    return f"validation after step {step}: {', '.join(values)}" if values else ""


def duration(seconds: float) -> str:
    """59 s, 4m 05s, 3h 07m, 2d 04h: two units, the smaller one cut off."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    minutes, hours, days = whole // 60, whole // 3600, whole // 86400
    if not minutes:
        return f"{whole} s"
    if not hours:
        return f"{minutes}m {whole % 60:02}s"
    return f"{hours}h {minutes % 60:02}m" if not days else f"{days}d {hours % 24:02}h"

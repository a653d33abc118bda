"""A timeline drawn: as text for a terminal or a page, as SVG, as PNG (extra plot).

One row a rank, time to the right, a box an action as wide as it is long. Hues tell F, B, W and BW apart (Okabe and
Ito's, and one of Tol's, which the colour-blind see apart too); of a rank's virtual stages the first is dark, the last
light.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from megalite.pipeline.schedule import KINDS, Action, Number, Schedule
from megalite.pipeline.simulate import Event, Timeline

HUES = {"F": (0, 114, 178), "B": (213, 94, 0), "W": (0, 158, 115), "BW": (170, 68, 153)}
MEANINGS = {"F": "forward", "B": "input gradient", "W": "weight gradient", "BW": "both gradients"}
LIGHTEST = 0.55  # part of white in the last virtual stage's colour
MOST_BANDS = 12  # of text; what is longer is drawn smaller

Colour = tuple[int, int, int]
BLACK, WHITE = (0, 0, 0), (255, 255, 255)


class Look(NamedTuple):
    """Of one action. name: its kind, as it stands in text; fill: the box; ink: what is written in it."""

    name: str
    fill: Colour
    ink: Colour


Looks = dict[tuple[str, int], Look]


def looks(schedule: Schedule) -> Looks:
    """(kind, stage) -> how it looks. Of two virtual stages the second is written small, of more each has a letter: F3
    f3, or Fa3 Fb3 Fc3."""
    return {
        (kind, stage): _look(kind, virtual_stage, schedule.stages_per_rank)
        for rank in range(schedule.ranks)
        for virtual_stage, stage in enumerate(schedule.stages_of(rank))
        for kind in KINDS
    }


def _look(kind: str, virtual_stage: int, virtual_stages: int) -> Look:
    name = kind
    if virtual_stages == 2 and virtual_stage:
        name = kind.lower()
    elif virtual_stages > 2:
        name = kind + chr(ord("a") + virtual_stage)
    white = LIGHTEST * virtual_stage / max(1, virtual_stages - 1)
    red, green, blue = (round(part + (255 - part) * white) for part in HUES[kind])
    fill = (red, green, blue)
    return Look(name, fill, WHITE if _luminance(fill) < 0.3 else BLACK)  # a contrast of 3 : 1 at least


def _luminance(colour: Colour) -> float:
    """From 0 to 1, as WCAG 2 defines it."""
    linear = [part / 255 / 12.92 if part <= 10 else ((part / 255 + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def legend(schedule: Schedule) -> list[tuple[Look, str]]:
    """What stands for what, of the kinds and virtual stages that a schedule has."""
    found = []
    virtual_stages = schedule.stages_per_rank
    for kind in _kinds(schedule):
        for virtual_stage in range(virtual_stages):
            which = f", virtual stage {virtual_stage}" if virtual_stages > 1 else ""
            found.append((_look(kind, virtual_stage, virtual_stages), MEANINGS[kind] + which))
    return found


def _kinds(schedule: Schedule) -> list[str]:
    there = {action.kind for row in schedule.rows for action in row}
    return [kind for kind in KINDS if kind in there]


# Text


class Cell(NamedTuple):
    """A character. look: of the action in whose box it stands; begins: whether the box begins with it."""

    letter: str
    look: Look | None = None
    begins: bool = False


def text(timeline: Timeline, *, width: int = 100, colour: bool = False) -> str:
    """Rows of characters: F0B0W0, each box filled up with dashes; dots where a rank waits between its first action and
    its last.

    So wide that each box has room for its name and number, in bands one below another where that is more than `width`,
    and smaller where it would be more than MOST_BANDS of them. colour: with a terminal's colours.
    """
    margin = len(f"rank {timeline.schedule.ranks - 1} ")
    width = max(width - margin, 20)
    begin = min(row[0].start for row in timeline.rows)
    drawn = looks(timeline.schedule)
    scale = _scale(timeline, drawn, width)
    rows = [list(_cells(drawn, row, begin, scale)) for row in timeline.rows]
    lines, left, total = [], 0, max(map(len, rows))
    while left < total:
        right = total if left + width >= total else _cut(rows, left, left + width)
        first, last = (number(begin + Fraction(edge) / scale) for edge in (left, right))
        room = right - left - len(first)
        lines.append(" " * margin + first + (last.rjust(room) if room > len(last) else ""))
        for rank, row in enumerate(rows):
            lines.append((f"rank {rank} ".ljust(margin) + _paint(row[left:right], colour)).rstrip())
        left = right
    return "\n".join(lines)


def text_legend(schedule: Schedule, *, colour: bool = False) -> str:
    """How each kind is written, and each virtual stage."""
    words = []
    for kind in _kinds(schedule):
        name = _look(kind, 0, 1)
        words.append(_paint([Cell(letter, name) for letter in kind], colour) + f" {MEANINGS[kind]}")
    virtual_stages = schedule.stages_per_rank
    if virtual_stages == 2:
        words.append("small letters: a rank's second stage")
    elif virtual_stages > 2:
        words.append(f"a to {chr(ord('a') + virtual_stages - 1)}: a rank's stages in order")
    return ", ".join([*words, "dots: waiting"])


def _scale(timeline: Timeline, drawn: Looks, width: int) -> Fraction:
    """Cells a unit of time."""
    events = [event for row in timeline.rows for event in row if event.end > event.start]
    if not events:
        return Fraction(1)
    lengths = [Fraction(event.end - event.start) for event in events]
    names = [len(_label(event.action, drawn)) for event in events]
    shortest = min(lengths)
    for spare in (0, 1):  # where boxes do not begin with a cell, rounding may take one from them
        wanted = max((name + spare) / length for name, length in zip(names, lengths, strict=True))
        scale = math.ceil(wanted * shortest) / shortest  # whole cells for the shortest, so that equal boxes look equal
        if all((Fraction(event.start) * scale).denominator == 1 for event in events):
            break
    return min(scale, Fraction(MOST_BANDS * width) / Fraction(timeline.makespan))


def _label(action: Action, drawn: Looks) -> str:
    return drawn[action.kind, action.stage].name + str(action.microbatch)


def _cells(drawn: Looks, row: Sequence[Event], begin: Number, scale: Fraction) -> Iterator[Cell]:
    at, idle = 0, " "
    for action, start, end in row:
        left, right = (round(Fraction(time - begin) * scale) for time in (start, end))
        yield from [Cell(idle)] * (left - at)
        look = drawn[action.kind, action.stage]
        label = _label(action, drawn)[: right - left].ljust(right - left, "-")
        yield from (Cell(letter, look, place == 0) for place, letter in enumerate(label))
        at, idle = right, "."


def _cut(rows: Sequence[Sequence[Cell]], left: int, right: int) -> int:
    """Where a band ends, at `right` at the latest: where it goes through the fewest boxes."""

    def through(edge: int) -> int:
        return sum(edge < len(row) and row[edge].look is not None and not row[edge].begins for row in rows)

    return min(range(right, left + 3 * (right - left) // 4, -1), key=through)


def _paint(cells: Sequence[Cell], colour: bool) -> str:
    if not colour:
        return "".join(cell.letter for cell in cells)
    painted, before = [], None
    for cell in cells:
        if cell.look != before:
            painted.append(_escape(cell.look) if cell.look else "\x1b[0m")
            before = cell.look
        painted.append(cell.letter)
    return "".join(painted) + ("\x1b[0m" if before else "")


def _escape(look: Look) -> str:
    red, green, blue = look.fill
    return f"\x1b[0;{37 if look.ink == WHITE else 30};48;2;{red};{green};{blue}m"


def number(value: Number) -> str:
    """At most four decimals, none that say nothing."""
    return f"{float(value):.4f}".rstrip("0").rstrip(".")


# Pictures

ROW, GAP, FONT, MARGIN = 22, 6, 11, 60  # pixels
NARROWEST, WIDEST = 900, 8000  # pixels, of all the time together
GREY = (200, 200, 200)


class Box(NamedTuple):
    """An action in a picture. left, length: in units of time, from the first begin of any action."""

    rank: int
    action: Action
    left: float
    length: float
    look: Look
    paired: bool


def boxes(timeline: Timeline) -> list[Box]:
    """All actions that take time, rank by rank, in order."""
    schedule, drawn = timeline.schedule, looks(timeline.schedule)
    found = []
    begin = min(row[0].start for row in timeline.rows)
    for rank, row in enumerate(timeline.rows):
        for before, (action, start, end) in zip([None, *row], row, strict=False):
            if end > start:
                paired = action in schedule.paired or (before is not None and before.action in schedule.paired)
                left, length = float(start - begin), float(end - start)
                found.append(Box(rank, action, left, length, drawn[action.kind, action.stage], paired))
    return found


def svg(timeline: Timeline, *, title: str = "") -> str:
    """A picture that needs nothing but a browser: boxes bear their micro-batch, and say all when pointed at; a grey
    line runs through a rank's span; the two of a pair are framed."""
    schedule, drawn = timeline.schedule, boxes(timeline)
    if not drawn:
        raise ValueError(f"schedule {schedule.name} takes no time, so there is nothing to draw; give costs above 0")
    time = float(timeline.makespan)
    scale = min(max(NARROWEST, 2 * FONT * time / min(box.length for box in drawn)), WIDEST) / time
    top = 3 * FONT
    below = top + schedule.ranks * (ROW + GAP) + FONT
    entries = legend(schedule)
    width, height = round(MARGIN + time * scale + 2 * FONT), below + 2 * FONT + ROW * len(entries)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'font-family="sans-serif" font-size="{FONT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        _written(title or schedule.name, MARGIN, 1.5 * FONT),
    ]
    for rank in range(schedule.ranks):
        mine = [box for box in drawn if box.rank == rank]
        y = top + rank * (ROW + GAP)
        parts.append(_written(f"rank {rank}", FONT, y + 0.7 * ROW))
        if mine:
            left, right = mine[0].left, mine[-1].left + mine[-1].length
            parts.append(_filled(GREY, MARGIN + left * scale, y + ROW / 2 - 1, (right - left) * scale, 2))
        parts += [_boxed(box, MARGIN + box.left * scale, y, box.length * scale) for box in mine]
    parts.append(_written("0", MARGIN, below + FONT))
    parts.append(_written(number(timeline.makespan), MARGIN + time * scale, below + FONT, anchor="end"))
    for place, (look, meaning) in enumerate(entries):
        y = below + 2 * FONT + place * ROW
        parts.append(_filled(look.fill, MARGIN, y, ROW, FONT + 3) + _written(meaning, MARGIN + 1.5 * ROW, y + FONT))
    return "\n".join([*parts, "</svg>\n"])


def _boxed(box: Box, x: float, y: float, width: float) -> str:
    label = str(box.action.microbatch)
    drawn = _filled(box.look.fill, x, y, width, ROW, line=BLACK if box.paired else WHITE)
    if width >= 0.7 * FONT * len(label):
        drawn += _written(label, x + width / 2, y + 0.7 * ROW, anchor="middle", ink=box.look.ink)
    times = f"{box.action}: {number(box.left)} to {number(box.left + box.length)}"
    return f"<g><title>{times}</title>{drawn}</g>"


def _filled(fill: Colour, x: float, y: float, width: float, height: float, *, line: Colour | None = None) -> str:
    stroke = f' stroke="{_hex(line)}" stroke-width="0.8"' if line else ""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{_hex(fill)}"{stroke}/>'


def _written(words: str, x: float, y: float, *, anchor: str = "start", ink: Colour = BLACK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{_hex(ink)}">{escape(words)}</text>'


def _hex(colour: Colour) -> str:
    return "#" + "".join(f"{part:02x}" for part in colour)


def png(timeline: Timeline, path: Path, *, title: str = "") -> None:
    """The same as a file whose kind its ending says (.png, .pdf). Raises ValueError without matplotlib, or for an
    ending that it does not know."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ValueError("drawing needs matplotlib, which is not there: pip install 'megalite[plot]'") from error

    schedule, drawn = timeline.schedule, boxes(timeline)
    figure = Figure(figsize=(14, 0.4 * schedule.ranks + 1.6), layout="constrained")
    axes = figure.subplots()
    room = float(timeline.makespan) / 160  # of one digit
    for box in drawn:
        axes.broken_barh(
            [(box.left, box.length)], (box.rank - 0.4, 0.8), facecolors=_hex(box.look.fill), edgecolors="white", lw=0.5
        )
        if box.length > room * len(label := str(box.action.microbatch)):
            middle = box.left + box.length / 2
            axes.text(middle, box.rank, label, ha="center", va="center", fontsize=7, color=_hex(box.look.ink))
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.set_title(title or schedule.name)
    axes.margins(x=0)
    patches = [Patch(facecolor=_hex(look.fill), label=meaning) for look, meaning in legend(schedule)]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=120)

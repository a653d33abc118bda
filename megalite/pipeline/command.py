"""The command line of `python -m megalite.pipeline`: schedules on paper, without torch.

    zb_v --ranks 4 --microbatches 8 --costs 1,1,1      its timeline, bubbles and peaks
    --all --ranks 4 --microbatches 8                   the table of all schedules
    --file mine.txt                                    one of your own, checked first

Exit codes: 0 done, 2 refused, in one line.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.draw import number, png, svg, text, text_legend
from megalite.pipeline.lower import check
from megalite.pipeline.schedule import Number, Schedule, parse
from megalite.pipeline.simulate import Costs, Timeline, peaks, simulate

REFUSED_CODE = 2
RANKS, MICROBATCHES = 4, 8
NUMBER = re.compile(r"\d+(/0*[1-9]\d*)?|\d*\.\d+")
COLUMNS = ("schedule", "v", "makespan", "bubble", "bubble_span", "idle_span", "peak", "backward")

Exact = int | Fraction


def main(arguments: Sequence[str] | None = None) -> int:
    """Does what the command line asks for; the exit code."""
    try:
        options = _parser().parse_args(arguments)
        _require_one(options)
        for line in _table(options) if options.all else _one(options):
            print(line)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED_CODE
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # `| head` has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return REFUSED_CODE
    return 0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; --help says more")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m megalite.pipeline",
        description="A pipeline schedule on paper: its timeline, how long ranks wait, what they hold.",
        epilog="schedules:\n" + "\n".join(f"  {name:<16}{entry.about}" for name, entry in SCHEDULES.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of a schedule, below")
    add("--all", action="store_true", help="the table of all schedules")
    add(
        "--file",
        type=Path,
        metavar="FILE",
        help="a schedule as --print or --csv write it: a line a rank, as F0@0 BW0@0",
    )
    add("--ranks", type=_count, metavar="P", help=f"({RANKS})")
    add("--microbatches", type=_count, metavar="M", help=f"a step ({MICROBATCHES})")
    add("--virtual-stages", type=_count, metavar="V", help="stages a rank, of looped schedules (2)")
    add("--group", type=_count, metavar="G", help="of interleaved: least micro-batches through a stage in a go (P)")
    times = "1,1,1"
    add("--costs", type=_times, default=times, metavar="F,B,W", help=f"times of a rank's whole share ({times})")
    add("--latency", type=_number, default=0, metavar="T", help="of a message between ranks, in the same unit (0)")
    add("--overlap", type=_number, default=1, metavar="PART", help="of F + B that a pair F&B takes (1: no overlap)")
    held = "held from F to B and from B to W, of one micro-batch and a rank's whole share (1,1)"
    add("--held", type=_held, default="1,1", metavar="M_B,M_W", help=held)
    add("--print", action="store_true", help="the schedule itself, as words, and nothing else")
    add("--csv", action="store_true", help="the same with commas")
    add("--svg", type=Path, metavar="FILE", help="draw it, for a browser")
    add("--png", type=Path, metavar="FILE", help="draw it (needs megalite[plot])")
    add("--width", type=_count, help="characters a line (the terminal's)")
    add("--colour", choices=("auto", "always", "never"), default="auto", help="of the text (auto)")
    return parser


def _count(written: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", written) or int(written) < 1:
        raise argparse.ArgumentTypeError(f"{written} is not a whole number from 1 up")
    return int(written)


def _number(written: str) -> Exact:
    """Exact: 2, 0.5, 1/3."""
    if not NUMBER.fullmatch(written):
        raise argparse.ArgumentTypeError(f"{written!r} is not a number from 0 up, as 2, 0.5 or 1/3")
    return _plain(Fraction(written))


def _plain(fraction: Fraction) -> Exact:
    return int(fraction) if fraction.denominator == 1 else fraction


def _numbers(written: str, count: int, example: str) -> tuple[Exact, ...]:
    words = written.split(",")
    if len(words) != count:
        raise argparse.ArgumentTypeError(f"{written} has {len(words)} numbers; give {count}, as {example}")
    return tuple(map(_number, words))


def _times(written: str) -> tuple[Exact, ...]:
    times = _numbers(written, 3, "1,1,1")
    if not all(times[:2]):
        raise argparse.ArgumentTypeError(f"{written} has a pass that takes no time; F and B must be above 0")
    return times


def _held(written: str) -> tuple[Exact, ...]:
    return _numbers(written, 2, "1,1")


def _require_one(options: argparse.Namespace) -> None:
    """Of NAME, --all and --file one; and nothing beside it that would say nothing."""
    asked = [
        word for word, given in (("NAME", options.name), ("--file", options.file), ("--all", options.all)) if given
    ]
    if len(asked) != 1:
        found = f"both {' and '.join(asked)}" if asked else "none"
        raise ValueError(f"give a schedule's NAME, --file FILE or --all: there is {found}; --help says more")
    makes = ("ranks", "microbatches", "virtual_stages", "group")
    draws = ("print", "csv", "svg", "png")
    for word, idle in (("--file", makes), ("--all", draws)):
        for option in idle:
            if word in asked and getattr(options, option):
                why = "the file says that itself" if word == "--file" else "which is for one schedule"
                raise ValueError(f"--{option.replace('_', '-')} does not go with {word}: {why}")


def _made(name: str, options: argparse.Namespace, *, virtual_stages: int | None, group: int | None) -> Schedule:
    return make(
        name,
        ranks=options.ranks or RANKS,
        microbatches=options.microbatches or MICROBATCHES,
        virtual_stages=virtual_stages,
        group=group,
    )


def _timeline(schedule: Schedule, options: argparse.Namespace) -> Timeline:
    """Checked and timed. A stage takes its part of what a rank's whole share takes, so schedules compare."""
    check(schedule)
    share = Fraction(1, schedule.stages_per_rank)
    forward, input_gradient, weight_gradient = (_plain(share * time) for time in options.costs)
    costs = Costs(forward, input_gradient, weight_gradient, latency=options.latency, overlap=options.overlap)
    return simulate(schedule, costs)


def _one(options: argparse.Namespace) -> Iterator[str]:
    if options.file:
        schedule = _read(options.file)
    else:
        schedule = _made(options.name, options, virtual_stages=options.virtual_stages, group=options.group)
    timeline = _timeline(schedule, options)
    if options.svg:
        options.svg.write_text(svg(timeline))
    if options.png:
        png(timeline, options.png)
    if options.print or options.csv:
        yield schedule.to_csv() if options.csv else str(schedule)
    else:
        yield from _report(timeline, options)


def _read(path: Path) -> Schedule:
    try:
        return parse(path.read_text(encoding="utf-8-sig"), name=path.stem)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text; write a line a rank, as F0@0 BW0@0") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _report(timeline: Timeline, options: argparse.Namespace) -> Iterator[str]:
    schedule = timeline.schedule
    width = options.width or shutil.get_terminal_size((100, 24)).columns
    colour = options.colour == "always" or (options.colour == "auto" and sys.stdout.isatty())
    a_rank = f", {schedule.stages_per_rank} stages a rank" if schedule.stages_per_rank > 1 else ""
    yield f"{schedule.name}: {schedule.ranks} ranks, {schedule.microbatches} micro-batches{a_rank}"
    yield text(timeline, width=width, colour=colour)
    yield text_legend(schedule, colour=colour)
    yield ""
    yield f"makespan     {number(timeline.makespan)}"
    yield f"bubble       {number(timeline.bubble)} of all ranks' time over the makespan"
    yield f"bubble_span  {number(timeline.bubble_span)} of a rank's own span, where it is most"
    yield f"idle_span    {number(timeline.idle_span)} within a rank's span, where it is most"
    yield f"peaks        {' '.join(map(number, _peaks(schedule, options)))} micro-batches' activations, rank by rank"
    whole_from = SCHEDULES[schedule.name].whole_from(schedule.ranks) if options.name else 0
    if schedule.microbatches < whole_from:
        yield f"its formulas ask for {whole_from} micro-batches or more"


def _peaks(schedule: Schedule, options: argparse.Namespace) -> list[Number]:
    until_input_gradient, until_weight_gradient = options.held
    return peaks(schedule, until_input_gradient=until_input_gradient, until_weight_gradient=until_weight_gradient)


def _table(options: argparse.Namespace) -> Iterator[str]:
    """All schedules; --virtual-stages and --group where they have them."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for name, entry in SCHEDULES.items():
        schedule = _made(
            name,
            options,
            virtual_stages=options.virtual_stages if entry.family.most is None else None,
            group=options.group if entry.grouped else None,
        )
        timeline = _timeline(schedule, options)
        measures = (timeline.makespan, timeline.bubble, timeline.bubble_span, timeline.idle_span)
        peak = max(_peaks(schedule, options))
        kind = "B, W" if entry.splits_backward else "BW"
        rows.append((name, str(schedule.stages_per_rank), *map(number, (*measures, peak)), kind))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if 0 < place < 7 else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()

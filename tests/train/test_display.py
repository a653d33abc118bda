"""How a step looks: in lines, and drawn by rich on terminals of every width."""

from __future__ import annotations

import io
import math
import re
import threading

import pytest
from rich.console import Console

import megalite.train.display
from megalite.train.display import (
    PlainDisplay,
    RichDisplay,
    duration,
    fold,
    open_display,
    step_fields,
    validation_line,
)

METRICS = {
    "train/loss": 1 / 3,
    "train/grad_norm": 2.0**0.5,
    "train/lr": 1e-3,
    "perf/tokens_per_sec": 12345.678,
    "perf/tokens_per_sec_per_rank": 3086.4,
    "memory/max_resident_gib": 0.375,
}
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def terminal(width: int = 100, **options) -> tuple[io.StringIO, Console]:
    file = io.StringIO()
    return file, Console(file=file, force_terminal=True, width=width, height=24, _environ={}, **options)


def fields_of(step: int, **more) -> list[str]:
    metrics = METRICS | {name.replace("_", "/", 1): value for name, value in more.items()}
    return step_fields(step, metrics, steps=200, eta_seconds=125)


def test_a_step_is_told_in_fields():
    assert "  ".join(fields_of(7)) == (
        "step   7/200  loss 0.3333  grad_norm 1.414  lr 1.00e-03  12,346 tokens/s (3,086 a rank)  mfu n/a  "
        "memory 0.38 GiB  eta 2m 05s"
    )
    assert "mfu 41.2%" in fields_of(7, perf_mfu=0.4123)
    assert fields_of(7, train_grad_norm=math.nan)[-1] == "skipped: its gradient is not finite"


def test_validation_is_a_line_of_its_own_with_all_that_was_measured():
    assert validation_line(20, METRICS) == ""
    metrics = METRICS | {"val/loss": 2.25, "val/perplexity": 9.4877}
    assert validation_line(20, metrics) == "validation after step 20: loss 2.2500, perplexity 9.4877"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.2, "0 s"),
        (59, "59 s"),
        (65, "1m 05s"),
        (3600 * 3 + 7 * 60, "3h 07m"),
        (86400 * 2.5, "2d 12h"),
        (math.nan, "?"),
    ],
)
def test_times_have_two_units(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize("width", [1, 12, 40, 80, 300])
def test_fields_fold_at_any_width_and_none_is_lost_or_broken(width):
    lines = fold(fields_of(7), width)
    assert "  ".join(lines) == "  ".join(fields_of(7))
    assert all(len(line) <= width or line in fields_of(7) for line in lines)
    assert all(len(first) + 2 + len(second.split("  ")[0]) > width for first, second in zip(lines, lines[1:]))  # noqa: B905, RUF007


@pytest.mark.parametrize("width", [1, 12, 40, 80, 300])
def test_what_is_drawn_never_runs_over_the_edge(width):
    """A line that is too long would wrap, and redrawing would then climb by too few lines."""
    file, console = terminal(width)
    display = RichDisplay(console, steps=200)
    for step in (1, 2):
        display.step(step, fields_of(step), due=True)
        display.drawn = -math.inf
    display.close()
    plain = ESCAPE.sub("", file.getvalue()).replace("\r", "\n")
    assert max(len(line) for line in plain.splitlines()) <= width
    assert width < 40 or "loss 0.3333" in plain


def test_a_terminal_without_colour_gets_none():
    for colour, console in ((True, terminal(color_system="standard")), (False, terminal(no_color=True))):
        file, console = console
        assert console.is_terminal
        display = RichDisplay(console, steps=10)
        display.step(5, fields_of(5), due=True)
        display.close()
        assert bool(re.search(r"\x1b\[[0-9;]*[39][1-7]m", file.getvalue())) == colour


def test_drawing_starts_no_thread_and_is_held_to_four_times_a_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(megalite.train.display.time, "monotonic", lambda: now[0])
    file, console = terminal()
    threads = threading.active_count()
    display = RichDisplay(console, steps=1000)
    for step in range(1, 101):
        now[0] += 0.01
        display.step(step, fields_of(step), due=True)
    assert threading.active_count() == threads
    drawn = ESCAPE.sub("", file.getvalue()).count("step ")
    assert drawn == 4
    display.close()
    assert "step 100/200" in ESCAPE.sub("", file.getvalue()), "the last step is not shown"


def test_lines_and_prints_stand_above_what_is_drawn():
    file, console = terminal()
    display = RichDisplay(console, steps=10)
    display.step(5, fields_of(5), due=True)
    display.line("validation [bold]1[/bold] " + "x" * 150)
    print("a print of somebody else")
    display.close()
    display.close()
    text = ESCAPE.sub("", file.getvalue())
    assert "validation [bold]1[/bold] " + "x" * 150 in text, "a line was broken or taken for markup"
    assert text.index("a print of somebody else") < text.rindex("loss 0.3333")


def test_the_choice_is_kept_and_auto_looks_at_the_terminal():
    piped, real, dumb = (
        Console(file=io.StringIO(), _environ={}),
        terminal()[1],
        Console(file=io.StringIO(), force_terminal=True, _environ={"TERM": "dumb"}),
    )
    assert isinstance(open_display("auto", steps=1, console=piped), PlainDisplay)
    assert isinstance(open_display("auto", steps=1, console=dumb), PlainDisplay)
    assert isinstance(open_display("plain", steps=1, console=real), PlainDisplay)
    for choice in ("auto", "rich"):
        display = open_display(choice, steps=1, console=real)
        assert isinstance(display, RichDisplay)
        display.close()


def test_plain_lines_come_when_they_are_due(capsys):
    display = PlainDisplay()
    for step in (1, 2, 3):
        display.step(step, ["step", str(step)], due=step != 2)
    display.line("a line")
    display.close()
    assert capsys.readouterr().out == "step  1\nstep  3\na line\n"

"""docs/pipeline.md says what is so: its commands print what stands below them, its formulas are what is simulated.

python tests/pipeline/test_doc.py      writes the page anew, with what its commands print now
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from fractions import Fraction
from pathlib import Path

import pytest

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.command import main
from megalite.pipeline.draw import number
from megalite.pipeline.simulate import Costs, peaks, simulate

PAGE = Path(__file__).parents[2] / "docs" / "pipeline.md"
COMMAND = "python -m megalite.pipeline"
BLOCK = re.compile(r"(?:^    .*\n(?:^\n(?=    [^$]))?)+", re.MULTILINE)


def filled(page: str) -> str:
    """The page, what stands below each of its commands replaced by what it prints."""
    return BLOCK.sub(lambda found: _run_all(found[0]) if f"$ {COMMAND}" in found[0] else found[0], page)


def _run_all(block: str) -> str:
    """A block of commands and what they print, indented; `cat` shows a file that the next command reads."""
    made, file = [], None
    for line in block.splitlines():
        said = line[4:]
        if said.startswith("$ "):
            file = Path(said.removeprefix("$ cat ")) if said.startswith("$ cat ") else None
            made.append(line)
            if file:
                file.write_text("")
            else:
                made += [f"    {each}".rstrip() for each in _printed(said.removeprefix("$ "))]
        elif file:
            made.append(line)
            file.write_text(file.read_text() + said + "\n")
    return "\n".join(made) + "\n"


def _printed(command: str) -> list[str]:
    command, _, head = command.partition(" | head -")
    assert command.startswith(COMMAND), command
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        main(command.removeprefix(COMMAND).split())
    lines = out.getvalue().splitlines()
    return lines[: int(head)] if head else lines


def test_every_command_prints_what_stands_below_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    assert page.count(f"$ {COMMAND}") > len(SCHEDULES)
    assert filled(page) == page, "the page has rotted; python tests/pipeline/test_doc.py writes it anew"


def rows() -> dict[str, list[str]]:
    """Schedule -> the other cells of its row in the table of formulas."""
    table = PAGE.read_text().partition("| schedule | idle_span |")[2].partition("\n\n")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {name: others for name, *others in cells}


def value(formula: str, **letters: int) -> Fraction:
    """Of a formula as it is written in the table: (p-1)(F+B-2W)/v, (p+4)//3."""
    spread = re.sub(r"(?<=[\w)])(?=[(A-Za-z])", "*", formula)
    return Fraction(eval(re.sub(r"(\d+)", r"Fraction(\1)", spread), {"Fraction": Fraction, **letters}))


def test_the_reader_of_formulas_reads_them():
    letters = {"p": 4, "m": 8, "v": 2, "F": 3, "B": 5, "W": 2}
    assert value("(p-1)m(F+B+W)", **letters) == 240
    assert value("(p-1)(F+B-2W)/v", **letters) == 6
    assert value("(p+4)//3", **letters) == 2 and value("(2p+1)/2", **letters) == Fraction(9, 2)


def test_the_table_of_formulas_has_every_schedule_with_what_is_simulated():
    assert list(rows()) == list(SCHEDULES)
    for name, (_, idle, _, peak, least) in rows().items():
        schedule = make(name, ranks=4, microbatches=8)
        share = Fraction(1, schedule.stages_per_rank)
        assert idle == number(simulate(schedule, Costs(share, share, share)).idle_span), name
        assert peak == number(max(peaks(schedule))), name
        for ranks in (2, 3, 4):
            assert value(least, p=ranks) == SCHEDULES[name].whole_from(ranks), name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_formulas_are_what_is_simulated_from_the_micro_batches_that_they_ask_for(name, ranks):
    idle, _, peak, _, _ = rows()[name]
    least = SCHEDULES[name].whole_from(ranks)
    for microbatches in (least, least + 1, least + 2, 3 * ranks):
        for passes in ((1, 1, 1), (3, 4, 2), (5, 3, 4)):  # W <= F and 2W <= F + B, as the zero-bubble ones ask
            schedule = make(name, ranks=ranks, microbatches=microbatches)
            letters = dict(zip("FBW", passes, strict=True), p=ranks, m=microbatches, v=schedule.stages_per_rank)
            share = Fraction(1, schedule.stages_per_rank)
            timeline = simulate(schedule, Costs(*(share * each for each in passes)))
            formula, _, condition = idle.partition(" where ")
            if formula != "none" and (not condition or passes == (1, 1, 1)):
                assert timeline.idle_span == value(formula, **letters), (microbatches, passes)
            if microbatches % ranks == 0 and microbatches >= 2 * ranks:
                assert max(peaks(schedule)) == value(peak, **letters), microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_holds_more_than_all_micro_batches(name):
    for ranks in (1, 2, 4):
        for microbatches in (1, 2, 3, 5):
            assert max(peaks(make(name, ranks=ranks, microbatches=microbatches))) <= microbatches


if __name__ == "__main__":
    text = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        PAGE.write_text(filled(text))

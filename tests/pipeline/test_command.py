"""`python -m megalite.pipeline`: what it prints is what the simulator says; a refusal is one line, exit code 2."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.command import COLUMNS, main
from megalite.pipeline.draw import number, text
from megalite.pipeline.schedule import parse
from megalite.pipeline.simulate import Costs, peaks, simulate

ROOT = Path(__file__).parents[2]


def printed(capsys, words: str) -> str:
    assert main(words.split()) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def values(report: str) -> dict[str, list[str]]:
    rows = [line.split() for line in report.splitlines()]
    return {row[0]: row[1:] for row in rows if row and row[0] in (*COLUMNS, "peaks")}


def test_a_schedule_is_drawn_and_measured(capsys):
    report = printed(capsys, "zb_v --ranks 4 --microbatches 8 --costs 1,1,1 --width 300")
    half = Costs(*[Fraction(1, 2)] * 3)  # each of a rank's two stages takes its half
    timeline = simulate(make("zb_v", ranks=4, microbatches=8), half)
    assert report.startswith("zb_v: 4 ranks, 8 micro-batches, 2 stages a rank\n" + text(timeline, width=300))
    found = values(report)
    assert [found[name][0] for name in ("makespan", "bubble", "bubble_span", "idle_span")] == [
        "25.5",
        number(timeline.bubble),
        "0",
        "0",
    ]
    assert found["peaks"][:4] == ["4"] * 4


def test_latency_overlap_and_what_is_held_are_exact(capsys):
    found = values(printed(capsys, "1f1b --ranks 4 --microbatches 8 --latency 1"))
    assert found["idle_span"][0] == "25"
    found = values(printed(capsys, "1f1b --ranks 2 --costs 0.5,1/3,1/6 --microbatches 2"))
    assert found["idle_span"][0] == "1"
    schedule = make("dualpipe_v", ranks=2, microbatches=6)
    found = values(printed(capsys, "dualpipe_v --ranks 2 --microbatches 6 --overlap 1/2 --costs 2,2,2"))
    assert found["makespan"][0] == number(simulate(schedule, Costs(overlap=Fraction(1, 2))).makespan)
    found = values(printed(capsys, "zb_h1 --ranks 4 --held 3,2"))
    assert found["peaks"][:4] == ["12", "11", "10", "9"]


def test_the_table_has_every_schedule_with_the_simulators_values(capsys):
    head, *rows = printed(capsys, "--all --ranks 3 --microbatches 7 --costs 3,4,2 --latency 1/2").splitlines()
    assert head.split() == " ".join(COLUMNS).split()
    assert [row.split()[0] for row in rows] == list(SCHEDULES)
    for row in rows:
        name, v, *measures = row.split()[:7]
        schedule = make(name, ranks=3, microbatches=7)
        assert int(v) == schedule.stages_per_rank
        timeline = simulate(schedule, Costs(*(Fraction(cost, int(v)) for cost in (3, 4, 2)), latency=Fraction(1, 2)))
        expected = (timeline.makespan, timeline.bubble, timeline.bubble_span, timeline.idle_span, max(peaks(schedule)))
        assert measures == list(map(number, expected))


def test_virtual_stages_and_group_go_to_the_rows_that_have_them(capsys):
    rows = printed(capsys, "--all --virtual-stages 3 --ranks 2 --group 3").splitlines()[1:]
    having = {row.split()[0] for row in rows if row.split()[1] == "3"}
    assert having == {"interleaved", "bfs", "interleaved_zb"}


@pytest.mark.parametrize("how", ["--print", "--csv"])
@pytest.mark.parametrize("name", ["dualpipe_v", "interleaved"])
def test_what_is_printed_can_be_read_from_a_file(tmp_path, capsys, how, name):
    path = tmp_path / "mine.txt"
    path.write_text(printed(capsys, f"{name} --ranks 3 {how}"))
    made = make(name, ranks=3, microbatches=8)
    assert parse(path.read_text(), name=name).rows == made.rows
    from_file = printed(capsys, f"--file {path}").splitlines()
    directly = printed(capsys, f"{name} --ranks 3").splitlines()
    assert from_file[0].startswith("mine: 3 ranks, 8 micro-batches") and from_file[1:] == directly[1:]


def test_fewer_microbatches_than_its_formulas_ask_for_are_said(capsys):
    assert "its formulas ask for 7 micro-batches or more" in printed(capsys, "zb_v --microbatches 3")
    assert "formulas" not in printed(capsys, "zb_v --microbatches 7")


def test_pictures_are_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    printed(capsys, f"gpipe --svg {tmp_path}/a.svg --png {tmp_path}/a.png")
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["gpipe", "--png", str(tmp_path / "a.png")]) == 2
    assert "pip install 'megalite[plot]'" in capsys.readouterr().err


def test_colours_are_for_terminals_or_when_asked_for(capsys):
    assert "\x1b" not in printed(capsys, "gpipe")
    assert "\x1b" in printed(capsys, "gpipe --colour always")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "give a schedule's NAME, --file FILE or --all: there is none"),
        ("gpipe --all", "there is both NAME and --all"),
        ("gpipe --file x", "there is both NAME and --file"),
        ("gpip", "take one of naive, gpipe"),
        ("zb_v --virtual-stages 3", "take 2, or null"),
        ("interleaved --virtual-stages 1", "with one stage a rank it is 1f1b"),
        ("interleaved --group 2", "take 4 or more"),
        ("gpipe --group 8", "interleaved"),
        ("gpipe --ranks 0", "0 is not a whole number from 1 up"),
        ("gpipe --microbatches 2.5", "2.5 is not a whole number"),
        ("gpipe --costs 1,1", "1,1 has 2 numbers; give 3, as 1,1,1"),
        ("gpipe --costs 1,x,1", "'x' is not a number from 0 up, as 2, 0.5 or 1/3"),
        ("gpipe --costs 1,1/0,1", "'1/0' is not a number"),
        ("gpipe --costs 0,1,1", "F and B must be above 0"),
        ("gpipe --latency=-1", "'-1' is not a number from 0 up"),
        ("gpipe --wrong", "unrecognized arguments: --wrong; --help says more"),
        ("gpipe --svg no/such/folder/a.svg", "no/such/folder/a.svg: No such file or directory"),
        ("--all --svg a.svg", "--svg does not go with --all"),
        ("--file no/such", "no/such: No such file or directory"),
        ("--file {ok} --ranks 2", "--ranks does not go with --file"),
        ("--file {text}", "line 1: 'once' is no action"),
        ("--file {bytes}", "is no text"),
        ("--file {broken}", "schedule broken: rank 1 lacks BW0@1 beside F0@1"),
    ],
)
def test_a_refusal_is_one_line_and_exit_code_2(tmp_path, capsys, words, says):
    files = {"ok": b"F0@0 BW0@0", "text": b"once upon", "bytes": b"\x89\xff\x00", "broken": b"F0@0 BW0@0\nF0@1"}
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert main(words.format(**{name: tmp_path / name for name in files}).split()) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and says in err and err.count("\n") == 1


def test_help_names_every_schedule(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and all(f"  {name} " in out for name in SCHEDULES)


def test_it_runs_as_a_module_without_torch_and_stops_quietly_when_its_reader_does():
    program = (
        "import runpy, sys; sys.argv = ['pipeline', '--all']\n"
        "try: runpy.run_module('megalite.pipeline', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("schedule")
    piped = f"set -o pipefail; {sys.executable} -m megalite.pipeline gpipe --microbatches 400 --csv | head -c 10"
    ended = subprocess.run(["bash", "-c", piped], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "F0@0,F1@0,", "")

"""Pictures of runs: what is drawn, under which names, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.plot import Run, distinct_names, draw, main, read_rows, smoothed

ROOT = Path(__file__).parents[1]
PICTURES = ["loss.png", "norm.png", "lr.png", "throughput.png", "memory.png", "overview.png"]


def write_run(folder: Path, *, steps: int = 30, end: str = "") -> Path:
    folder.mkdir(parents=True)
    rows = [
        {
            "step": step,
            "train/loss": 5 / step if step != 7 else None,
            "train/grad_norm": 1.0 + step,
            "train/lr": 1e-3,
            "train/tokens": 100 * step,
            "perf/tokens_per_sec": 1000.0,
            "memory/max_resident_gib": 0.5,
            **({"val/loss": 6 / step} if step % 10 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + end)
    return folder


@pytest.mark.parametrize("x", ["step", "tokens"])
def test_each_group_and_an_overview_are_drawn_for_one_run_and_for_several(tmp_path, capsys, x):
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=12)
    assert main([str(a), str(b), "--x", x, "--out", str(tmp_path / "both")]) == 0
    assert main([str(a)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [Path(line).name for line in printed] == PICTURES * 2
    for folder in (tmp_path / "both", a / "plots"):
        for name in PICTURES:
            assert (folder / name).read_bytes().startswith(b"\x89PNG")


def drawn(runs: list[Run], tmp_path: Path, monkeypatch, *, x: str = "step"):
    """Picture's name -> its axes, as matplotlib had them when it was saved."""
    import megalite.plot

    kept = {}
    monkeypatch.setattr(megalite.plot, "_save", lambda plt, figure, path: kept.setdefault(path.stem, figure))
    list(draw(runs, out=tmp_path, x=x))
    return {name: figure.axes for name, figure in kept.items()}


def test_runs_lie_over_one_another_raw_and_smoothed_with_validation_as_points(tmp_path, monkeypatch):
    a, b = read_rows(write_run(tmp_path / "a")), read_rows(write_run(tmp_path / "b"))
    (axes,) = drawn([Run("a", a), Run("b", b)], tmp_path, monkeypatch, x="tokens")["loss"]
    raw, smooth, points, *others = axes.get_lines()
    assert len(others) == 3
    across = [100 * step for step in range(1, 31) if step != 7]  # where the loss was not finite there is nothing
    assert list(raw.get_xdata()) == list(smooth.get_xdata()) == across
    assert list(raw.get_ydata()) == [5 / (x / 100) for x in across]
    assert list(points.get_xdata()) == [1000, 2000, 3000] and points.get_linestyle() == "None"
    assert raw.get_color() == smooth.get_color() == points.get_color() != others[0].get_color()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["a", "b"]
    assert axes.get_xlabel() == "tokens"


def test_what_no_run_has_is_not_drawn(tmp_path, monkeypatch):
    rows = [{"step": 1, "train/loss": 2.0}, {"step": 2, "train/loss": 1.0}]
    assert list(drawn([Run("a", rows)], tmp_path, monkeypatch)) == ["loss", "overview"]


def test_smoothing_keeps_a_constant_and_lags_behind_no_start(tmp_path):
    assert smoothed([3.0] * 100) == pytest.approx([3.0] * 100)
    assert smoothed([5.0, 1.0])[0] == 5.0
    noisy = [1.0 + (-1) ** i for i in range(1000)]
    assert all(abs(value - 1) < 0.05 for value in smoothed(noisy)[100:])


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["runs/a"], ["a"]),
        (["runs/a", "runs/b"], ["a", "b"]),
        (["one/x", "two/x", "two/y"], ["one/x", "two/x", "y"]),
        (["one/two/x", "one/three/x", "four/two/x"], ["one/two/x", "three/x", "four/two/x"]),
    ],
)
def test_a_run_is_named_by_the_shortest_end_of_its_path_that_tells_it_apart(folders, names):
    assert distinct_names([Path(folder) for folder in folders]) == names


def test_a_run_that_still_writes_can_be_drawn(tmp_path):
    whole = read_rows(write_run(tmp_path / "whole"))
    for place, torn in enumerate(('{"step": 31, "train/lo', "{", '{"step": 31, "train/loss": 1.0}')):
        rows = read_rows(write_run(tmp_path / str(place), end=torn))
        assert rows[:30] == whole and len(rows) == (31 if torn.endswith("}") else 30)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "is no folder"),
        ("none", "has no metrics.jsonl"),
        ("", "has no rows yet"),
        ("{torn\n{}\n", "line 1 is no row of metrics"),
        ("3\n", "line 1 is no row of metrics"),
        ('{"step": 1}\n', "none of the runs has a metric"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_exit_code_2(tmp_path, capsys, content, says):
    folder = tmp_path / "run"
    if content is not None:
        folder.mkdir()
    if content not in (None, "none"):
        (folder / "metrics.jsonl").write_text(content)
    assert main([str(folder)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and says in err and err.count("\n") == 1


def test_without_matplotlib_the_extra_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(write_run(tmp_path / "a"))]) == 2
    assert "pip install 'megalite[plot]'" in capsys.readouterr().err


def test_the_command_runs_without_torch_and_without_a_screen(tmp_path):
    write_run(tmp_path / "a")
    program = (
        "import runpy, sys; sys.argv = ['plot', sys.argv[1]]\n"
        "try: runpy.run_module('megalite.plot', run_name='__main__')\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "a")], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].endswith("overview.png")

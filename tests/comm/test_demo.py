"""`python -m megalite.comm` shows what each collective does, with numbers that can be worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megalite.comm.demo import PRIMITIVES, Before, Shown, main, show, table
from megalite.comm.start import Started
from megalite.mesh import Axis
from tests.counting import count
from tests.ranks import run

ROOT = Path(__file__).parents[2]


def _show(folder: str, n: int) -> tuple[list[Shown], list[float]]:
    """What this rank is shown, and the bytes counted for each primitive when it is run again."""
    axis = Axis("world", n, dist.get_rank(), dist.group.WORLD)
    store = dist.FileStore(f"{folder}/counts", n)
    shown = show(Started(axis, store, "cpu"))
    counted = []
    for primitive in PRIMITIVES:
        with count() as c:
            primitive.run(Before(torch.ones(n), axis, store))
        counted.append(c.bytes_sent())
    return shown, counted


OWN = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32, 33], [40, 41, 42, 43]]
PARTS = [[10], [21], [32], [43]]
SUM = [100, 104, 108, 112]
# name -> before, after and bytes sent on ranks 0 to 3
BY_HAND = {
    "broadcast": (OWN, [OWN[0]] * 4, [16, 16, 16, 0]),
    "scatter": ([OWN[0], None, None, None], [[10], [11], [12], [13]], [12, 0, 0, 0]),
    "gather": (PARTS, [[10, 21, 32, 43], None, None, None], [0, 4, 4, 4]),
    "reduce": (OWN, [SUM, None, None, None], [0, 16, 16, 16]),
    "all-gather": (PARTS, [[10, 21, 32, 43]] * 4, [12] * 4),
    "reduce-scatter": (OWN, [[100], [104], [108], [112]], [12] * 4),
    "all-reduce": (OWN, [SUM] * 4, [24] * 4),
    "all-to-all": (OWN, [[10, 20, 30, 40], [11, 21, 31, 41], [12, 22, 32, 42], [13, 23, 33, 43]], [12] * 4),
    "send / receive": (OWN, [OWN[3], OWN[0], OWN[1], OWN[2]], [16] * 4),
}


@pytest.fixture(scope="module")
def on_four(tmp_path_factory):
    return run(_show, 4, str(tmp_path_factory.mktemp("demo")), 4)


@pytest.mark.parametrize("name", BY_HAND)
def test_every_rank_holds_before_and_after_what_one_finds_by_hand(on_four, name):
    rows = [next(row for row in shown if row.name == name) for shown, _ in on_four]
    before, after, sends = BY_HAND[name]
    assert [row.before for row in rows] == before
    assert [row.after for row in rows] == after
    assert [row.sends_bytes for row in rows] == sends


def test_no_rank_leaves_the_barrier_before_all_have_come(on_four):
    rows = [next(row for row in shown if row.name == "barrier") for shown, _ in on_four]
    assert sorted(row.before[0] for row in rows) == [1, 2, 3, 4]
    assert [row.after for row in rows] == [[4]] * 4


def test_the_bytes_shown_are_those_of_the_operations_that_were_issued(on_four):
    for shown, counted in on_four:
        assert [row.sends_bytes for row in shown] == counted


def test_the_columns_of_a_table_are_aligned():
    rows = [Shown("gather", [10.0], [10.0, 21.0], 0), Shown("gather", [21.0], None, 4)]
    head, cost, columns, *ranks = table(rows).splitlines()
    assert head.startswith("gather: ") and cost.startswith("    sends: ")
    assert [line.index("bytes") - 2 for line in ranks] == [columns.index("sends")] * 2


def test_a_rank_alone_is_shown_that_every_primitive_is_the_identity(tmp_path):
    [(shown, _)] = run(_show, 1, str(tmp_path), 1)
    for row in shown:
        assert row.before == row.after and row.sends_bytes == 0


@pytest.mark.parametrize(
    "command",
    [
        [sys.executable, "-m", "megalite.comm", "--ranks", "3"],
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "-m", "megalite.comm"],
    ],
    ids=["ranks", "torchrun"],
)
def test_the_command_prints_each_primitive_once_and_the_law_that_joins_three_of_them(command):
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    for primitive in PRIMITIVES:
        assert ended.stdout.count(f"\n{primitive.name}: {primitive.law}\n") == 1
    assert ended.stdout.count("equal on every rank") == 1


def test_a_number_of_ranks_that_cannot_be_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--ranks", "0"])
    assert "0 ranks cannot be started; take at least 1" in capsys.readouterr().err

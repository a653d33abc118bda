"""A hang ends the job on all ranks within the timeout and some seconds, and the report leads to its cause."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest
import torch

from megalite.comm import start_all_gather, start_all_reduce
from megalite.mesh import Axis, Mesh
from megalite.train import watchdog
from tests.train.forked import Job

HANGS = ("cluster.timeout_seconds=2", "out_dir=run")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    """Answers come within milliseconds here; ranks are forks and see this."""
    monkeypatch.setattr(watchdog, "ANSWER_SECONDS", 1.5)


def training(at_step_3, *, axis="world", steps=4):
    """A job whose ranks talk over an axis in each step; at_step_3(rank, axis) is called on each rank in step 3."""

    def main(config, world):
        mesh = Mesh.build(config.layout.fit(world.size))
        over = getattr(mesh, axis)
        for step in range(1, steps + 1):
            world.at(step)
            if step == 3:
                at_step_3(world.rank, over)
            start_all_reduce(torch.ones(4), over).wait()
        start_all_reduce(torch.ones(4), mesh.world).wait()

    return main


def oversleep(rank: int, axis: Axis) -> None:
    if rank == 1:
        time.sleep(100)


def test_a_rank_that_does_not_come_is_named_with_the_collective_the_step_and_its_place(tmp_path):
    began = time.monotonic()
    job = Job(training(oversleep), 2, *HANGS, folder=tmp_path)
    assert job.codes() == [4, 4]
    assert 2 <= time.monotonic() - began < 15
    head, who, peer, *_ = job.err().splitlines()
    assert re.fullmatch(
        r"hang in step 3: all_reduce over world \(ranks 0, 1\), its number 3, 16 bytes: rank 0 has waited \d\.\d s, "
        r"and cluster.timeout_seconds=2",
        head,
    )
    assert who.startswith("  rank 1 did not come: it has begun 2 over world and waits in no collective; in step 3, at ")
    assert who.endswith(f"{os.path.basename(__file__)}:{oversleep.__code__.co_firstlineno + 2} in oversleep")
    assert "rank 0 came and waits in all_reduce over world, number 3" in peer
    assert job.err().count("hang") == 2 and f"{tmp_path}/run/hang/rank<N>.txt" in job.err()  # one report
    for rank, place in enumerate(["collectives.py", "in oversleep"]):
        text = (tmp_path / f"run/hang/rank{rank}.txt").read_text()
        assert json.loads(text.splitlines()[0])["rank"] == rank
        assert "thread MainThread" in text and place in text
        assert '"process_group"' in text.partition("flight record:")[2]


def test_a_hang_is_traced_to_its_cause_also_where_others_wait_for_those_that_wait(tmp_path):
    """Rank 2 waits for rank 3 in tp, ranks 0 and 1 for both in the last all-reduce; any of them may speak."""

    def last(rank: int, axis: Axis) -> None:
        if rank == 3:
            time.sleep(100)

    job = Job(training(last, axis="tp"), 4, "layout.tp=2", *HANGS, folder=tmp_path)
    assert job.codes() == [4] * 4
    head, who, *others = job.err().splitlines()
    assert re.match(
        r"hang in step (3: all_reduce over tp \(ranks 2, 3\)|4: all_reduce over world \(ranks 0, 1, 2, 3\)),", head
    )
    assert re.match(r"  rank 3 did not come: it has begun (2 over tp|0 over world) and waits in no collective", who)
    assert any("rank 2 " in line and "waits in all_reduce over tp, number 3" in line for line in others)


def test_ranks_in_different_collectives_on_one_axis_are_told_apart(tmp_path):
    def other(rank: int, axis: Axis) -> None:
        if rank == 1:
            start_all_gather(torch.ones(4), axis).wait()

    job = Job(training(other), 2, *HANGS, folder=tmp_path)
    assert job.codes() == [4, 4]
    operations = {"all_reduce", "all_gather"}
    (waits,) = re.findall(r"^hang in step 3: (\w+) over world", job.err())
    (came,) = re.findall(r"came with another one: its number 3 is (\w+);", job.err())
    assert {waits, came} == operations


@pytest.mark.parametrize("stopped", [1, 0], ids=["a rank", "the rank that keeps the store"])
def test_a_stopped_process_is_named_and_not_left_behind(tmp_path, stopped):
    def stop(rank: int, axis: Axis) -> None:
        if rank == stopped:
            os.kill(os.getpid(), signal.SIGSTOP)

    job = Job(training(stop), 2, *HANGS, folder=tmp_path)
    codes = job.codes()
    assert codes[stopped] == -signal.SIGKILL and codes[1 - stopped] == 4
    if stopped == 1:
        assert "rank 1 does not answer: its process is stopped (SIGSTOP)" in job.err()
    else:
        assert job.err().startswith("rank 1 waits in all_reduce over world, number 3, 16 bytes for ")
        assert "the store of this job does not answer: rank 0 or the launcher" in job.err()


def test_slow_steps_are_no_hang(tmp_path):
    def main(config, world):
        axis = Mesh.build(config.layout.fit(world.size)).world
        for step in range(1, 8):
            world.at(step)
            time.sleep(0.6 * (step % 2 == world.rank))
            start_all_reduce(torch.ones(4), axis).wait()

    job = Job(main, 2, "cluster.timeout_seconds=2", folder=tmp_path)  # less than the 4 s of all steps
    assert job.codes() == [0, 0] and job.err() == ""


def test_a_rank_that_does_not_come_to_make_the_groups_is_a_hang_too(tmp_path):
    def main(config, world):
        if world.rank == 1:
            time.sleep(100)
        Mesh.build(config.layout.fit(world.size))

    job = Job(main, 2, *HANGS, folder=tmp_path)
    assert job.codes() == [4, 4]
    head, who, *_ = job.err().splitlines()
    assert head.startswith("hang before the first step: new_group: rank 0 has waited ")
    assert who.startswith("  rank 1 did not come: waits in no collective; before the first step, at ")

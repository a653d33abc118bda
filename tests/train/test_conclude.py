"""However a job fails, all its ranks end soon, with one code, and the cause is said first and once."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from megalite.comm import start_all_reduce
from megalite.data import DataError
from megalite.mesh import Mesh
from megalite.train.failure import code_of
from megalite.train.finite import NotFiniteError
from tests.train.forked import Job


def training(at_step_2, *, steps=3):
    """A job whose ranks talk in each step; at_step_2(rank) is called on each rank in step 2."""

    def main(config, world):
        mesh = Mesh.build(config.layout.fit(world.size))
        for step in range(1, steps + 1):
            world.at(step)
            if step == 2:
                at_step_2(world.rank)
            start_all_reduce(torch.ones(2), mesh.world).wait()

    return main


def failing(error: BaseException, *ranks: int):
    def at_step_2(rank: int) -> None:
        if rank in ranks:
            raise error

    return training(at_step_2)


@pytest.mark.parametrize(("ranks", "bad"), [(2, 1), (2, 0), (4, 1)])
def test_an_exception_on_one_rank_ends_all_with_its_traceback_first_and_alone(tmp_path, ranks, bad):
    """Rank 0 keeps the store, so that it is also the one that must not leave too soon."""
    began = time.monotonic()
    job = Job(failing(RuntimeError("bad luck"), bad), ranks, folder=tmp_path)
    assert job.codes() == [1] * ranks
    assert time.monotonic() - began < 20  # of a timeout of 600 s
    err = job.err()
    assert err.startswith(f"rank {bad} failed in step 2:\nTraceback") and err.count("Traceback") == 1
    assert "RuntimeError: bad luck" in err
    others = [f"rank {rank} stopped, since rank {bad} failed: RuntimeError: bad luck" for rank in range(ranks)]
    assert sorted(err.splitlines()[-ranks + 1 :]) == [line for rank, line in enumerate(others) if rank != bad]


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (DataError("data.paths: bad"), 3, "error: data.paths: bad"),
        (NotFiniteError("non-finite: lost"), 5, "error: non-finite: lost"),
        (SystemExit(9), 9, "rank 1 left in step 2 by sys.exit(9)"),
        (MemoryError(), 6, "out of memory: take a smaller micro_batch_size or seq_len, recompute=full, or more ranks"),
    ],
)
def test_all_ranks_leave_with_the_code_of_what_one_of_them_met(tmp_path, error, code, says):
    job = Job(failing(error, 1), 2, folder=tmp_path)
    assert job.codes() == [code, code]
    assert job.err().count(says) == 1 and job.err().count("Traceback") == (code == 6)


@pytest.mark.parametrize(
    ("error", "marks"), [(ValueError("a bug"), "Traceback"), (DataError("data.paths: bad"), "error: ")]
)
def test_what_all_ranks_meet_is_said_once(tmp_path, error, marks):
    job = Job(failing(error, 0, 1), 2, folder=tmp_path)
    assert set(job.codes()) == {code_of(error)}
    assert job.err().count(marks) == job.err().count(str(error)) == 1


def test_a_rank_that_is_killed_is_named_by_those_that_are_left(tmp_path):
    job = Job(training(lambda rank: rank == 1 and os.kill(os.getpid(), signal.SIGKILL)), 2, folder=tmp_path)
    assert job.codes() == [7, -signal.SIGKILL]
    assert job.err().startswith("rank 1 went away without a word: its process was killed") and "Trace" not in job.err()


def test_without_the_rank_that_keeps_the_store_the_others_end_all_the_same(tmp_path):
    job = Job(training(lambda rank: rank == 0 and os.kill(os.getpid(), signal.SIGKILL)), 2, folder=tmp_path)
    assert job.codes() == [-signal.SIGKILL, 7]
    assert "the store of this job is gone: rank 0 or the launcher" in job.err() and "Traceback" not in job.err()


@pytest.mark.parametrize(("early", "codes"), [(1, [1, 0]), (0, [1, 1])])
def test_a_rank_that_ends_its_run_too_soon_is_told_from_one_that_died(tmp_path, early, codes):
    """The rank that keeps the store waits for the other, and so hears of what it has done."""

    def main(config, world):
        mesh = Mesh.build(config.layout.fit(world.size))
        for step in range(1, 3 - (world.rank == early)):
            world.at(step)
            start_all_reduce(torch.ones(2), mesh.world).wait()

    job = Job(main, 2, folder=tmp_path)
    assert job.codes() == codes
    assert job.err() == f"rank {early} has ended its run before the others (seen by rank {1 - early} in step 2)\n"


def test_a_rank_that_is_done_still_ends_with_the_code_of_one_that_fails_later(tmp_path):
    def main(config, world):
        if world.rank == 1:
            time.sleep(0.5)
            raise RuntimeError("late")

    job = Job(main, 2, folder=tmp_path)
    assert job.codes() == [1, 1]
    assert "rank 1 failed before the first step:\nTraceback" in job.err()


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("ranks", [(0, 1), (1,)], ids=["to all ranks", "to one"])
def test_a_signal_unwinds_every_rank_and_is_told_in_one_line(tmp_path, signum, code, ranks):
    def main(config, world):
        mesh = Mesh.build(config.layout.fit(world.size))
        try:
            for step in range(1, 10_000):
                world.at(step)
                start_all_reduce(torch.ones(2), mesh.world).wait()
                if step == 3:
                    Path(f"started{world.rank}").touch()
                time.sleep(0.01)
        finally:
            Path(f"closed{world.rank}").touch()

    job = Job(main, 2, folder=tmp_path)
    job.await_file("started0")
    job.await_file("started1")
    job.signal(signum, *ranks)
    assert job.codes() == [code, code]
    assert (tmp_path / "closed0").exists() and (tmp_path / "closed1").exists()
    (line,) = job.err().splitlines()
    assert f" was stopped by {signum.name} in step " in line and line[:6] in [f"rank {rank}" for rank in ranks]


def test_a_signal_after_a_failure_does_not_hide_it(tmp_path):
    """As torchrun sends one to those that are left."""

    def at_step_2(rank: int) -> None:
        if rank == 1:
            raise RuntimeError("bad luck")

    def main(config, world):
        try:
            training(at_step_2)(config, world)
        finally:
            if world.rank == 0:
                os.kill(os.getpid(), signal.SIGTERM)

    job = Job(main, 2, folder=tmp_path)
    assert job.codes() == [1, 1]
    assert job.err().count("failed in step 2") == 1 and "SIGTERM" not in job.err()


def test_before_a_job_begins_one_rank_tells_of_a_signal(tmp_path):
    job = Job(lambda config, world: None, 1, folder=tmp_path, before=lambda rank: signal.alarm(0))
    assert job.codes() == [0]

    def late(rank: int) -> None:
        def hydra_is_slow(*args, **kwargs):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)

        from megalite.train import launch

        launch.compose = hydra_is_slow

    job = Job(lambda config, world: None, 2, folder=tmp_path, before=late)
    assert job.codes() == [143, 143]
    assert job.err() == "stopped by SIGTERM\n"

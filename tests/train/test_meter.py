"""How long ranks take and wait, and which of them the others wait for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from megalite.comm import observe, start_all_reduce
from megalite.mesh import Layout, Mesh
from megalite.train.check import check
from megalite.train.config import Config, LogConfig
from megalite.train.launch import World
from megalite.train.log import Log
from megalite.train.meter import Look, Meter, Times
from tests.ranks import run

SLEEP = 0.2


def test_waiting_is_the_time_blocked_in_a_collective_and_nothing_else(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    meter = Meter(device="cpu")

    def passes(seconds: float) -> None:
        now[0] += seconds

    for _ in range(2):  # the second step counts from zero
        with meter.reading():
            passes(1)
        passes(2)
        for seconds in (4, 8):
            meter.waiting(None)
            passes(seconds)
            meter.waited(None)
        passes(16)
        assert meter.end() == Times(step_seconds=31, data_seconds=1, wait_seconds=12)


class Event:
    """Stands in for a CUDA event: the time that the stream had when it was recorded."""

    clock = 0.0
    waited_for = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.milliseconds = Event.clock

    def synchronize(self) -> None:
        Event.waited_for += 1

    def elapsed_time(self, end: Event) -> float:
        return end.milliseconds - self.milliseconds


def test_on_a_gpu_waiting_is_the_time_that_the_stream_stands_still(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    meter = Meter(device="cuda:0")
    for _ in range(2):
        with meter.reading():
            pass
        for milliseconds in (4, 8):
            meter.waiting(None)
            Event.clock += milliseconds
            meter.waited(None)
            Event.clock += 100
        assert meter.end().wait_seconds == pytest.approx(0.012)
    assert Event.waited_for == 4, "a time was read before the event had happened"


def test_the_slowest_rank_is_the_one_that_waits_least():
    look = Look(step_seconds=[0.21, 0.2, 0.2], wait_seconds=[0.15, 0.1, 0.02])
    assert look.slowest == 2
    assert look.describe() == ("ranks: step 0.21 s; waiting 0.02 to 0.15 s; slowest is rank 2 (waits least, 0.02 s)")
    assert look.metrics() == {
        "perf/slowest_rank": 2,
        "perf/step_seconds_max": 0.21,
        "perf/wait_seconds_min": 0.02,
        "perf/wait_seconds_max": 0.15,
    }


def sleepy(out_dir: str, sleeper: int) -> tuple[list[dict[str, float]], str]:
    """Four steps of which one rank sleeps through a part, seen every second step; the rows, and rank 0's lines."""
    import contextlib
    import io

    mesh = Mesh.build(Layout(dp=3))
    rank = mesh.world.rank
    log_config = LogConfig(display="plain", ranks_every=2)
    config = check(Config(out_dir=out_dir, global_batch_size=3, steps=4, log=log_config), 3)
    rows, said = [], io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        Log(config, world=World(rank, 3, "cpu", "gloo", 1, Path()), mesh=mesh) as log,
    ):
        for step in range(1, 5):
            log.read(lambda step: None, step)
            time.sleep(SLEEP if rank == sleeper else 0.0)
            start_all_reduce(torch.ones(4), mesh.world).wait()
            metrics = {"train/loss": 1.0, "train/grad_norm": 1.0, "train/lr": 1.0} | log.measured(step)
            log.step(step, metrics)
            rows.append(metrics)
        log.summary(skipped=0)
    return rows, said.getvalue()


@pytest.mark.parametrize("sleeper", [0, 2])
def test_a_rank_that_sleeps_is_named_by_all_ranks_in_the_steps_that_look(tmp_path, sleeper):
    results = run(sleepy, 3, str(tmp_path), sleeper, checked=False)
    for rank, (rows, _) in enumerate(results):
        assert ["perf/slowest_rank" in row for row in rows] == [False, True, False, True]
        for row in (rows[1], rows[3]):
            assert row["perf/slowest_rank"] == sleeper
            assert row["perf/step_seconds_max"] >= SLEEP
            # The others wait out the sleep but for the moments by which they came to it late.
            assert row["perf/wait_seconds_min"] < SLEEP / 2 < row["perf/wait_seconds_max"]
        assert (rows[0]["perf/wait_seconds"] < SLEEP / 2) == (rank == sleeper)
    said = results[0][1]
    assert said.count(f"slowest is rank {sleeper} (waits least") == 2
    assert f"slowest in 2 of 2 looks: rank {sleeper}" in said
    assert results[1][1] == ""


def observed(out_dir: str) -> int:
    """How many collectives a log adds to two steps that look and two that do not."""
    from tests.counting import count

    with count() as c:
        sleepy(out_dir, -1)
    return c.calls() - 4


def test_a_look_costs_one_collective_and_other_steps_none(tmp_path):
    assert run(observed, 3, str(tmp_path)) == [2, 2, 2]


def test_to_be_watched_costs_a_collective_microseconds():
    """The meter's part of 1000 waits; 20 us each would be 1% of a step of 50 ms with 25 collectives."""
    meter = Meter(device="cpu")
    with observe(meter):
        began = time.perf_counter()
        for _ in range(1000):
            meter.waiting(None)
            meter.waited(None)
    assert time.perf_counter() - began < 0.02


def test_memory_is_what_the_process_has_held_at_most():
    meter = Meter(device="cpu")
    before = meter.memory()["memory/max_resident_gib"]
    block = torch.ones(64 * 2**20 // 4)  # 64 MiB, touched
    after = meter.memory()["memory/max_resident_gib"]
    del block
    assert meter.memory()["memory/max_resident_gib"] >= after >= before
    assert 0.02 < after < 1000  # GiB, whatever unit the system counts in

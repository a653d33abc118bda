"""What travels is hidden under what computes, at every stage: timed with layers that sleep over a link that sleeps."""

from __future__ import annotations

from functools import partial

import pytest

from tests.ranks import run
from tests.zero.sleeping import Job, sleep_through

SLACK = 1.1  # hooks, copies, the update, and a busy machine, which wakes a sleeper late
NORM_SECONDS = 0.003  # the norm's own all-reduce, a latency that nothing can hide, counted generously
SUM_SLACK = 1.15  # where nothing is hidden every single sleep wakes late in its turn
COMPUTE_BOUND = {"gather_seconds": 0.015}
LINK_BOUND = {"gather_seconds": 0.04}


def fastest(job: Job, *, steps: int, overlap: bool = True, wanted: float = float("inf")) -> float:
    """Seconds of the best step as its slowest rank saw it: whatever else the machine does makes steps slower only.

    Where that is more than `wanted`, of more steps, in case the machine was busy all the while.
    """
    best = float("inf")
    for attempt in (steps, 4, 8):
        slept = run(partial(sleep_through, job, steps=attempt, overlap=overlap), job.ranks, checked=False)
        best = min(best, *(max(seconds) for seconds in zip(*(one.seconds for one in slept), strict=True)))
        if best <= wanted:
            break
    return best


def bound(job: Job) -> float:
    """1.1 [max(forward, its gathers) + max(backward, its gathers and reductions)] + first gather + last reduction."""
    return SLACK * job.hidden_seconds + job.exposed_seconds + NORM_SECONDS


@pytest.mark.parametrize(
    "job",
    [
        *(Job(stage, **COMPUTE_BOUND) for stage in (0, 2, 3)),
        *(Job(stage, **LINK_BOUND) for stage in (1, 3)),
        Job(2, microbatches=2, **COMPUTE_BOUND),
        Job(3, microbatches=2, **COMPUTE_BOUND),
    ],
    ids=lambda job: f"stage {job.stage}, gather {job.gather_seconds:g}, m {job.microbatches}",
)
def test_a_step_takes_the_longer_of_compute_and_communication_pass_by_pass(job):
    assert job.hidden_seconds <= fastest(job, steps=2, wanted=bound(job)) <= bound(job)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_without_overlap_a_step_takes_the_sum(stage):
    job = Job(stage, **COMPUTE_BOUND)
    most = SUM_SLACK * job.sum_seconds
    seconds = fastest(job, steps=1, overlap=False, wanted=most)
    assert job.sum_seconds <= seconds <= most
    assert seconds > bound(job), "else the bound would prove nothing"


def test_without_prefetch_stage_3_cannot_hide_its_gathers():
    job = Job(3, prefetch=0, **LINK_BOUND)
    assert fastest(job, steps=1) > bound(job)

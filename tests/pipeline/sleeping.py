"""Schedules, timed honestly on two cores: stages that sleep instead of computing.

A sleeping rank takes no processor, so a step takes what its schedule makes of it, on any machine that is not busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.pipeline.catalogue import make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.schedule import Action, Schedule
from megalite.pipeline.simulate import Costs, Event, Timeline, simulate
from megalite.weight_grad import open_store
from tests.ranks import run


@dataclass(frozen=True)
class Job:
    """A schedule by name, and what every stage sleeps: also one of several on a rank."""

    name: str
    ranks: int = 4
    microbatches: int = 8
    forward_seconds: float = 0.06
    input_gradient_seconds: float = 0.06
    weight_gradient_seconds: float = 0.06

    def schedule(self) -> Schedule:
        return make(self.name, ranks=self.ranks, microbatches=self.microbatches)

    @property
    def costs(self) -> Costs:
        return Costs(self.forward_seconds, self.input_gradient_seconds, self.weight_gradient_seconds)

    @property
    def work_seconds(self) -> float:
        """What each rank sleeps in a step."""
        one = self.forward_seconds + self.input_gradient_seconds + self.weight_gradient_seconds
        return self.schedule().stages_per_rank * self.microbatches * one


class _Sleep(torch.autograd.Function):
    """x -> x, after a while; its weight, a scalar, gets a gradient of 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, job: Job) -> Tensor:
        ctx.weight, ctx.job = weight, job
        time.sleep(job.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None]:
        job: Job = ctx.job
        time.sleep(job.input_gradient_seconds)
        finish = _sleeping_product(job.weight_gradient_seconds)
        if (store := open_store(ctx.weight)) is None:
            return gradient.clone(), finish(), None
        store.put(ctx.weight, lambda: finish)
        return gradient.clone(), None, None


def _sleeping_product(seconds: float) -> Callable[[], Tensor]:
    def finish() -> Tensor:
        time.sleep(seconds)
        return torch.ones(())

    return finish


class SleepingStage(nn.Module):
    """Sleeps in F, B and W; what it passes on is a number."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.job, self.weight = job, nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor | None, microbatch: Tensor) -> Tensor:
        return _Sleep.apply(microbatch if x is None else x, self.weight, self.job)


class Clock:
    """`around` of a Pipeline: begin and end of each action, by the clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    @contextmanager
    def __call__(self, action: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.events.append(Event(Action.parse(action), start, time.perf_counter()))


def sleep_through(job: Job, steps: int) -> list[tuple[Event, ...]]:
    """Runs on every rank: one step to learn shapes by, then those that count; the events of each."""
    mesh, schedule, clock = Mesh.build(Layout(pp=job.ranks)), job.schedule(), Clock()
    stages = {stage: SleepingStage(job) for stage in schedule.stages_of(mesh.pp.rank)}
    pipeline = Pipeline(stages, schedule, pp=mesh.pp, around=clock)
    _learn_shapes(stages, pipeline, job)
    rows = []
    for step in range(1, steps + 1):
        clock.events.clear()
        loss = pipeline.step(torch.ones(job.microbatches).unbind())
        assert loss.item() == job.microbatches
        assert all(stage.weight.grad == step * job.microbatches for stage in stages.values())
        rows.append(tuple(clock.events))
    return rows


def _learn_shapes(stages: dict[int, SleepingStage], pipeline: Pipeline, job: Job) -> None:
    """Headers travel and connections are made before anything is timed; nobody sleeps."""
    awake = Job(job.name, job.ranks, job.microbatches, 0.0, 0.0, 0.0)
    for stage in stages.values():
        stage.job = awake
    pipeline.step(torch.ones(job.microbatches).unbind())
    for stage in stages.values():
        stage.job, stage.weight.grad = job, None


class Slept(NamedTuple):
    """One step. measured: its timeline; simulated: that of the same actions, each as long as it took."""

    measured: Timeline
    simulated: Timeline

    @property
    def ratio(self) -> float:
        """What the executor adds to its schedule: from the first begin of any action to the last end of any."""
        return float(self.measured.makespan / self.simulated.makespan)


def slept(job: Job, *, steps: int) -> list[Slept]:
    """So many steps on forked ranks, the one with the smallest ratio first."""
    schedule = job.schedule()
    seconds = 60 + 3 * steps * float(simulate(schedule, job.costs).makespan)
    ranks = run(sleep_through, job.ranks, job, steps, checked=False, timeout=seconds)
    found = []
    for rows in zip(*ranks, strict=True):
        lasted = {event.action: event.end - event.start for row in rows for event in row}
        found.append(Slept(Timeline(schedule, rows), simulate(schedule, Costs(of=lasted))))
    return sorted(found, key=lambda one: one.ratio)

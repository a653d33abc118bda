"""Overlap, timed honestly on two cores: layers that sleep instead of computing, over a link that sleeps.

Neither takes a processor, so a step takes what its schedule makes of it. Each layer is a unit of its own.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.comm import observe
from megalite.comm.link import Link, Wire
from megalite.comm.timeline import Timeline
from megalite.mesh import Layout, Mesh
from megalite.zero import Zero

FLOAT_BYTES = 4
WARM_UP = 2  # steps: one learns how often gradients come and in which order units are entered, one fills the pipe


@dataclass(frozen=True)
class Job:
    """Equal layers, `ranks` data ranks. gather_seconds: of one layer's weights over the wire, by a ring."""

    stage: int
    ranks: int = 2
    layers: int = 3
    microbatches: int = 1
    forward_seconds: float = 0.025
    backward_seconds: float = 0.05
    gather_seconds: float = 0.015
    latency_seconds: float = 0.001
    weights: int = 2**15
    prefetch: int = 1
    reshard: str = "forward"

    @property
    def wire(self) -> Wire:
        sent = (self.ranks - 1) / self.ranks * self.weights * FLOAT_BYTES
        return Wire(sent / (self.gather_seconds - self.latency_seconds), self.latency_seconds)

    @property
    def reduction_seconds(self) -> float:
        """Of one layer's gradients: stage 0 all-reduces, the others reduce-scatter."""
        scatter = self.gather_seconds
        return 2 * scatter - self.latency_seconds if self.stage == 0 else scatter

    def parts(self) -> list[Part]:
        """Of the step, pass by pass: what computes, and what travels for it meanwhile.

        Stages 1 and 2 gather once a step, under the next forward; they reduce in the last pass, or in every one.
        """
        parts = []
        for number in range(self.microbatches):
            last = number == self.microbatches - 1
            gathers = self.layers if self.stage == 3 or (self.stage > 0 and number == 0) else 0
            again = self.layers - 1 if self.stage == 3 and self.reshard == "forward" else 0  # the last layer stays
            reductions = self.layers if self.stage >= 2 or last else 0
            parts.append(Part(self.layers * self.forward_seconds, gathers * self.gather_seconds))
            travels = again * self.gather_seconds + reductions * self.reduction_seconds
            parts.append(Part(self.layers * self.backward_seconds, travels))
        return parts

    @property
    def exposed_seconds(self) -> float:
        """What no schedule can hide: the first gather, where there is one, and the last reduction. At stage 3 that of
        every pass, since the next one's first gather queues behind it."""
        first, last = (self.gather_seconds if self.stage else 0.0), self.reduction_seconds
        return (first + last) * (self.microbatches if self.stage == 3 else 1)

    @property
    def hidden_seconds(self) -> float:
        """The passes if all that travels is hidden under what takes longer; the step takes `exposed_seconds` more."""
        return sum(max(part) for part in self.parts())

    @property
    def sum_seconds(self) -> float:
        """The step if nothing is."""
        return sum(sum(part) for part in self.parts())


class Part(NamedTuple):
    compute_seconds: float
    travel_seconds: float


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: SleepingLayer) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer = layer
        y = x + 0 * weight[:1]  # reads the weight, so it must be there before the work begins
        layer.sleep("F", layer.job.forward_seconds)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        (weight,) = ctx.saved_tensors
        weight_gradient = torch.ones_like(weight)
        ctx.layer.sleep("B", ctx.layer.job.backward_seconds)
        return gradient.clone(), weight_gradient, None


class SleepingLayer(nn.Module):
    """x -> x, after a while; its weight has a gradient of ones."""

    def __init__(self, job: Job, number: int, timeline: Timeline) -> None:
        super().__init__()
        self.job, self.number, self.timeline = job, number, timeline
        self.weight = nn.Parameter(torch.ones(job.weights))

    def sleep(self, way: str, seconds: float) -> None:
        with self.timeline.range(f"{way}{self.number}"):
            time.sleep(seconds)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x, self.weight, self)


class Slept(NamedTuple):
    """seconds: of each step, from its beginning to the next one's. timeline: of the fastest of them."""

    seconds: list[float]
    timeline: Timeline


def sleep_through(job: Job, *, steps: int, overlap: bool) -> Slept:
    """Runs on every rank. Without overlap each collective is waited for where it is issued."""
    mesh = Mesh.build(Layout(dp=job.ranks))
    timeline = Timeline()
    model = nn.Sequential(*(SleepingLayer(job, number, timeline) for number in range(job.layers)))
    optimizer: Callable[..., torch.optim.Optimizer] = lambda groups: torch.optim.SGD(groups, lr=0.0)  # noqa: E731
    options: dict[str, Any] = {"prefetch": job.prefetch, "reshard": job.reshard}
    zero = Zero(model, mesh, stage=job.stage, units=(SleepingLayer,), optimizer=optimizer, **options)
    x = torch.ones(1, requires_grad=True)
    begins = []
    with observe(Link({"dp": job.wire}, overlap=overlap, timeline=timeline)), observe(timeline):
        for _ in range(WARM_UP + steps + 1):
            begins.append(time.perf_counter())
            zero.begin(microbatches=job.microbatches)
            for _ in range(job.microbatches):
                model(x).sum().backward()
            zero.step()
    spans = list(itertools.pairwise(begins))[WARM_UP:]
    return Slept([end - start for start, end in spans], timeline.between(*min(spans, key=lambda s: s[1] - s[0])))

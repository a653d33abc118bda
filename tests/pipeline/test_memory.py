"""What a pipeline holds: the activations that its schedule promises, one receive a lane, and nothing after a step.

And what it sends: each activation and each gradient once over each boundary.
"""

from __future__ import annotations

import gc
import itertools
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalite.comm import observe
from megalite.comm.link import Link
from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.form import HEADER
from megalite.pipeline.schedule import Action, parse
from megalite.pipeline.simulate import Costs, simulate
from tests.counting import count
from tests.pipeline.stages import ROWS, WIDTH, Body, build, examples, pipeline_axis
from tests.ranks import run

RANKS, MICROBATCHES, LENGTH = 2, 6, 11  # no other tensor has as many entries as an activation
ENTRIES = ROWS * LENGTH * WIDTH


class _Kept(torch.autograd.Function):
    """x + weight, in memory whose end is seen; keeps an object from forward to backward, as activations are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, alive: Alive) -> Tensor:
        ctx.kept = alive.note("graphs", np.zeros(1))
        return torch.from_numpy(alive.note("outputs", (x + weight).numpy()))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient.clone(), gradient.sum(), None


class Alive:
    """Counts what is alive, by kind, and the most that was."""

    def __init__(self) -> None:
        self.now: Counter[str] = Counter()
        self.most: Counter[str] = Counter()

    def note(self, kind: str, array: Any) -> Any:
        self.now[kind] += 1
        self.most[kind] = max(self.most[kind], self.now[kind])
        weakref.finalize(array, self.now.subtract, [kind])
        return array


class Watched(nn.Module):
    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self.weight, self.alive = nn.Parameter(torch.zeros((), dtype=torch.float64)), alive

    def forward(self, x: Tensor) -> Tensor:
        return _Kept.apply(x, self.weight, self.alive)


class Held(NamedTuple):
    """most: graphs and outputs of this rank at once; left: tensors of an activation's size, graphs, and outputs,
    after a step."""

    most: dict[str, int]
    left: tuple[int, int, int]


def held(names: list[str]) -> list[list[Held]]:
    pp, found = pipeline_axis(), []
    gc.disable()  # what only a collector of cycles frees is not freed
    warnings.simplefilter("ignore")
    for name in names:
        made = make(name, ranks=pp.size, microbatches=MICROBATCHES)
        alive = Alive()
        bodies = [lambda alive=alive: Watched(alive)] * made.stages
        pipeline = Pipeline(build(bodies, made.stages_of(pp.rank)), made, pp=pp)
        batch = examples(MICROBATCHES, lengths=(LENGTH,))
        given = {id(x) for example in batch for x in example[:2]}
        steps = []
        for _ in range(2):
            alive.most.clear()
            pipeline.step(batch)
            tensors = [x for x in gc.get_objects() if isinstance(x, Tensor) and x.numel() == ENTRIES]
            left = sum(id(x) not in given for x in tensors)
            del tensors
            steps.append(Held(dict(alive.most), (left, alive.now["graphs"], alive.now["outputs"])))
        found.append(steps)
    return found


def test_a_rank_holds_the_activations_that_its_schedule_promises_and_nothing_after_a_step():
    """Graphs are freed by each backward, which W and BW end. Here nothing is put off, so that B frees all: what W holds
    are the inputs of layers that put theirs off."""
    names = list(SCHEDULES)
    for rank, schedules in enumerate(run(held, RANKS, names, checked=False)):
        for name, steps in zip(names, schedules, strict=True):
            made = make(name, ranks=RANKS, microbatches=MICROBATCHES)
            for most, left in steps:
                assert most["graphs"] <= made.peaks[rank], name
                assert left == (0, 0, 0), name


LONG_WAY = """
F0@0 F1@0 F2@0 BW0@0 BW1@0 BW2@0
F0@1 BW0@1 F1@1 BW1@1 F2@1 BW2@1
"""


def in_passing() -> tuple[list[int], list[int]]:
    """At each action's begin: outputs that are alive, and tensors of an activation's size beside the batch's."""
    pp, alive, batch = pipeline_axis(), Alive(), examples(3, lengths=(LENGTH,))
    given = {id(x) for example in batch for x in example[:2]}
    outputs: list[int] = []
    tensors: list[int] = []
    gc.disable()

    @contextmanager
    def around(action: str) -> Iterator[None]:
        outputs.append(alive.now["outputs"])
        every = (x for x in gc.get_objects() if isinstance(x, Tensor) and x.numel() == ENTRIES)
        tensors.append(sum(id(x) not in given for x in every))
        yield

    pipeline = Pipeline(build([lambda: Watched(alive)] * 2, [pp.rank]), parse(LONG_WAY), pp=pp, around=around)
    for _ in range(2):
        outputs.clear()
        tensors.clear()
        pipeline.step(batch)
    return outputs, tensors


def test_an_output_is_let_go_when_its_reader_has_told_that_it_took_it_and_one_receive_is_posted_ahead():
    """Rank 0: the gradient of micro-batch 0 tells that 0 and 1 were taken, long before the backward of 1. Rank 1 has,
    when it begins an F, its input and the next one's buffer; at last, instead, gradient 1, of whose way nothing tells.
    """
    (outputs, _), (_, tensors) = run(in_passing, 2, checked=False)
    assert outputs == [0, 1, 2, 1, 0, 0]
    assert tensors[::2] == [2, 2, 2]


def sent(name: str) -> list[tuple[float, float, int]]:
    """Bytes of activations and of gradients, and messages, of a step in which shapes are told, of one in which they are
    known, and of an evaluation."""
    pp = pipeline_axis()
    made = make(name, ranks=pp.size, microbatches=MICROBATCHES)
    pipeline = Pipeline(build([Body] * made.stages, made.stages_of(pp.rank)), made, pp=pp)
    found = []
    for work in (pipeline.step, pipeline.step, pipeline.evaluate):
        with count() as seen:
            work(examples(MICROBATCHES, lengths=(LENGTH,)))
        ways = [seen.bytes_sent("send", group=f"{kind} lane") for kind in ("activation", "gradient")]
        found.append((*ways, seen.calls("send")))
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb_v"])
def test_over_each_boundary_goes_one_activation_of_each_microbatch_and_one_gradient_comes_back(name):
    """b s h entries each way, whatever the schedule; once, a header. On one rank nothing is sent."""
    rank_of = SCHEDULES[name].placement(4)
    crossings = [(a, b) for a, b in itertools.pairwise(rank_of) if a != b]
    for rank, (first, second, evaluation) in enumerate(run(sent, 4, name, checked=False)):
        there, back = (sum(pair[end] == rank for pair in crossings) for end in (0, 1))
        data = MICROBATCHES * ENTRIES * 8
        assert first == (there * (data + HEADER.shape[0] * 8), back * data, (there + back) * MICROBATCHES + there)
        assert second == (there * data, back * data, (there + back) * MICROBATCHES)
        assert evaluation == (there * data, 0, there * MICROBATCHES)


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WORK_SECONDS)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(WORK_SECONDS)
        return gradient.clone()


class Sleeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return _Sleeps.apply(self.layer(x))


WORK_SECONDS, LATENCY_SECONDS, LATE_SECONDS = 0.04, 0.05, 0.05
TIMED = ("naive", "gpipe", "1f1b")


def timed() -> list[dict[str, tuple[float, float]]]:
    """By schedule: action -> (begin, end), in seconds of one clock, over a link of much latency."""
    pp, found = pipeline_axis(), []
    for name in TIMED:
        made = make(name, ranks=pp.size, microbatches=4)
        times: dict[str, tuple[float, float]] = {}

        @contextmanager
        def around(action: str, times: dict[str, tuple[float, float]] = times) -> Iterator[None]:
            began = time.perf_counter()
            yield
            times[action] = (began, time.perf_counter())

        pipeline = Pipeline(build([Sleeping] * made.stages, made.stages_of(pp.rank)), made, pp=pp, around=around)
        pipeline.step(examples(4, lengths=(LENGTH,)))
        with observe(Link({"pp": (1e15, LATENCY_SECONDS)})):
            pipeline.step(examples(4, lengths=(LENGTH,)))
        found.append(times)
    return found


def test_a_link_over_pp_delays_a_step_by_what_the_simulator_says():
    """Fed with what each action took. Sleeps, so that no processor is asked for."""
    for name, ranks in zip(TIMED, zip(*run(timed, 2, checked=False), strict=True), strict=True):
        times = {Action.parse(word): time for rank in ranks for word, time in rank.items()}
        took = max(end for _, end in times.values()) - min(began for began, _ in times.values())
        seconds = {action: end - began for action, (began, end) in times.items()}
        made = make(name, ranks=2, microbatches=4)
        without, expected = (simulate(made, Costs(of=seconds, latency=x)).makespan for x in (0, LATENCY_SECONDS))
        assert expected - without > LATENCY_SECONDS
        assert abs(took - expected) <= LATE_SECONDS, (name, took, expected, without)

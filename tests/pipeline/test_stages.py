"""Any module is a stage: frozen, plain, tied, of several dtypes; its output a view, integer, or its input.

Each model here is cut into four stages and run on two ranks: in a V, where a rank hands over to itself at the bottom,
and in loops; by split backwards and by whole ones.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.embedding import VocabParallelEmbedding
from megalite.layers.linear import ColumnParallelLinear
from megalite.mesh import Axis
from megalite.pipeline.catalogue import make
from megalite.pipeline.execute import Pipeline
from tests.pipeline.stages import (
    WIDTH,
    Bodies,
    Body,
    Example,
    Result,
    assert_equals,
    build,
    examples,
    linear,
    one_process,
    pipeline_axis,
    take_gradients,
)
from tests.ranks import run

SCHEDULES = ("zb_v", "interleaved_zb", "interleaved", "bfs")
MICROBATCHES = 3


class Twice(nn.Module):
    """One linear used two times, and a weight that a plain function reads beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.one = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(torch.tanh(self.one(x))) + x @ self.one.weight


class Ignoring(nn.Module):
    """Its output says nothing of its input but the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.expand(x.shape)


class Of(nn.Module):
    """A function of the output of a residual layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.function = Body(1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


class Narrow(nn.Module):
    """Computes in one dtype and gives another, whatever it is given."""

    def __init__(self, inside: torch.dtype, outside: torch.dtype) -> None:
        super().__init__()
        self.one, self.inside, self.outside = linear(dtype=inside), inside, outside

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.outside) + torch.tanh(self.one(x.to(self.inside))).to(self.outside)


class Words(nn.Module):
    """Reads integers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = VocabParallelEmbedding(WIDTH, WIDTH, tp=Axis("tp"), dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x).expand(-1, -1, WIDTH)


def frozen() -> Body:
    return Body().requires_grad_(False)


def of(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    return lambda: Of(function)


def narrow(inside: torch.dtype, outside: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: Narrow(inside, outside)


def first_channel_as_words(x: Tensor) -> Tensor:
    return x.argmax(-1)


MODELS: Mapping[str, Bodies] = {
    "a linear used twice": [Twice, Body, Twice, Body],
    "frozen first": [frozen, Body, Body, Body],
    "frozen middle": [Body, frozen, frozen, Body],
    "frozen last": [Body, Body, Body, frozen],
    "all frozen but one": [frozen, frozen, Body, frozen],
    "all frozen": [frozen, frozen, frozen, frozen],
    "without a parameter": [nn.Tanh, Body, nn.Tanh, nn.Tanh],
    "layerless, which give their input": [nn.Identity, Body, nn.Identity, nn.Identity],
    "without regard to their input": [Body, Body, Ignoring, Body],
    "without a way back": [Body, of(Tensor.detach), Body, Body],
    "transposed in memory": [of(lambda x: x.mT.contiguous().mT)] * 4,
    "views": [of(lambda x: x[:, :2]), of(lambda x: x[:, ::2]), of(lambda x: x[:, :1]), of(lambda x: x.view(-1, WIDTH))],
    "expanded": [of(lambda x: x.mean(-1, keepdim=True).expand_as(x))] * 4,
    "without an entry": [Body, of(lambda x: x[:, :0]), Body, Body],
    "complex": [of(torch.fft.rfft), lambda: Lambda(torch.fft.irfft), of(torch.fft.fft), lambda: Lambda(torch.real)],
    "integer": [Body, of(first_channel_as_words), lambda: Lambda(lambda x: x + 1 - 1), Words],
    "bfloat16 within, float32 between": [narrow(torch.bfloat16, torch.float32)] * 4,
    "float32 within, bfloat16 between": [narrow(torch.float32, torch.bfloat16)] * 4,
    "another dtype at each boundary": [
        narrow(torch.float32, torch.float16),
        narrow(torch.bfloat16, torch.bfloat16),
        narrow(torch.float64, torch.float32),
        narrow(torch.float32, torch.float64),
    ],
}


class Lambda(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def steps(name: str) -> list[list[Result]]:
    """By schedule, two steps: one in which shapes are told, one in which they are known."""
    pp = pipeline_axis()
    found = []
    for schedule in SCHEDULES:
        made = make(schedule, ranks=pp.size, microbatches=MICROBATCHES)
        stages = build(MODELS[name], made.stages_of(pp.rank))
        pipeline = Pipeline(stages, made, pp=pp)
        results = []
        for step in range(2):
            loss = pipeline.step(examples(MICROBATCHES, step=step), denominator=3.0)
            results.append(Result(loss, take_gradients(stages)))
        found.append(results)
    return found


def all_steps() -> dict[str, list[list[Result]]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {name: steps(name) for name in MODELS}


def test_any_module_is_a_stage_and_gives_what_it_gives_in_one_process():
    by_rank = run(all_steps, 2, checked=False)
    for name, bodies in MODELS.items():
        whole = build(bodies, range(len(bodies)))
        expected = [one_process(whole, examples(MICROBATCHES, step=step), denominator=3.0) for step in range(2)]
        for number, schedule in enumerate(SCHEDULES):
            for step in range(2):
                results = [rank[name][number][step] for rank in by_rank]
                assert_equals(results, expected[step], f"stages {name}, {schedule}")


def tied() -> list[tuple[Result, dict[int, int]]]:
    """In a V the first and the last stage lie on rank 0, and have one weight. With each stage's arrivals of it."""
    pp, found = pipeline_axis(), []
    for schedule in ("zb_v", "v_half", "dualpipe_v"):
        made = make(schedule, ranks=pp.size, microbatches=MICROBATCHES)
        stages = build([Body] * 4, made.stages_of(pp.rank))
        if pp.rank == 0:
            tie(stages)
        sums: dict[int, list[Tensor]] = {number: [] for number in stages}
        for number, stage in list(stages.items())[:1]:

            def take(weight: Tensor, sums: list[Tensor] = sums[number]) -> None:
                if weight.grad is not None:  # it fires without one where it is put off
                    sums.append(weight.grad)
                    weight.grad = None

            first_linear(stage).weight.register_post_accumulate_grad_hook(take)
        loss = Pipeline(stages, made, pp=pp).step(examples(MICROBATCHES))
        for number, gradients in sums.items():
            if gradients:
                first_linear(stages[number]).weight.grad = torch.stack(gradients).sum(0)
        arrivals = {number: len(gradients) for number, gradients in sums.items()}
        found.append((Result(loss, take_gradients(stages)), arrivals))
    return found


def tie(stages: Mapping[int, nn.Module]) -> None:
    first_linear(stages[3]).weight = first_linear(stages[0]).weight


def first_linear(stage: nn.Module) -> ColumnParallelLinear:
    return next(module for module in stage.modules() if isinstance(module, ColumnParallelLinear))


def test_a_weight_of_two_stages_of_one_rank_has_the_sum_of_both_and_arrives_once_for_each():
    whole = build([Body] * 4, range(4))
    tie(whole)
    expected = one_process(whole, examples(MICROBATCHES))
    for found in zip(*run(tied, 2, checked=False), strict=True):
        assert_equals([result for result, _ in found], expected, "tied")
        assert [arrivals for _, arrivals in found] == [{0: 2 * MICROBATCHES, 3: 0}, {1: MICROBATCHES, 2: 0}]


def reported(bodies: Bodies) -> list[str]:
    pp = pipeline_axis()
    made = make("zb_v", ranks=pp.size, microbatches=MICROBATCHES)
    pipeline = Pipeline(build(bodies, made.stages_of(pp.rank)), made, pp=pp)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            pipeline.step(examples(MICROBATCHES))
    return [str(one.message) for one in seen]


def plain() -> Body:
    return Body(defers=False)


@pytest.mark.parametrize(
    ("bodies", "told"),
    [([plain, Body, plain, plain], [{0, 3}, {2}]), ([Body, frozen, nn.Identity, Body], [set(), set()])],
)
def test_a_stage_that_puts_nothing_off_is_told_once_by_name(bodies, told):
    """Plain linears compute their weight gradients in B; what has no gradient to put off is no matter."""
    for texts, stages in zip(run(reported, 2, bodies, checked=False), told, strict=True):
        assert len(texts) == len(stages)
        for text in texts:
            assert (found := re.match(r"stage (\d) \(Stage\) puts no weight gradient off", text))
            assert int(found[1]) in stages


class Refusal(NamedTuple):
    bodies: Sequence[Callable[[], nn.Module]]
    says: str


class Grows(nn.Module):
    """Gives one more column each time."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x[..., : self.calls]


REFUSALS = {
    "a tuple": Refusal([lambda: Lambda(lambda x: (x, x)), Body], "stage 0 gave a tuple; a stage gives one tensor"),
    "another shape": Refusal(
        [Grows, Body],
        r"stage 0 gave torch.float64 of shape \(2, 3, 2\) for micro-batch 1, and torch.float64 of shape \(2, 3, 1\) "
        "before, for a micro-batch of the same shapes",
    ),
    "nine dims": Refusal(
        [lambda: Lambda(lambda x: x[(None,) * 6]), Body],
        r"stage 0 gave torch.float64 of shape \(1, 1, 1, 1, 1, 1, 2, 3, 6\); between stages travel tensors of "
        "float64,.* with at most 8 dims",
    ),
    "sparse": Refusal(
        [lambda: Lambda(lambda x: x.to_sparse()), Body], "stage 0 gave a tensor that is sparse or nested"
    ),
    "eight bits": Refusal([lambda: Lambda(lambda x: x.to(torch.float8_e4m3fn)), Body], "float8_e4m3fn of shape"),
}


def refused(name: str) -> str:
    pp = pipeline_axis()
    made = make("gpipe", ranks=pp.size, microbatches=MICROBATCHES)
    pipeline = Pipeline(build(REFUSALS[name].bodies, [pp.rank]), made, pp=pp)
    if pp.rank:
        return ""
    with pytest.raises(ValueError) as raised:
        pipeline.step(examples(MICROBATCHES))
    return str(raised.value)


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_no_activation_is_refused_by_its_stage(name):
    text, _ = run(refused, 2, name, checked=False)
    assert re.search(REFUSALS[name].says, text), text


def test_a_last_stage_without_a_summed_loss_is_refused_with_its_shape():
    class Head(nn.Module):
        def forward(self, x: Tensor | None, example: Example) -> Tensor:
            return example.x.sum(-1)

    pipeline = Pipeline({0: Head()}, make("gpipe", ranks=1, microbatches=1))
    with pytest.raises(ValueError, match=r"the last stage gave a tensor of shape \(2, 3\); it gives the summed loss"):
        pipeline.step(examples(1))
    with pytest.raises(ValueError, match="the last stage gave"):
        pipeline.evaluate(examples(1))

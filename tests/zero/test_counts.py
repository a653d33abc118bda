"""What each stage sends, counted at the collectives: which, how often, of how many elements, in which dtype.

In units of (n-1)/n of a unit's elements, over n data ranks and with m micro-batches, a gather is 1, a reduce-scatter 1
and an all-reduce 2. A step costs 2 at stages 0 and 1, m + 1 at stage 2, and at stage 3, by what `reshard` says,

| unit              | forward | backward | step  | because                                                             |
|-------------------|---------|----------|-------|---------------------------------------------------------------------|
| any               | 3m      | 2m       | m + 1 | gathered for forward, for backward, and reduced                     |
| last of forward   | 2m      | 2m       | m + 1 | it stays whole from its forward into its backward                   |
| embedding         | 2m      | 2m       | m + 1 | its backward reads no weight                                        |
| tied to the last  | 3m      | 2m       | m + 1 | gathered for the embedding and for the head, and as those two       |
| root              | m + 1   | m + 1    | m + 1 | used everywhere, so whole: gathered after the update, as at stage 2 |
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.embedding import LearnedPositions, VocabParallelEmbedding
from megalite.mesh import Axis, Layout, Mesh
from megalite.spec import ParamSpec, ones
from megalite.zero import Zero
from tests.counting import Call, count
from tests.ranks import run
from tests.zero.models import Weights, matrix
from tests.zero.training import adamw

WIDTH, VOCAB, SEQ = 8, 12, 4
MICROBATCHES = (1, 3)
RESHARD = ("forward", "backward", "step")


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """The shape of a language model, each of whose units has another size: root, embedding, positions, blocks, head."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.embedding = VocabParallelEmbedding(VOCAB, WIDTH, tp=Axis("tp"))
        self.positions = LearnedPositions(SEQ + 1, WIDTH, tp=Axis("tp"))
        self.blocks = nn.ModuleList(Block(hidden) for hidden in (16, 24, 32))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embedding(ids), torch.arange(SEQ))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float().square().mean() * self.scale.sum()


UNITS = ("root", "embedding", "positions", "blocks.0", "blocks.1", "blocks.2", "norm + head", "embedding.weight")


class Sent(NamedTuple):
    """What one rank sent in a step. kinds: (unit, kind of collective, dtype) -> calls; elements: of the whole model."""

    kinds: dict[tuple[str, str, str], int]
    bytes: float
    elements: dict[str, int]


def a_step(zero: Zero, model: nn.Module, mesh: Mesh, microbatches: int) -> list[Call]:
    with count() as seen:
        zero.begin(microbatches=microbatches)
        for index in range(microbatches):
            ids = torch.arange(2 * SEQ).view(2, SEQ) + index + mesh.dp.rank
            model(ids % VOCAB).backward()
        zero.step(max_norm=1.0)
        for unit in zero.units:
            unit.wait()
    return [call for call in seen.record if call.group != "world" and call.dtype != torch.float64]


def sent(dp: int, tied: bool, dtype: torch.dtype, choices: list[dict[str, Any]]) -> list[list[Sent]]:
    """The first and the second step of each choice of options and number of micro-batches."""
    mesh = Mesh.build(Layout(dp=dp))
    found = []
    for options in choices:
        microbatches = options["microbatches"]
        given = {name: value for name, value in options.items() if name != "microbatches"}
        model = Model(tied=tied).to(dtype)
        zero = Zero(model, mesh, units=(Block,), optimizer=adamw, seed=0, verify=False, **given)
        elements = {unit.name: unit.weights.tensor.numel() for unit in zero.units}
        names = {numel: name for name, numel in elements.items()}
        names |= {numel // dp: name for name, numel in elements.items()} if "shard_over" in options else {}
        assert len(names) >= len(elements), "sizes must tell units apart"
        steps = []
        for _ in range(2):
            calls = a_step(zero, model, mesh, microbatches)
            kinds = Counter((names[call.numel], call.kind, str(call.dtype)[6:]) for call in calls)
            steps.append(Sent(dict(kinds), sum(call.sent for call in calls), elements))
        found.append(steps)
    return found


def expected(unit: str, m: int, *, stage: int, reshard: str = "forward", tied: bool = False) -> dict[str, int]:
    """Gathers, reduce-scatters and all-reduces of a unit in a step of m micro-batches."""
    if stage == 0:
        return {"all_reduce": 1}
    if stage < 3 or unit == "root" or reshard == "step":
        gathers = 1
    elif reshard == "backward":
        gathers = m
    else:
        once = ("embedding", "positions") if tied else ("embedding", "positions", "norm + head")
        gathers = m if unit in once else 2 * m
    return {"all_gather": gathers, "reduce_scatter": m if stage >= 2 else 1}


CHOICES = [{"stage": stage, "microbatches": m} for stage in (0, 1, 2) for m in MICROBATCHES] + [
    {"stage": 3, "microbatches": m, "reshard": reshard, "prefetch": prefetch}
    for m in MICROBATCHES
    for reshard in RESHARD
    for prefetch in (0, 1, 2)
]


SIZES = {"float32": 4, "bfloat16": 2}
SHARES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}


@pytest.mark.parametrize(
    ("dp", "dtype", "tied"),
    [(2, torch.float32, False), (2, torch.bfloat16, True), (4, torch.float32, True), (4, torch.bfloat16, False)],
)
def test_each_unit_is_gathered_and_reduced_as_often_as_its_stage_says_in_its_dtypes(dp, dtype, tied):
    """In every step, the first included, and whatever is prefetched."""
    narrow = str(dtype)[6:]
    for rank in run(sent, dp, dp, tied, dtype, CHOICES, checked=False):
        for options, steps in zip(CHOICES, rank, strict=True):
            m, stage = options["microbatches"], options["stage"]
            for step in steps:
                law: dict[tuple[str, str, str], int] = {}
                for unit in step.elements:
                    counts = expected(unit, m, stage=stage, reshard=options.get("reshard", "forward"), tied=tied)
                    for kind, number in counts.items():
                        law[unit, kind, narrow if kind == "all_gather" else "float32"] = number
                assert step.kinds == law, options
                assert step.bytes == sum(
                    number * SHARES[kind] * step.elements[unit] * SIZES[name] * (dp - 1) / dp
                    for (unit, kind, name), number in law.items()
                )


def in_shares(step: Sent, dp: int) -> float:
    """What was sent, as a multiple of (n-1)/n of the elements, in float32."""
    return step.bytes / (4 * (dp - 1) / dp * sum(step.elements.values()))


def test_a_step_of_one_microbatch_sends_the_parameters_twice_and_at_stage_3_three_times():
    """At stage 3 less by a gather of what backward need not gather: the last unit, the embeddings, the root."""
    choices = [{"stage": stage, "microbatches": 1} for stage in range(4)]
    stages = run(sent, 2, 2, False, torch.float32, choices, checked=False)[0]
    assert [in_shares(steps[1], 2) for steps in stages[:3]] == [2, 2, 2]
    elements = stages[3][1].elements
    spared = sum(elements[unit] for unit in ("root", "embedding", "positions", "norm + head"))
    assert in_shares(stages[3][1], 2) == pytest.approx(3 - spared / sum(elements.values()), rel=1e-12)


def hybrid_calls() -> list[tuple[int, Counter[tuple[str, str, int]], int]]:
    mesh = Mesh.build(Layout(dp=4))
    found = []
    for stage in (1, 2, 3):
        model = Model(tied=False)
        zero = Zero(model, mesh, units=(Block,), stage=stage, shard_over=2, optimizer=adamw, seed=0, verify=False)
        calls = a_step(zero, model, mesh, 3)
        kinds: Counter[tuple[str, str, int]] = Counter()
        for call in calls:
            kinds[call.kind, call.group, call.ranks] += call.numel
        found.append((stage, kinds, sum(unit.weights.tensor.numel() for unit in zero.units)))
    return found


def test_a_hybrid_gathers_and_scatters_among_neighbours_and_sums_shards_over_replicas_once_a_step():
    for rank in run(hybrid_calls, 4, checked=False):
        for stage, kinds, elements in rank:
            data = "dense_data"
            reductions = 3 if stage >= 2 else 1
            assert kinds["reduce_scatter", f"{data}_shards2", 2] == reductions * elements
            assert kinds["all_reduce", f"{data}_replicas2", 2] == elements // 2
            gathered = kinds["all_gather", f"{data}_gathers2", 2]
            assert gathered == elements if stage < 3 else gathered > 3 * elements
            assert len(kinds) == 3


def dtypes_of_gradients() -> list[set[tuple[str, str]]]:
    """(kind, dtype) of all collectives of a step of bfloat16 weights, of which one is partial over tp."""
    mesh = Mesh.build(Layout(dp=2, tp=2))
    found = []
    for stage in range(4):
        specs = {"scale": ParamSpec((8,), ones, partial=(mesh.tp,)), "matrix": matrix(8, 8, cut={mesh.tp: 0})}
        model = nn.Sequential(Weights(torch.bfloat16, **specs))
        zero = Zero(model, mesh, stage=stage, optimizer=adamw, seed=0, verify=False)
        with count() as seen:
            for _ in range(2):
                zero.begin(microbatches=2)
                for _ in range(2):
                    model[0](scale=1.0 + mesh.tp.rank, matrix=2.0).backward()
                zero.step()
        found.append({(call.kind, str(call.dtype)[6:]) for call in seen.record if call.group != "world"})
    return found


def test_every_collective_of_gradients_is_in_float32_under_bfloat16_at_every_stage():
    """The sums over tp too. Weights alone travel in bfloat16."""
    summed, weights = {("reduce_scatter", "float32"), ("all_reduce", "float32")}, {("all_gather", "bfloat16")}
    ranks = run(dtypes_of_gradients, 4)
    assert all(stages[0] == {("all_reduce", "float32")} for stages in ranks)
    for stage in (1, 2, 3):  # over tp only where a rank's shard has the partial parameter
        assert set.union(*(stages[stage] for stages in ranks)) == summed | weights


def reductions(microbatches: int) -> list[int]:
    mesh = Mesh.build(Layout(dp=2))
    found = []
    for stage in range(4):
        model = Model(tied=True)
        zero = Zero(model, mesh, units=(Block,), stage=stage, optimizer=adamw, seed=0)
        calls = [a_step(zero, model, mesh, microbatches) for _ in range(2)][1]
        number = sum(call.kind in ("all_reduce", "reduce_scatter") for call in calls)
        assert number % len(zero.units) == 0
        found.append(number // len(zero.units))
    return found


@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_unit_is_reduced_once_a_step_and_once_a_microbatch_where_gradients_are_cut(microbatches):
    """Accumulation sends nothing before the last micro-batch, at stages 0 and 1."""
    assert run(reductions, 2, microbatches) == [[1, 1, microbatches, microbatches]] * 2

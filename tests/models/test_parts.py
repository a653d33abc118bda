"""The parts of a model, run one after the other, are the whole model: loss, gradients, names and first weights."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.recompute import Recompute
from megalite.mesh import Layout, Mesh
from megalite.models import stages
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.gpt import GPT
from megalite.models.mlp import MLP
from megalite.models.part import Part
from megalite.spec import init_parameters, param_specs
from megalite.weight_grad import WeightGradStore
from tests.law import assert_equal
from tests.layouts import MODELS, SEED, global_batch
from tests.ranks import run

LAYERS = 4


def config_of(name: str) -> GPTConfig | MLPConfig:
    """With more layers than the table's, so that they can be split unevenly, and windows by layer."""
    config = MODELS[name]
    if isinstance(config, GPTConfig) and config.layer_types:
        return replace(config, num_hidden_layers=LAYERS, layer_types=config.layer_types * 2)
    return replace(config, num_hidden_layers=LAYERS if isinstance(config, GPTConfig) else config.num_hidden_layers)


def parts_of(sizes: Sequence[int]) -> dict[int, Part]:
    ends = [sum(sizes[: stage + 1]) for stage in range(len(sizes))]
    return dict(enumerate(Part.each([range(end - size, end) for size, end in zip(sizes, ends, strict=True)])))


def build(
    name: str, sizes: Sequence[int] | None, mesh: Mesh, *, sequence_parallel: bool, recompute: Recompute
) -> list[Any]:
    """The whole model, or all of its parts."""
    config = config_of(name)
    how: dict[str, Any] = {"mesh": mesh, "device": "meta", "dtype": torch.float64}
    if isinstance(config, GPTConfig):
        how |= {"sequence_parallel": sequence_parallel, "recompute": recompute, "seed": SEED}
    if sizes is None:
        models: list[Any] = [GPT(config, **how) if isinstance(config, GPTConfig) else MLP(config, **how)]
    else:
        models = list(stages(config, parts_of(sizes), rank_of=[0] * len(sizes), **how).values())
    init_parameters(models, SEED)
    return models


def passed(models: Sequence[nn.Module], name: str, *, deferred: bool) -> dict[str, Tensor]:
    """Loss and gradients of one micro-batch, each part given the one before's output as if it had travelled."""
    batch, ends = global_batch(name, 1), []
    x = None
    for model in models:
        before = None if x is None else x.detach().requires_grad_()
        x = model(before, batch)
        ends.append((before, x))
    gradient = None
    store = WeightGradStore()
    for before, after in reversed(ends):
        if deferred:
            with store.open():
                torch.autograd.backward(after, gradient)
            store.run()
        else:
            torch.autograd.backward(after, gradient)
        gradient = None if before is None else before.grad
    found = {"loss": x.detach()}
    for model in models:
        found |= {name: parameter.grad for name, parameter in model.named_parameters()}
    return found


def whole_and_parts(
    name: str, sizes: Sequence[int], tp: int, sequence_parallel: bool, recompute: Recompute, deferred: bool
) -> None:
    mesh, config = Mesh.build(Layout(tp=tp)), config_of(name)
    how: dict[str, Any] = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    whole, parts = build(name, None, mesh, **how), build(name, sizes, mesh, **how)
    assert param_specs(whole[0]) == {n: s for one in parts for n, s in _untied_specs(one).items()}
    for one in parts:
        for n, parameter in one.named_parameters():
            assert torch.equal(parameter, dict(whole[0].named_parameters())[n]), n
    expected, found = passed(whole, name, deferred=False), passed(parts, name, deferred=deferred)
    assert expected.keys() == found.keys()
    for n, value in expected.items():
        if value is None:
            assert found[n] is None, n
        elif isinstance(config, MLPConfig) or (n.startswith("embedding") and config.tie_word_embeddings):
            # The one gathers a cut output, whose gradient lies otherwise in memory when it has travelled; of a tied
            # weight the summands of head and tokens are added in another order.
            assert_equal(found[n], value, n)
        else:
            assert torch.equal(found[n], value), n


def _untied_specs(part: nn.Module) -> dict[str, Any]:
    """Tied stages on one rank name the axis that joins it with itself."""
    return {
        name: replace(spec, partial=tuple(axis for axis in spec.partial if axis.name != "tie"))
        for name, spec in param_specs(part).items()
    }


CASES = [
    *[(name, sizes) for name in ("llama", "gpt2", "qwen3", "windows") for sizes in ((2, 2), (1, 3), (0, 3, 1, 0))],
    *[("mlp", sizes) for sizes in ((2, 2), (1, 3), (1, 2, 1), (1, 1, 1, 1), (4, 0))],
    *[("mlp of three", sizes) for sizes in ((2, 1), (1, 2), (1, 1, 1), (3, 0))],
]


@pytest.mark.parametrize(("name", "sizes"), CASES)
@pytest.mark.parametrize("deferred", [False, True])
def test_the_parts_one_after_the_other_are_the_whole_model(name, sizes, deferred):
    whole_and_parts(name, sizes, 1, False, Recompute("full", every=2), deferred)


@pytest.mark.parametrize(("name", "sizes"), CASES)
def test_so_they_are_on_a_tensor_axis_where_what_is_handed_over_may_be_cut(name, sizes):
    run(whole_and_parts, 2, name, sizes, 2, False, Recompute("none"), False)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "qwen3", "olmo2"])
def test_so_they_are_with_the_sequence_cut(name):
    run(whole_and_parts, 2, name, (1, 3), 2, True, Recompute("selective", ("norm", "mlp")), True)


def test_a_part_makes_only_what_it_needs():
    first, middle, last = build("gpt2", (1, 2, 1), Mesh.build(), sequence_parallel=False, recompute=Recompute("none"))
    assert {name.split(".")[0] for name, _ in first.named_parameters()} == {"embedding", "positions", "blocks"}
    assert {".".join(name.split(".")[:2]) for name, _ in middle.named_parameters()} == {"blocks.1", "blocks.2"}
    names = {name.split(".")[0] for name, _ in last.named_parameters()}
    assert names == {"embedding", "blocks", "norm"}, "the head's weight is the embedding's"
    assert last.head.weight is last.embedding.weight is first.embedding.weight
    untied = build("llama", (0, 4, 0), Mesh.build(), sequence_parallel=False, recompute=Recompute("none"))
    assert [sorted({n.split(".")[0] for n, _ in one.named_parameters()}) for one in untied] == [
        ["embedding"], ["blocks"], ["head", "norm"]
    ]  # fmt: skip
    assert [one.rotary is None for one in untied] == [True, False, True]


def placed_in_a_v() -> None:
    """Both ends on rank 0: one Parameter there; the other rank, which holds no end, gets its own parts alone."""
    mesh, parts = Mesh.build(Layout(pp=2)), parts_of((1, 1, 1, 1))
    mine = {stage: part for stage, part in parts.items() if (0, 1, 1, 0)[stage] == mesh.pp.rank}
    built = stages(config_of("gpt2"), mine, mesh=mesh, rank_of=(0, 1, 1, 0), device="meta")
    assert sorted(built) == ([0, 3] if mesh.pp.rank == 0 else [1, 2])
    if mesh.pp.rank == 0:
        assert built[0].embedding.weight is built[3].head.weight
    assert all(axis.size == 1 for one in built.values() for s in param_specs(one).values() for axis in s.partial)
    with pytest.raises(ValueError, match=rf"^pp rank {mesh.pp.rank} was given the stages \[., .\], and rank_of=\[0, 1"):
        stages(config_of("gpt2"), mine, mesh=mesh, device="meta")


def placed_in_line() -> None:
    """Each end has the weight: under one name, of one value, a summand over the axis of these two ranks."""
    mesh, parts = Mesh.build(Layout(pp=3)), parts_of((1, 2, 1))
    (stage,) = stages(config_of("gpt2"), {mesh.pp.rank: parts[mesh.pp.rank]}, mesh=mesh, device="meta").values()
    init_parameters(stage, SEED)
    spec = param_specs(stage).get("embedding.weight")
    if mesh.pp.rank == 1:
        assert spec is None
    else:
        assert [(axis.name, axis.ranks) for axis in spec.partial] == [("tie", (0, 2))]
        whole = GPT(config_of("gpt2"), mesh=Mesh(Layout(), 0), device="meta")
        init_parameters(whole, SEED)
        assert torch.equal(stage.embedding.weight, whole.embedding.weight)


def test_tied_weights_are_one_parameter_on_one_rank_and_summands_on_two():
    run(placed_in_a_v, 2)
    run(placed_in_line, 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GPT(config_of("gpt2"), part=Part(range(2), True, False)), "model.tie_word_embeddings=true ties"),
        (lambda: MLP(MLPConfig(), part=Part(range(0), True, False)), "the first stage has no layer, and an MLP has"),
        (
            lambda: stages(MLPConfig(), {0: Part(range(2)), 1: Part(range(2, 4))}, mesh=Mesh.build(), rank_of=[0, 0]),
            "stage 0 of 2 has is_first=True and is_last=True",
        ),
        (
            lambda: GPT(config_of("llama"), part=Part(range(2, 4), False, True))(None, global_batch("llama", 1)),
            "the stage of layers [2, 3] is not the first",
        ),
        (
            lambda: MLP(MLPConfig(hidden_size=16), part=Part(range(2, 4), False, True))(None, global_batch("mlp", 1)),
            "the stage of layers [2, 3] is not the first",
        ),
    ],
)
def test_what_cannot_be_a_part_is_refused(make, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make()

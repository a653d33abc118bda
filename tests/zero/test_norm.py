"""One norm, in which every entry of every gradient counts once, wherever and however often it is held."""

from __future__ import annotations

import math

import pytest
import torch

from megalite.layers.linear import ColumnParallelLinear
from megalite.layers.norm import LayerNorm, RMSNorm
from megalite.mesh import Layout, Mesh
from megalite.spec import ParamSpec, ones
from megalite.zero import Zero
from megalite.zero.norm import sum_of_squares
from tests.ranks import run
from tests.zero.models import Weights
from tests.zero.training import adamw


def norm_of(model: Weights, mesh: Mesh, **gradients: float) -> float:
    """The norm after one backward in which each rank gives the parameters these gradients in every entry."""
    zero = Zero(model, mesh, optimizer=adamw, seed=0, verify=False)
    zero.begin(microbatches=1)
    model(**gradients).backward()
    return zero.step().item()


def head_sharded() -> float:
    mesh = Mesh.build(Layout(tp=2))
    return norm_of(Weights(bias=ParamSpec((24,), ones, cut={mesh.tp: 0}, decay=False)), mesh, bias=1.0)


def test_a_parameter_cut_over_tp_is_counted_once_and_wholly():
    assert run(head_sharded, 2) == [pytest.approx(math.sqrt(24), rel=1e-15)] * 2


def layers_cut_over_tp() -> list[tuple[int, float]]:
    """(entries of the whole, norm) of what layers cut along their outputs or heads, at a gradient of 1 everywhere."""
    mesh = Mesh.build(Layout(tp=2))
    layers = [
        ColumnParallelLinear(3, 24, tp=mesh.tp, dtype=torch.float64),
        ColumnParallelLinear(3, 24, tp=mesh.tp, out_shape=(2, 3, 4), dtype=torch.float64),
        LayerNorm((4, 6), cut=mesh.tp, dtype=torch.float64),
        RMSNorm((4, 6), cut=mesh.tp, dtype=torch.float64),
    ]
    found = []
    for layer in layers:
        if isinstance(layer, ColumnParallelLinear):
            layer.weight.requires_grad_(False)  # its bias alone
        trained = {name: p for name, p in layer.named_parameters() if p.requires_grad}
        zero = Zero(layer, mesh, optimizer=adamw, seed=0, verify=False)
        zero.begin(microbatches=1)
        sum(p.sum() for p in trained.values()).backward()
        found.append((sum(layer.specs[name].numel for name in trained), zero.step().item()))
    return found


def test_biases_and_scales_of_layers_that_are_cut_over_tp_are_counted_once_and_wholly():
    for found in run(layers_cut_over_tp, 2):
        assert [numel for numel, _ in found] == [24, 24, 48, 24]
        for numel, norm in found:
            assert norm == pytest.approx(math.sqrt(numel), rel=1e-15)


def replicated_and_experts() -> float:
    mesh = Mesh.build(Layout(tp=2, ep=2))
    experts = ParamSpec((2,), ones, cut={mesh.ep: 0}, expert=True)
    return norm_of(Weights(replicated=ParamSpec((1,), ones), experts=experts), mesh, replicated=1.0, experts=1.0)


def test_experts_of_all_ranks_count_beside_what_is_replicated():
    assert run(replicated_and_experts, 2) == [pytest.approx(math.sqrt(3), rel=1e-15)] * 2


def experts_and_their_replicas() -> float:
    mesh = Mesh.build(Layout(dp=4, ep=2))
    experts = ParamSpec((2, 5), ones, cut={mesh.ep: 0}, expert=True)
    return norm_of(Weights(dense=ParamSpec((3,), ones), experts=experts), mesh, dense=1.0, experts=1.0)


def test_an_experts_gradient_is_summed_over_its_replicas_and_a_dense_one_over_all_ranks():
    assert run(experts_and_their_replicas, 4) == [pytest.approx(math.sqrt(3 * 4**2 + 10 * 2**2), rel=1e-15)] * 4


def tied_between_stages() -> tuple[float, float]:
    mesh = Mesh.build(Layout(pp=2))
    tied = ParamSpec((400,), ones, partial=(mesh.pp,))
    own = ParamSpec((200,), ones)
    both = Weights(tied=tied, own=own)
    return norm_of(both, mesh, tied=1 - mesh.pp.rank), norm_of(both, mesh, tied=1 - mesh.pp.rank, own=1.0)


def test_a_weight_tied_between_stages_is_summed_and_counted_once_and_stages_add():
    assert run(tied_between_stages, 2) == [(pytest.approx(20.0), pytest.approx(math.sqrt(400 + 2 * 200)))] * 2


def cut_over_a_part_of_tp() -> tuple[float, torch.Tensor]:
    mesh = Mesh.build(Layout(tp=4))
    outer, inner = mesh.divide(mesh.tp, 2)
    model = Weights(kv=ParamSpec((2, 3), ones, cut={outer: 0}, partial=(inner,)))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    model(kv=mesh.tp.rank + 1.0).backward()
    zero.reduce()
    gradient = zero.raw_gradients()["kv"].clone()
    return zero.step().item(), gradient


def test_a_weight_cut_over_the_outer_part_of_tp_and_partial_over_the_inner_is_summed_and_counted_once():
    for rank, (norm, gradient) in enumerate(run(cut_over_a_part_of_tp, 4)):
        assert torch.equal(gradient, torch.full((1, 3), 3.0 if rank < 2 else 7.0, dtype=torch.float64))
        assert norm == pytest.approx(math.sqrt(3 * 3**2 + 3 * 7**2), rel=1e-15)


@pytest.mark.parametrize("numel", [0, 1, 255, 256, 1_000_001])
def test_a_float32_sum_of_squares_is_that_of_float64(numel):
    x = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * 3e-5
    exact = x.double().square().sum().item()
    # Rows of 256 in float32: each rounds by some 1e-7, and the errors of many rows mostly cancel.
    assert sum_of_squares(x).item() == pytest.approx(exact, rel=2e-7, abs=0)
    assert sum_of_squares(x).dtype == torch.float64


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_an_entry_that_is_not_finite_is_never_hidden_by_the_sum(bad, at):
    x = torch.zeros(300)
    x[at] = bad
    assert not math.isfinite(sum_of_squares(x).item())

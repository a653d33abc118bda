"""bfloat16 weights at every stage, and what no stage may do to a step: masters, skipped steps, decay, ties."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.spec import ParamSpec, ones
from megalite.zero import Zero
from tests.ranks import run
from tests.zero import odd
from tests.zero.models import Weights, matrix
from tests.zero.training import WIDTH, adamw, global_batch

STAGES = (0, 1, 2, 3)


class Trained(NamedTuple):
    """weights: by parameter's name, whole. masters: each unit's shard of them, with its place in the unit's weights."""

    weights: dict[str, Tensor]
    rounded_once: bool
    dtypes: set[torch.dtype]


def narrow_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, WIDTH)).bfloat16()


def in_bfloat16(choices: list[tuple[int, int]], max_norm: float | None) -> list[Trained]:
    mesh = Mesh.build(Layout(dp=2))
    found = []
    for stage, microbatches in choices:
        model = narrow_model()
        zero = Zero(model, mesh, stage=stage, optimizer=adamw)
        for step in range(3):
            zero.begin(microbatches=microbatches)
            batch = global_batch(step)
            mine = batch.part(mesh.dp.rank, 2)
            for index in range(microbatches):
                part = mine.part(index, microbatches)
                (part._replace(x=part.x.bfloat16()).loss(model) / batch.mask.sum()).backward()
            zero.step(max_norm=max_norm)
        state = [value for entry in zero.optimizer.state.values() for value in entry.values() if value.ndim]
        dtypes = {unit.masters.dtype for unit in zero.units} | {value.dtype for value in state}
        with zero.gathered():
            same = [torch.equal(unit.weights.tensor[unit.part], unit.masters.bfloat16()) for unit in zero.units]
            weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        shards = [unit.masters.numel() * unit.shards.size == unit.weights.tensor.numel() for unit in zero.units]
        found.append(Trained(weights, all(same) and all(shards), dtypes))
    return found


def test_weights_are_float32_shards_of_masters_rounded_once_and_alike_on_all_ranks():
    choices = [(stage, 2) for stage in STAGES]
    first, second = run(in_bfloat16, 2, choices, 0.5)
    for one, other in zip(first, second, strict=True):
        assert one.rounded_once and other.rounded_once
        assert one.dtypes == {torch.float32}
        assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
        # Stages differ in the order of sums, in float32: at most the last bit of some weights is another.
        for name, weight in first[0].weights.items():
            assert torch.allclose(one.weights[name].float(), weight.float(), rtol=2**-7, atol=1e-4), name


@pytest.mark.parametrize(("microbatches", "alike"), [(1, STAGES), (4, (0, 1)), (4, (2, 3))])
def test_stages_that_add_in_the_same_order_give_the_same_bits(microbatches, alike):
    """A sum of two ranks has one order; micro-batches are added before it at stages 0 and 1, after it at 2 and 3."""
    stages = run(in_bfloat16, 2, [(stage, microbatches) for stage in alike], None)[0]
    for one in stages[1:]:
        assert all(torch.equal(one.weights[name], stages[0].weights[name]) for name in one.weights)


def plain_adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.0)


def many_small_steps() -> list[tuple[float, set[torch.dtype]]]:
    mesh = Mesh.build(Layout(dp=2))
    found = []
    for stage in STAGES:
        model = nn.Sequential(Weights(torch.bfloat16, norm=ParamSpec((4,), ones, decay=False), matrix=matrix(4, 4)))
        zero = Zero(model, mesh, stage=stage, optimizer=plain_adamw, seed=0)
        for _ in range(50):
            zero.begin(microbatches=1)
            model[0](norm=1.0, matrix=1.0).backward()
            zero.step()
        with zero.gathered():
            moved = 1.0 - model[0].norm.float().mean().item()
        found.append((moved, {entry["exp_avg"].dtype for entry in zero.optimizer.state.values()}))
    return found


def test_steps_too_small_for_bfloat16_move_norm_weights_at_every_stage():
    """50 steps of 1e-3 from 1.0, each of which bfloat16 alone would round away."""
    for stages in run(many_small_steps, 2):
        for moved, dtypes in stages:
            assert moved == pytest.approx(0.05, abs=2**-8) and dtypes == {torch.float32}


def poisoned(bad: float, dtype: torch.dtype) -> list[tuple[float, int, bool, bool]]:
    """By stage: the norm of a step in which the last rank alone has a bad entry, between two good ones."""
    mesh = Mesh.build(Layout(dp=2))
    found = []
    for stage in STAGES:
        model = nn.Sequential(Weights(dtype, matrix=matrix(3, 4), scale=ParamSpec((4,), ones, decay=False)))
        zero = Zero(model, mesh, stage=stage, optimizer=adamw, seed=0)

        def step(entry: float, zero: Zero = zero, model: nn.Module = model, dtype: torch.dtype = dtype) -> float:
            gradient = torch.ones(3, 4, dtype=dtype)
            gradient[2, 1] = entry
            zero.begin(microbatches=2)
            for _ in range(2):
                model[0](matrix=gradient, scale=2.0).backward()
            return zero.step(max_norm=1.0).item()

        def bits(zero: Zero = zero, model: nn.Module = model) -> list[Tensor]:
            with zero.gathered():
                weights = [parameter.detach().clone() for parameter in model.parameters()]
            state = [value.clone() for entry in zero.optimizer.state.values() for value in entry.values()]
            return [*weights, *(unit.masters.clone() for unit in zero.units), *state]

        step(1.0)
        before = bits()
        norm = step(bad if mesh.rank == 1 else 1.0)
        same = all(torch.equal(a, b) for a, b in zip(before, bits(), strict=True))
        step(1.0)
        moved = not any(torch.equal(a, b) for a, b in zip(before[:2], bits()[:2], strict=True))
        found.append((norm, zero.skipped, same, moved))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_one_bad_entry_on_one_rank_skips_the_step_on_all_at_every_stage_and_no_bit_changes(bad, dtype):
    """The entry lies in one rank's shard only: the norm carries it to the others."""
    for stages in run(poisoned, 2, bad, dtype):
        for norm, skipped, same, moved in stages:
            assert not math.isfinite(norm) and skipped == 1 and same and moved


def decayed() -> list[dict[str, float]]:
    """By stage: parameter's name -> by what a step of zero gradients multiplied it."""
    mesh = Mesh.build(Layout(dp=4))
    found = []
    for stage in STAGES:
        torch.manual_seed(1)
        layers = [nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 3), Weights(torch.float64, flat=ParamSpec((7,), ones))]
        model = nn.Sequential(*layers).double()
        nn.init.ones_(model[1].bias)
        before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        zero = Zero(model, mesh, stage=stage, optimizer=adamw)
        zero.begin(microbatches=1)
        x = model[2](model[1](model[0](torch.ones(2, 3, dtype=torch.float64))))
        (0.0 * x.sum() + model[3](flat=0.0)).backward()
        zero.step(max_norm=1.0)
        with zero.gathered():
            found.append({name: (p.detach() / before[name]).mean().item() for name, p in model.named_parameters()})
    return found


def test_weight_decay_shrinks_matrices_and_what_its_spec_says_and_nothing_else_at_every_stage():
    """Shards are flat, so no rule may look at a tensor's dimensions when the optimizer has it."""
    for stages in run(decayed, 4):
        for ratios in stages:
            for name, ratio in ratios.items():
                shrinks = name in ("0.weight", "2.weight", "3.flat")
                assert ratio == pytest.approx(1 - 0.05 * 0.1 * shrinks, rel=1e-14), name


def tied() -> list[bool]:
    mesh = Mesh.build(Layout(dp=2))
    found = []
    for stage in STAGES:
        model = odd.TiedInside()
        zero = Zero(model, mesh, stage=stage, units=(odd.Outer,), optimizer=adamw, seed=0)
        weight = model.first.one.weight
        for step in range(2):
            zero.begin(microbatches=1)
            global_batch(step).part(mesh.dp.rank, 2).loss(model).backward()
            zero.step()
        with zero.gathered():
            others = (model.first.two.weight, model.second.two.weight)
            found.append(all(other is weight and other.data_ptr() == weight.data_ptr() for other in others))
    return found


def test_tied_weights_stay_one_parameter_at_every_stage():
    assert run(tied, 2) == [[True] * 4] * 2

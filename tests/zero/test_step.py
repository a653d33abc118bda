"""One step: what is updated, by what, and what is left alone."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from megalite.mesh import Axis, Layout, Mesh
from megalite.spec import ParamSpec, init_parameters, normal, ones
from megalite.zero import Zero
from tests.ranks import run
from tests.zero.models import ParallelMLP, Weights, matrix
from tests.zero.training import WIDTH, adamw, global_batch, plain_mlp


def one_step(zero: Zero, model: Weights, **gradients: Any) -> float:
    zero.begin(microbatches=1)
    model(**gradients).backward()
    return zero.step().item()


def bits(model: nn.Module, zero: Zero) -> list[torch.Tensor]:
    state = [value for entry in zero.optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*model.parameters(), *(u.masters for u in zero.units), *state)]


def poisoned(bad: float, dtype: torch.dtype, layout: Layout) -> tuple[float, float, int, bool, bool]:
    """A step in which the last rank's gradient alone has a bad entry, between two good ones."""
    mesh = Mesh.build(layout)
    specs = {"matrix": matrix(3, 4, cut={mesh.tp: 1}), "scale": ParamSpec((4,), ones, decay=False)}
    model = Weights(dtype, **specs)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    one_step(zero, model, matrix=1.0, scale=2.0)
    before = bits(model, zero)
    poison = torch.ones_like(model.matrix)
    poison[2, 1] = bad if mesh.rank == 1 else 1.0
    norm = one_step(zero, model, matrix=poison, scale=2.0)
    same = all(torch.equal(a, b) for a, b in zip(before, bits(model, zero), strict=True))
    next_norm = one_step(zero, model, matrix=1.0, scale=2.0)
    moved = not any(torch.equal(a, b) for a, b in zip(before[:2], bits(model, zero)[:2], strict=True))
    return norm, next_norm, zero.skipped, same, moved


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize(
    ("layout", "squared_norm"),
    [(Layout(dp=2), 12 * 2**2 + 4 * 4**2), (Layout(tp=2), 12 + 4 * 2**2), (Layout(pp=2), 2 * (12 + 4 * 2**2))],
    ids=["dp", "tp", "pp"],
)
def test_one_bad_entry_on_one_rank_skips_the_step_on_all_and_no_bit_changes(bad, dtype, layout, squared_norm):
    """Over tp and pp no sum of gradients carries the entry to the other rank: the norm alone must."""
    for norm, next_norm, skipped, same, moved in run(poisoned, 2, bad, dtype, layout):
        assert not math.isfinite(norm) and skipped == 1 and same
        assert next_norm == pytest.approx(math.sqrt(squared_norm)) and moved


def test_weight_decay_shrinks_what_the_spec_says_and_nothing_else_even_where_gradients_are_zero():
    model = Weights(
        matrix=matrix(3, 4), vector=ParamSpec((4,), ones), norm=ParamSpec((4,), ones, decay=False), frozen=matrix(2, 2)
    )
    model.frozen.requires_grad_(False)
    plain = nn.Linear(4, 4, dtype=torch.float64)
    both = nn.ModuleDict({"declared": model, "plain": plain})
    zero = Zero(both, Mesh.build(), optimizer=adamw, seed=0)
    before = {name: p.detach().clone() for name, p in both.named_parameters()}
    zero.begin(microbatches=1)
    sum((p * 0.0).sum() for p in both.parameters()).backward()
    assert zero.step(max_norm=1.0).item() == 0.0
    for name, parameter in both.named_parameters():
        decayed = name in ("declared.matrix", "declared.vector", "plain.weight")
        assert torch.allclose(parameter, before[name] * (1 - 0.05 * 0.1 * decayed), rtol=1e-15, atol=0), name


def test_half_precision_weights_have_float32_masters_moments_and_gradients_and_small_steps_are_not_lost():
    model = Weights(torch.bfloat16, norm=ParamSpec((4,), ones, decay=False), matrix=matrix(4, 4))
    zero = Zero(
        model, Mesh.build(), optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-3, weight_decay=0), seed=0
    )
    for _ in range(50):
        one_step(zero, model, norm=1.0, matrix=1.0)
    # bf16 has nothing between 1 and 1 - 2^-8, so a step of 1e-3 alone would be rounded away each time
    assert model.norm.dtype == torch.bfloat16 and torch.all((model.norm - 0.95).abs() < 2**-8)
    (unit,) = zero.units
    assert unit.masters.dtype == unit.gradients.tensor.dtype == torch.float32
    assert {entry["exp_avg"].dtype for entry in zero.optimizer.state.values()} == {torch.float32}
    assert torch.equal(unit.weights.tensor, unit.masters.bfloat16()), "weights are the masters, rounded once"


def test_gradients_of_half_precision_weights_are_summed_in_float32():
    model = Weights(torch.bfloat16, norm=ParamSpec((1,), ones))
    zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
    zero.begin(microbatches=300)
    for _ in range(300):  # in bf16 the sum would stop at 256
        model(norm=1.0).backward()
    assert zero.raw_gradients()["norm"].item() == 300.0


def test_masters_start_from_the_drawn_float32_values_and_weights_from_these_rounded():
    drawn = Weights(torch.float32, matrix=matrix(3, 4))
    init_parameters(drawn, 5)
    model = Weights(torch.bfloat16, matrix=matrix(3, 4))
    (unit,) = Zero(model, Mesh.build(), optimizer=adamw, seed=5).units
    assert torch.equal(unit.masters, drawn.matrix.detach().flatten())
    assert torch.equal(model.matrix, drawn.matrix.bfloat16())


def drawn_from_meta() -> dict[str, torch.Tensor]:
    mesh = Mesh.build(Layout(dp=2, tp=2))
    with torch.device("meta"):
        model = Weights(matrix=matrix(4, 6, cut={mesh.tp: 1}), frozen=matrix(3, 3), scale=ParamSpec((2,), ones))
    model.tied = model.matrix
    model.frozen.requires_grad_(False)
    Zero(model, mesh, optimizer=adamw, seed=3)
    assert model.tied is model.matrix and not model.frozen.requires_grad
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_weights_drawn_from_meta_are_those_of_one_process_trained_or_not():
    whole = Weights(matrix=matrix(4, 6), frozen=matrix(3, 3), scale=ParamSpec((2,), ones))
    init_parameters(whole, 3)
    for rank, part in enumerate(run(drawn_from_meta, 4)):
        assert torch.equal(part["matrix"], whole.matrix[:, 3 * (rank % 2) : 3 * (rank % 2) + 3])
        assert torch.equal(part["frozen"], whole.frozen) and torch.equal(part["scale"], whole.scale)


def test_a_meta_parameter_that_nothing_begins_is_refused_by_name():
    with torch.device("meta"):
        declared, plain = Weights(matrix=matrix(2, 2)), nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"parameter matrix is on the meta device .*pass seed="):
        Zero(declared, Mesh.build(), optimizer=adamw)
    with pytest.raises(ValueError, match=r"parameter weight is on the meta device .*declare"):
        Zero(plain, Mesh.build(), optimizer=adamw, seed=0)


def test_without_a_seed_parameters_keep_their_values_and_a_plain_one_keeps_them_with_one():
    for seed in (None, 1):
        plain = nn.Linear(3, 2)
        before = plain.weight.detach().clone()
        Zero(plain, Mesh.build(), optimizer=adamw, seed=seed)
        assert torch.equal(plain.weight, before)


def test_all_parameters_are_views_of_flat_buffers_and_no_gradient_outlives_its_arrival():
    model = plain_mlp(Mesh.build())
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    zero.begin(microbatches=1)
    global_batch(0).loss(model).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    flats = {unit.weights.tensor.untyped_storage().data_ptr() for unit in zero.units}
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} == flats
    assert sum(unit.gradients.tensor.numel() for unit in zero.units) == sum(p.numel() for p in model.parameters())
    assert all(unit.masters.data_ptr() == unit.weights.tensor.data_ptr() for unit in zero.units)


def test_the_gradient_of_padding_is_zero_and_padding_stays_zero():
    (tp,) = (Axis("tp"),)
    model = Weights(table=ParamSpec((5, 3), normal(1.0), cut={tp: 0}, pad={0: 8}))
    zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
    assert one_step(zero, model, table=1.0) == pytest.approx(math.sqrt(15))
    assert torch.all(model.table[5:] == 0) and torch.all(model.table[:5] != 0)


def test_clipping_scales_by_torchs_formula_and_only_downwards():
    for max_norm, expected in [(None, 3.0), (100.0, 3.0), (0.5, 3.0 * 0.5 / (6.0 + 1e-6))]:
        model = Weights(matrix=matrix(2, 2))
        zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
        zero.begin(microbatches=1)
        model(matrix=3.0).backward()
        gradients = zero.raw_gradients()["matrix"]
        assert zero.step(max_norm=max_norm).item() == pytest.approx(6.0, rel=1e-15)
        assert torch.all((gradients - expected).abs() < 1e-15)


def test_a_scale_of_the_loss_changes_neither_norm_nor_update():
    results = []
    for scale in (1.0, 1024.0):
        model = Weights(matrix=matrix(2, 2))
        zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
        zero.begin(microbatches=1)
        model(matrix=3.0 * scale).backward()
        results.append((zero.step(max_norm=1.0, loss_scale=scale).item(), model.matrix.detach().clone()))
    assert results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("fused", [False, True])
def test_a_model_with_nothing_to_train_and_parameters_without_entries_take_steps(fused):
    def make(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=0.1, fused=fused)

    frozen = nn.Linear(2, 2).requires_grad_(False)
    empty = nn.ParameterList([nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.ones(()))])
    for model, norm in ((frozen, 0.0), (nn.Tanh(), 0.0), (empty, 1.0)):
        zero = Zero(model, Mesh.build(), optimizer=make)
        for _ in range(2):
            zero.begin(microbatches=1)
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.sum().backward()
            assert zero.step(max_norm=1.0).item() == norm
    assert empty[1].item() < 1


def test_the_learning_rate_is_set_on_every_group():
    zero = Zero(nn.Linear(2, 2), Mesh.build(), optimizer=adamw)
    zero.lr = 0.25
    assert [group["lr"] for group in zero.optimizer.param_groups] == [0.25, 0.25] and zero.lr == 0.25


def test_zero_grad_of_the_optimizer_takes_no_gradient_away():
    model = Weights(matrix=matrix(2, 2))
    zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
    for _ in range(2):
        before = model.matrix.detach().clone()
        zero.optimizer.zero_grad()
        one_step(zero, model, matrix=1.0)
        assert not torch.equal(model.matrix, before)


def test_calls_out_of_order_are_refused():
    model = Weights(matrix=matrix(2, 2))
    zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
    with pytest.raises(RuntimeError, match="begin"):
        zero.step()
    with pytest.raises(RuntimeError, match="a gradient of matrix arrived outside of begin"):
        model(matrix=1.0).backward()
    with pytest.raises(ValueError, match="microbatches=0"):
        zero.begin(microbatches=0)
    zero.begin(microbatches=1)
    with pytest.raises(RuntimeError, match="twice"):
        zero.begin(microbatches=1)


@pytest.mark.parametrize("stage", [4, -1])
def test_a_stage_that_does_not_exist_is_refused_by_name(stage):
    with pytest.raises(ValueError, match=rf"zero.stage={stage} is unknown; legal values: 0, 1, 2, 3"):
        Zero(nn.Linear(2, 2), Mesh.build(), stage=stage, optimizer=adamw)


def test_two_local_stages_train_as_one_module():
    def steps(split: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = {str(i): nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for i in range(3)}
        model = nn.Sequential(*layers.values())
        stages = [nn.ModuleDict({k: layers[k]}) for k in layers] if split else nn.ModuleDict(layers)
        zero = Zero(stages, Mesh.build(), optimizer=adamw)
        for step in range(2):
            zero.begin(microbatches=1)
            global_batch(step).loss(model).backward()
            zero.step(max_norm=0.5)
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(steps(True), steps(False), strict=True))


def test_a_model_and_its_zero_are_freed_when_nobody_holds_them():
    """Hooks hold neither: a cycle through a parameter's hook is never collected."""
    model = ParallelMLP(Mesh.build(), sequence_parallel=False)
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    zero.begin(microbatches=1)
    global_batch(0).loss(model).backward()
    zero.step()
    alive = [weakref.ref(model), weakref.ref(zero), weakref.ref(zero.units[0].gradients.tensor)]
    del model, zero
    gc.collect()
    assert [ref() for ref in alive] == [None, None, None]

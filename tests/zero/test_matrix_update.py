"""Muon and Adafactor see whole matrices wherever their pieces lie, and the weights become those of one process."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.observe import Call, Observer, observe
from megalite.mesh import Layout, Mesh
from megalite.spec import param_specs
from megalite.zero import Muon, Zero
from megalite.zero.matrix import matrices_of
from tests.ranks import run
from tests.zero.training import DECAY, LR, WIDTH, Record, global_batch, plain_mlp, train
from tests.zero.whole_matrices import MULTIPLIERS, RULES, Everything, one_process

Held = list[tuple[str, tuple[slice, ...], Tensor]]  # logical name, this rank's box, its weights


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    made = [
        {"params": g["params"], "lr_multiplier": g["lr_multiplier"], "lr": LR * g["lr_multiplier"]}
        | {"weight_decay": DECAY if g["decay"] else 0.0}
        for g in groups
    ]
    return torch.optim.AdamW(made)


def held(record: Record, model: nn.Module) -> Held:
    places = {name: spec.logical(name) for name, spec in param_specs(model).items()}
    return [(places[name][0], places[name][2], weight) for name, weight in record.weights.items()]


def trained(build: Any, layout: Layout, rule: Any, variants: list[dict[str, Any]]) -> list[Held]:
    """What this rank holds in the end, for each variant of Zero's options."""
    mesh, found = Mesh.build(layout), []
    for options in variants:
        models: list[nn.Module] = []

        def kept(mesh: Mesh, models: list[nn.Module] = models) -> nn.Module:
            models.append(build(mesh))
            return models[0]

        options = {"optimizer": adamw, "matrices": rule, "lr_multipliers": MULTIPLIERS} | options
        record = train(kept, mesh, 1, options)
        found.append(held(record, models[0]))
    return found


def assert_equal(ranks: list[list[Held]], expected: dict[str, Tensor]) -> None:
    """To 1e-10 of a weight, as all laws of Zero; replicas to the bit."""
    for number in range(len(ranks[0])):
        seen: dict[tuple, Tensor] = {}
        for variants in ranks:
            for name, box, weight in variants[number]:
                difference = (weight - expected[name][box]).norm().item()
                assert difference <= 1e-10 * expected[name].norm().item(), f"{name} in variant {number}"
                first = seen.setdefault((name, *((part.start, part.stop) for part in box)), weight)
                assert torch.equal(weight, first), f"replicas of {name} have drifted apart"


STAGES = [{"stage": stage} for stage in range(4)]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize(
    ("layout", "variants"),
    [
        (Layout(), STAGES),
        (Layout(dp=2), STAGES),
        (Layout(dp=4), [*STAGES, *({"stage": stage, "shard_over": 2} for stage in (1, 3))]),
        (Layout(tp=2), STAGES),
        (Layout(dp=2, tp=2), STAGES),
        (
            Layout(tp=4),
            [{"stage": 0}],
        ),  # fewer key heads than ranks: one tensor cut over two sub-axes, and a shared one
        (Layout(dp=2, cp=2), [{"stage": 2}]),
    ],
)
def test_weights_equal_those_of_torchs_own_optimizer_on_whole_matrices_in_one_process(name, layout, variants):
    ranks = run(trained, layout.world_size, Everything, layout, RULES[name], variants)
    assert_equal(ranks, one_process(name))


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_rounds_change_when_matrices_are_whole_and_no_bit(name):
    rule = RULES[name]
    ranks = []
    for numel in (1, rule.round_numel):
        changed = type(rule)(**{**vars(rule), "round_numel": numel})
        ranks.append(run(trained, 2, Everything, Layout(dp=2), changed, [{"stage": 3}]))
    for one, other in zip(ranks[0], ranks[1], strict=True):
        for (name, _, mine), (_, _, others) in zip(one[0], other[0], strict=True):
            assert torch.equal(mine, others), name


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_rank_may_own_no_matrix(name):
    ranks = run(trained, 4, plain_mlp, Layout(dp=4), RULES[name], [{"stage": 2}])
    assert_equal(ranks, one_process(name, plain_mlp))
    assert sum(len(list(matrices_of(slot))) for slot in _slots(plain_mlp)) == 3


def _slots(build: Any) -> list[Any]:
    zero = Zero(build(Mesh.build()), Mesh.build(), optimizer=adamw)
    return [slot for unit in zero.units for slot in unit.slots]


class Bytes(Observer):
    """(operation, axis) -> bytes handed over by this rank."""

    def __init__(self) -> None:
        self.total: dict[tuple[str, str], int] = {}
        self.count = 0

    def issuing(self, call: Call) -> None:
        key = (call.operation, call.axis.name)
        self.total[key] = self.total.get(key, 0) + call.payload_bytes
        self.count += 1


def _step_bytes(layout: Layout, name: str | None, dtype: torch.dtype, stage: int) -> dict[tuple[str, str], int]:
    torch.manual_seed(0)
    mesh = Mesh.build(layout)
    model = Everything(mesh).to(dtype)
    zero = Zero(model, mesh, stage=stage, optimizer=adamw, matrices=RULES[name] if name else None, verify=False)
    batch = global_batch(0).part(mesh.data().rank, mesh.data().size)
    zero.begin(microbatches=1)
    (model(batch.x.to(dtype)) - batch.target).square().sum().backward()
    zero.reduce()
    seen = Bytes()
    with observe(seen):
        zero.step()
    return seen.total


@pytest.mark.parametrize(("dtype", "width"), [(torch.float64, 8), (torch.bfloat16, 2)])
def test_each_entry_of_a_matrix_travels_to_its_owner_and_back_once(dtype, width):
    """Over all ranks of a shards' axis, matrices' entries x width each way; in bfloat16 weights Muon's are that too."""
    layout = Layout(dp=2, tp=2)
    plain = run(_step_bytes, 4, layout, None, dtype, 2)
    ranks = run(_step_bytes, 4, layout, "muon", dtype, 2)
    added = [
        {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}
        for before, after in zip(plain, ranks, strict=True)
    ]
    hidden, heads_out = WIDTH, 2 * 4
    cut = (
        hidden * (heads_out * 4 // 2) // 2 + heads_out * hidden // 2 + 3 * 24 * hidden // 2
    )  # attention and MLP, by tp
    whole = hidden * hidden + 64 * hidden + 64
    exchanged = [rank.pop(("all_to_all", "dense_data")) for rank in added]
    assert exchanged[0] + exchanged[2] == exchanged[1] + exchanged[3] == 2 * (cut + whole) * width
    gathered = [rank.pop(("all_gather", "tp")) for rank in added]
    assert gathered[0] + gathered[2] == cut * width
    assert not any(added), added


def test_at_stage_0_nothing_travels_for_the_matrices():
    for rank in run(_step_bytes, 2, Layout(dp=2), "muon", torch.float64, 0):
        assert rank.keys() == {("all_reduce", "world")}


def _halves(layout: Layout, stage: int) -> tuple[dict[str, Tensor], dict[str, Tensor], set[torch.dtype]]:
    torch.manual_seed(0)
    mesh = Mesh.build(layout)
    model = plain_mlp(mesh).to(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    zero = Zero(model, mesh, stage=stage, optimizer=adamw, matrices=Muon(lr=LR))
    for step in range(3):
        whole = global_batch(step)
        batch = whole.part(mesh.data().rank, mesh.data().size)
        zero.begin(microbatches=1)
        (((model(batch.x.bfloat16()) - batch.target) ** 2).sum(-1) * batch.mask).sum().div(whole.mask.sum()).backward()
        zero.step(max_norm=1.0)
    with zero.gathered():
        after = {name: p.detach().clone() for name, p in model.named_parameters()}
    return before, after, {unit.masters.dtype for unit in zero.units}


def test_bfloat16_weights_move_as_in_one_process_as_far_as_their_rounding_lets_them():
    before, expected, _ = _halves(Layout(), 0)
    for _, after, masters in run(_halves, 2, Layout(dp=2), 3):
        assert masters == {torch.float32}
        for name, weight in after.items():
            moved = (expected[name] - before[name]).float().norm()
            # bfloat16 has 8 bits; three steps of momentum and Newton-Schulz from gradients rounded apart
            assert (weight - expected[name]).float().norm() <= 0.1 * moved, name
            assert moved > 0


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_one_optimizer_shows_all_groups_and_state_and_loads_what_it_saved(name):
    def steps(zero: Zero, model: nn.Module, numbers: range) -> None:
        for step in numbers:
            batch = global_batch(step)
            zero.begin(microbatches=1)
            (batch.loss(model) / batch.mask.sum()).backward()
            zero.step()

    def started() -> tuple[nn.Module, Zero]:
        torch.manual_seed(0)
        model = plain_mlp(Mesh.build())
        return model, Zero(model, Mesh.build(), optimizer=adamw, matrices=RULES[name])

    model, zero = started()
    steps(zero, model, range(2))
    saved, weights = deepcopy(zero.optimizer.state_dict()), [unit.masters.clone() for unit in zero.units]
    zero.lr = LR / 2
    assert {group["lr"] for group in zero.optimizer.param_groups} == {LR / 2} and zero.lr == LR / 2
    kinds = {key for state in zero.optimizer.state.values() for key in state}
    assert kinds >= {"exp_avg", "exp_avg_sq"} | ({"momentum_buffer"} if name == "muon" else {"row_var", "col_var"})
    zero.lr = LR
    again_model, again = started()
    steps(again, again_model, range(1))  # so that what is loaded replaces something
    again.optimizer.load_state_dict(saved)
    for unit, masters in zip(again.units, weights, strict=True):
        unit.masters.copy_(masters)
    steps(zero, model, range(2, 4))
    steps(again, again_model, range(2, 4))
    for (key, mine), other in zip(model.named_parameters(), again_model.parameters(), strict=True):
        assert torch.equal(mine, other), key

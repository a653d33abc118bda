"""Which parameters share a flat buffer, and in which order units are launched."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from megalite.mesh import Mesh
from megalite.zero import Zero
from megalite.zero.partition import held_parameters, partition
from tests.zero.training import adamw


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)
        self.inner = nn.Sequential(nn.Linear(4, 4))


class Model(nn.Module):
    """The shape of a language model: embedding, blocks, final norm, head, and a parameter of its own."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 16, bias=False)
        self.temperature = nn.Parameter(torch.ones(()))
        if tied:
            self.head.weight = self.embedding.weight


def parts(*stages: nn.Module, units: tuple[type, ...] = ()) -> dict[str, list[str]]:
    found = partition(stages, held_parameters(stages), units)
    assert len({part.name for part in found}) == len(found)
    return {part.name: [one.name for one in part.held] for part in found}


def test_each_block_the_embedding_and_norm_with_head_are_units_and_what_remains_is_the_root():
    assert parts(Model(tied=False), units=(Block,)) == {
        "root": ["temperature"],
        "embedding": ["embedding.weight"],
        "blocks.0": [f"blocks.0.{n}.{w}" for n in ("norm", "linear", "inner.0") for w in ("weight", "bias")],
        "blocks.1": [f"blocks.1.{n}.{w}" for n in ("norm", "linear", "inner.0") for w in ("weight", "bias")],
        "norm + head": ["norm.weight", "norm.bias", "head.weight"],
    }


def test_a_tied_weight_is_a_unit_alone_where_forward_first_meets_it():
    names = parts(Model(tied=True), units=(Block,))
    assert list(names) == ["root", "embedding.weight", "blocks.0", "blocks.1", "norm + head"]
    assert names["embedding.weight"] == ["embedding.weight"] and names["norm + head"] == ["norm.weight", "norm.bias"]


def test_a_unit_has_the_modules_that_hold_its_parameters_and_no_other():
    """Norm and head are one unit; once the head's weight is tied away, the norm is alone, and not a user of it."""
    for tied in (False, True):
        model = Model(tied=tied)
        found = {part.name: part.modules for part in partition([model], held_parameters([model]), (Block,))}
        assert found["norm + head"] == ((model.norm,) if tied else (model.norm, model.head))
        assert not tied or found["embedding.weight"] == (model.embedding, model.head)


def test_a_unit_within_a_unit_belongs_to_the_outer_one():
    assert parts(Model(tied=True), units=(Block, nn.Sequential)) == parts(Model(tied=True), units=(Block,))


def test_without_classes_each_module_below_the_containers_is_a_unit_so_that_any_model_overlaps():
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)), nn.LayerNorm(3))
    assert list(parts(model)) == ["0", "2.0 + 2.1", "3"]
    assert list(parts(model, units=(nn.Sequential,))) == ["Sequential"]


def test_every_parameter_is_in_one_unit_whatever_the_classes():
    for units in [(), (Block,), (nn.Linear,), (nn.LayerNorm, nn.Sequential), (nn.Module,)]:
        model = Model(tied=True)
        names = [name for held in parts(model, units=units).values() for name in held]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())


def test_units_are_launched_in_the_reverse_of_forward_and_the_root_last():
    zero = Zero(Model(tied=False), Mesh.build(), units=(Block,), optimizer=adamw)
    assert [unit.name for unit in zero.units] == ["norm + head", "blocks.1", "blocks.0", "embedding", "root"]


def test_within_a_unit_what_is_decayed_is_one_slice_and_each_optimizer_group_gets_its_slices():
    zero = Zero(Model(tied=False), Mesh.build(), units=(Block,), optimizer=adamw)
    block = zero.units[1]
    assert [slot.name.removeprefix("blocks.1.") for slot in block.slots] == [
        *("linear.weight", "inner.0.weight"),
        *("norm.weight", "norm.bias", "linear.bias", "inner.0.bias"),
    ]
    decayed, others = zero.optimizer.param_groups
    assert decayed["decay"] and not others["decay"] and others["weight_decay"] == 0
    assert [p.numel() for p in decayed["params"]] == [64, 32, 32, 64] and len(others["params"]) == 4


def test_two_stages_share_a_tied_parameter_and_may_not_share_a_name():
    first, last = nn.ModuleDict({"in": nn.Linear(4, 4)}), nn.ModuleDict({"out": nn.Linear(4, 4)})
    last["out"].weight = first["in"].weight
    assert parts(first, last) == {"in.weight": ["in.weight"], "in": ["in.bias"], "out": ["out.bias"]}
    with pytest.raises(ValueError, match=r"stages 0 and 1 both have a parameter 0\.weight"):
        parts(nn.Sequential(nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4)))


def test_a_module_that_two_stages_share_is_hooked_once():
    """As the embedding of a model whose first and last stage are on one rank."""
    first, last = nn.ModuleDict({"in": nn.Embedding(4, 4)}), nn.ModuleDict({"out": nn.Linear(4, 4, bias=False)})
    last["in"], last["out"].weight = first["in"], first["in"].weight
    (part,) = partition([first, last], held_parameters([first, last]), ())
    assert part.name == "in.weight" and part.modules == (first["in"], last["out"])


def test_what_is_to_be_alone_is_a_unit_of_its_own_even_among_the_roots():
    model = Model(tied=False)
    found = partition([model], held_parameters([model]), (Block,), alone={"temperature", "blocks.0.norm.bias"})
    alone = {part.name: part.modules for part in found if len(part.held) == 1}
    assert alone["temperature"] == () and alone["blocks.0.norm.bias"] == (model.blocks[0],)

"""Which matrices a tensor is, where they lie in a flat buffer, and to whom they are dealt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from megalite.mesh import Layout, Mesh
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT
from megalite.spec import ParallelModule, ParamSpec, zeros
from megalite.zero import Zero
from megalite.zero.matrix import deal, matrices_of
from tests.ranks import run
from tests.zero.training import adamw


class Fused(ParallelModule):
    """Parameters of given specs that count their own entries, so that a view of them says where it came from."""

    def __init__(self, specs: dict[str, ParamSpec]) -> None:
        super().__init__()
        for name, spec in specs.items():
            padded = torch.zeros(spec.padded_shape, dtype=torch.float64)
            padded[tuple(slice(size) for size in spec.shape)] = 1 + torch.arange(spec.numel).view(spec.shape)
            self.declare(name, spec, dtype=torch.float64)
            self._parameters[name].data = padded[spec.box()].clone()


def _round_trips(layout: Layout, make: Any) -> list[tuple[str, torch.Tensor, bool]]:
    """(name, whole matrix as gathered over what cuts it, whether its region is what the rank holds)."""
    mesh = Mesh.build(layout)
    zero = Zero(Fused(make(mesh)), mesh, optimizer=adamw)
    found = []
    for unit in zero.units:
        for matrix in (matrix for slot in unit.slots for matrix in matrices_of(slot)):
            region = torch.cat([unit.masters[run.start : run.stop] for run in matrix.runs])
            whole = matrix.whole(region)
            found.append((matrix.name, whole, torch.equal(matrix.region(whole), region)))
    return found


def _fused(mesh: Mesh) -> dict[str, ParamSpec]:
    tp = mesh.tp
    outer, inner = mesh.divide(tp, min(tp.size, 2))
    return {
        "plain": ParamSpec((4, 8), zeros, cut={tp: 1}),
        "qkv": ParamSpec((4, 5, 2, 3), zeros, cut={tp: 0}, matrices={1: (3, 1, 1)}),
        "gate_up": ParamSpec((2, 8, 3), zeros, cut={tp: 1}, matrices={0: (1, 1)}),
        "padded": ParamSpec((6, 3), zeros, cut={tp: 0}, pad={0: 8}),
        "twice_cut": ParamSpec((4, 4, 3), zeros, cut={outer: 0, inner: 1}),
        "expert": ParamSpec((4, 2, 3, 3), zeros, cut={tp: 0}, matrices={0: (1,) * 4, 1: (1, 1)}),
        "embedding": ParamSpec((8, 4), zeros, matrices=None),
        "bias": ParamSpec((8,), zeros),
        "empty": ParamSpec((0, 4), zeros),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_matrix_gathered_over_what_cuts_it_is_hugging_faces_and_its_region_is_the_ranks(size):
    def count(*shape: int) -> torch.Tensor:
        return 1 + torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)

    qkv, expert, halves = count(4, 5, 2, 3), count(4, 2, 3, 3), count(2, 8, 3)
    expected = {"plain": count(4, 8), "padded": count(6, 3), "twice_cut": count(16, 3)}
    expected |= {f"qkv[{n}]": part.reshape(-1, 3) for n, part in enumerate(qkv.split((3, 1, 1), dim=1))}
    expected |= {f"gate_up[{n}]": halves[n] for n in range(2)}
    ranks = run(_round_trips, size, Layout(tp=size), _fused)
    for rank, found in enumerate(ranks):
        experts = [whole for name, whole, _ in found if name.startswith("expert")]
        own = expert.chunk(size)[rank]
        places = list(itertools.product(range(4 // size), (0, 1)))
        assert all(torch.equal(whole, own[place]) for whole, place in zip(experts, places, strict=True))
        others = {name: whole for name, whole, _ in found if not name.startswith("expert")}
        assert others.keys() == expected.keys()
        for name, whole in others.items():
            assert torch.equal(whole, expected[name]), name
        assert all(same for _, _, same in found)


def test_every_piece_of_every_shard_together_is_the_region():
    zero = Zero(Fused(_fused(Mesh.build())), Mesh.build(), optimizer=adamw)
    (unit,) = zero.units
    for ranks in (1, 2, 3, 5):
        unit.part = slice(0, -(-unit.weights.tensor.numel() // ranks))  # as if shared by so many
        for matrix in (matrix for slot in unit.slots for matrix in matrices_of(slot)):
            pieces = [run for rank in range(ranks) for run in matrix.piece(rank)]
            indices = [index for run in pieces for index in range(run.start, run.stop)]
            assert indices == [index for run in matrix.runs for index in range(run.start, run.stop)]


def test_the_models_matrices_are_those_of_its_checkpoint_but_for_embedding_and_head():
    model = GPT(GPTConfig(hidden_size=16, intermediate_size=24, num_key_value_heads=2, tie_word_embeddings=False))
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    shapes = sorted(
        matrix.rows_columns
        for unit in zero.units
        for slot in unit.slots
        for matrix in matrices_of(slot)
        if slot.name.startswith("blocks.0.")
    )
    head_dim = model.config.dim_per_head
    q, kv = model.config.num_attention_heads * head_dim, 2 * head_dim
    assert shapes == sorted([(q, 16), (kv, 16), (kv, 16), (16, q), (24, 16), (24, 16), (16, 24)])
    left = [slot.name for unit in zero.units for slot in unit.slots if not list(matrices_of(slot))]
    assert {"embedding.weight", "head.weight"} <= set(left)


def test_of_plain_modules_matrices_are_what_has_two_dims_and_is_no_embedding():
    model = nn.ModuleDict(
        {
            "linear": nn.Linear(4, 6),
            "embedding": nn.Embedding(5, 4),
            "convolution": nn.Conv1d(2, 3, 2),
            "attention": nn.MultiheadAttention(4, 2),
        }
    )
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    found = {m.name: m.rows_columns for unit in zero.units for slot in unit.slots for m in matrices_of(slot)}
    parts = {f"attention.in_proj_weight[{number}]": (4, 4) for number in range(3)}
    assert found == {"linear.weight": (6, 4), "attention.out_proj.weight": (4, 4)} | parts


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[8, 1, 1, 1, 1, 1, 1, 1, 1], [5] * 7, [3], [9, 8, 7, 6, 5, 4, 3, 2, 1], []])
def test_no_rank_is_dealt_more_than_its_even_share_and_the_largest_matrix(sizes, ranks):
    dealt = deal(sizes, ranks, round_numel=1)
    loads = [sum(size for size, one in zip(sizes, dealt, strict=True) if one.owner == rank) for rank in range(ranks)]
    assert sum(loads) == sum(sizes)
    # Graham 1969: the largest first, each to who has least
    assert max(loads) <= sum(sizes) / ranks + max(sizes, default=0) * (1 - 1 / ranks)


def test_a_large_matrix_and_many_small_ones_are_worked_through_in_one_round():
    dealt = deal([8, *[1] * 8], 2, round_numel=1)
    assert {one.owner for one in dealt[1:]} == {1} and dealt[0].owner == 0
    assert {one.round for one in dealt} == {0}


@pytest.mark.parametrize("round_numel", [1, 10, 100])
def test_in_a_round_no_rank_has_twice_of_what_it_may_have(round_numel):
    sizes = [7, 7, 3, 3, 3, 2, 1, 1, 1, 1, 1]
    dealt = deal(sizes, 2, round_numel=round_numel)
    held: dict[tuple[int, int], int] = {}
    for size, one in zip(sizes, dealt, strict=True):
        held[one] = held.get(one, 0) + size
    assert max(held.values()) < 2 * max(round_numel, *sizes)
    assert (max(one.round for one in dealt) > 0) == (round_numel < 15)

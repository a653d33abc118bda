"""A weight that two pipeline stages hold on two ranks is one weight: one sum, one norm, the same bits on both."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.comm import start_all_reduce
from megalite.mesh import Layout, Mesh
from megalite.models import Part, stages
from megalite.models.gpt import Block, LossOptions
from megalite.spec import ParamSpec, ones, param_specs
from megalite.zero import Adafactor, Moments, Muon, Zero
from tests.layouts import (
    BATCH,
    MAX_NORM,
    MODELS,
    SEED,
    STEPS,
    Place,
    Record,
    adamw,
    assert_parts,
    assert_replicas_are_alike,
    global_batch,
    on_one_process,
    part,
)
from tests.ranks import run
from tests.zero.models import Weights

MICROBATCHES = 2
TIED = "embedding.weight"


def one_stage(name: str, mesh: Mesh, *, sequence_parallel: bool = False) -> nn.Module:
    """This rank's stage of a model of two layers; the stages between the first and the last one hold no layer."""
    config, last = MODELS[name], mesh.pp.size - 1
    place = mesh.pp.rank
    mine = Part(range(0, 1) if place == 0 else range(1, 2) if place == last else range(0), place == 0, place == last)
    how: dict[str, Any] = {"seed": SEED, "device": "meta", "dtype": torch.float64}
    return stages(config, {place: mine}, mesh=mesh, sequence_parallel=sequence_parallel, **how)[place]


def forward_and_backward(stage: nn.Module, batch: Any, mesh: Mesh, *, tokens: int, sequence_parallel: bool) -> Tensor:
    """One micro-batch through two stages, each on its rank. The loss on the last, else zero."""
    peer = mesh.pp.ranks[1 - mesh.pp.rank]
    if mesh.pp.rank == 0:
        y = stage(None, batch)
        dist.send(y.detach().contiguous(), peer)
        gradient = torch.empty(y.shape, dtype=y.dtype)
        dist.recv(gradient, peer)
        y.backward(gradient)
        return torch.zeros((), dtype=torch.float64)
    samples, seq = batch.tokens.shape
    shape = (samples, seq // (mesh.tp.size if sequence_parallel else 1), 32)
    x = torch.empty(shape, dtype=torch.float64)
    dist.recv(x, peer)
    loss = stage(x.requires_grad_(), batch) / tokens
    loss.backward()
    dist.send(x.grad.contiguous(), peer)
    return loss.detach()


def train(name: str, layout: Layout, sequence_parallel: bool, options: dict[str, Any]) -> Record:
    """Three clipped AdamW steps on one rank of the layout."""
    mesh = Mesh.build(layout)
    stage = one_stage(name, mesh, sequence_parallel=sequence_parallel)
    zero = Zero(stage, mesh, units=(Block,), **{"optimizer": adamw, "seed": SEED} | options)
    logical = {name: (spec.valid_box(), *spec.logical(name)) for name, spec in param_specs(stage).items()}
    record = Record([], [], [], {}, {n: Place(valid, whole, box) for n, (valid, whole, _, box) in logical.items()})
    for step in range(1, STEPS + 1):
        batch, total = global_batch(name, step), torch.zeros((), dtype=torch.float64)
        share = BATCH // (mesh.data().size * MICROBATCHES)
        zero.begin(microbatches=MICROBATCHES)
        for index in range(MICROBATCHES):
            start = (index * mesh.data().size + mesh.data().rank) * share
            mine = part(batch, slice(start, start + share))
            how = {"tokens": batch.valid(), "sequence_parallel": sequence_parallel}
            total += forward_and_backward(stage, mine, mesh, **how)
        for axis in (mesh.data(), mesh.pp):
            total = start_all_reduce(total, axis).wait()
        record.losses.append(total.item())
        record.gradients.append({n: gradient.clone() for n, gradient in zero.raw_gradients().items()})
        record.norms.append(zero.step(max_norm=MAX_NORM).item())
    with zero.gathered():
        record.weights.update({n: parameter.detach().clone() for n, parameter in stage.named_parameters()})
    return record


def assert_trained_as_one_process(records: list[Record], name: str) -> None:
    one = on_one_process(name, LossOptions())
    assert set.union(*(set(record.weights) for record in records)) == one.weights.keys()
    for record in records:
        assert record.losses == pytest.approx(one.losses, rel=1e-10, abs=0)
        assert record.norms == pytest.approx(one.norms, rel=1e-10, abs=0)
        for found, expected in ((record.weights, one.weights), *zip(record.gradients, one.gradients, strict=True)):
            of_stage = {n: whole for n, whole in expected.items() if n in found}
            assert_parts(found, of_stage, record.places, 1e-3 * one.norms[0])
    assert_replicas_are_alike(records)


@pytest.mark.parametrize("name", ["gpt2", "qwen2"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_tied_stages_on_two_ranks_train_as_one_process_and_their_copies_keep_the_same_bits(name, zero):
    assert_trained_as_one_process(run(train, 2, name, Layout(pp=2), False, {"stage": zero}), name)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_so_they_do_with_data_ranks_that_share_the_weight_out(zero):
    """Summing over the stages meets shards of the same offsets: the weight is a unit, whatever else a stage has."""
    assert_trained_as_one_process(run(train, 4, "gpt2", Layout(dp=2, pp=2), False, {"stage": zero}), "gpt2")
    inside = Layout(dp=2, pp=2, order=("tp", "cp", "pp", "dp"))
    assert_trained_as_one_process(run(train, 4, "gpt2", inside, False, {"stage": zero}), "gpt2")


@pytest.mark.parametrize(("sequence_parallel", "zero"), [(False, 0), (True, 1), (True, 3)])
def test_so_they_do_with_a_padded_vocabulary_cut_over_tp(sequence_parallel, zero):
    """101 words over two ranks: the last row of the second one is padding. Norms are summands over tp besides."""
    records = run(train, 4, "gpt2", Layout(tp=2, pp=2), sequence_parallel, {"stage": zero})
    assert_trained_as_one_process(records, "gpt2")


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 1, "matrices": Muon(lr=0.02)},
        {"stage": 2, "matrices": Adafactor(lr=0.02)},
        {"stage": 2, "offload": True},
        {"stage": 1, "moments": Moments(torch.bfloat16, stochastic=True, seed=5)},
        {"stage": 3, "gradients": torch.float32},
    ],
    ids=["muon", "adafactor", "offload", "stochastic moments", "float32 gradients"],
)
def test_the_copies_keep_the_same_bits_under_every_optimizer(options):
    """Each rank updates its copy from the same sum, by the same rule and, where moments are rounded by lot, by one."""
    records = run(train, 4, "qwen2", Layout(dp=2, pp=2), False, options)
    assert_replicas_are_alike(records)
    first, *_, last = records
    assert torch.equal(first.weights[TIED], last.weights[TIED])
    assert all(gradients[TIED].any() for gradients in first.gradients)


def by_hand(layout: Layout, zero_stage: int, equal: bool) -> list[tuple[float, Tensor]]:
    """(norm, gradient) of two steps in which the ends give a tied weight gradients; stages have other weights too."""
    mesh = Mesh.build(layout)
    place, last = mesh.pp.rank, mesh.pp.size - 1
    specs = {f"own{n}": ParamSpec((3 + n,), ones, partial=(mesh.tp,)) for n in range(1 + place)}
    tie = mesh.joins(0, last)
    if place in (0, last):
        specs["tied"] = ParamSpec((7, 3), ones, cut={mesh.tp: 0}, pad={0: 8}, partial=(tie,), matrices=None)
    model = Weights(**specs)
    zero = Zero(model, mesh, optimizer=adamw, seed=0, stage=zero_stage)
    found = []
    for _ in range(2):
        zero.begin(microbatches=1)
        gradients = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
        if "tied" in gradients:
            gradients["tied"] += 1.0 if equal or place == 0 else 0.0
        torch.autograd.backward(list(model.parameters()), list(gradients.values()))
        gradient = zero.raw_gradients().get("tied", torch.empty(0)).clone()
        found.append((zero.step(max_norm=0.1).item(), gradient))
    return found


@pytest.mark.parametrize(
    "layout",
    [Layout(pp=2), Layout(dp=2, pp=2), Layout(tp=2, pp=2), Layout(pp=4)],
    ids=lambda x: f"dp{x.dp} tp{x.tp} pp{x.pp}",
)
@pytest.mark.parametrize(("zero", "equal"), [(0, False), (2, False), (3, True)])
def test_an_entry_of_a_tied_weight_counts_once_in_the_norm(layout, zero, equal):
    """Of gradients of the embedding alone the norm is that of one process, not sqrt(2) of it; and summands that happen
    to be equal on both ends, or nothing on one, are no fault."""
    summed = (1 + equal) * layout.dp
    for rank, steps in enumerate(run(by_hand, layout.world_size, layout, zero, equal)):
        for norm, gradient in steps:
            assert norm == pytest.approx(math.sqrt(21) * summed, rel=1e-12, abs=0)
            if gradient.numel():
                padded = layout.tp > 1 and rank % 2
                expected = torch.full((8 // layout.tp, 3), float(summed), dtype=torch.float64)
                expected[len(expected) - bool(padded or layout.tp == 1) :] = 0
                assert torch.equal(gradient, expected)


def unlike(change: str) -> None:
    mesh = Mesh.build(Layout(pp=2))
    tie, place = mesh.joins(0, 1), mesh.pp.rank
    spec = ParamSpec((4, 3), ones, partial=(tie,))
    seed = None
    if place == 1:
        spec = {"shape": replace(spec, shape=(4, 4)), "decay": replace(spec, decay=False)}.get(change, spec)
    specs = {"other" if change == "name" and place == 1 else "tied": spec}
    model = Weights(**specs)
    if change == "value" and place == 1:
        nn.init.zeros_(model.tied)
    if change == "missing" and place == 0:
        model = Weights(own=ParamSpec((2,), ones))
    message = {"missing": r"^ranks \[1\] hold weights tied"}.get(change, r"^ranks \[0, 1\] hold weights tied")
    ours = "none" if change == "missing" and place == 0 else f"{next(iter(specs))} over ranks (0, 1)"
    with pytest.raises(ValueError, match=message) as caught:
        Zero(model, mesh, optimizer=adamw, seed=seed)
    assert re.search(re.escape(f"tied on this rank: {ours}") + "$", str(caught.value))


@pytest.mark.parametrize("change", ["shape", "decay", "name", "value", "missing"])
def test_a_tied_weight_that_is_not_alike_on_both_ranks_is_refused_on_both(change):
    run(unlike, 2, change)

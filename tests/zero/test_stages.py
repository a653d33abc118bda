"""Stages change where weights and gradients are, never a number: odd models and orders of passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.zero import Zero
from tests.ranks import run
from tests.zero import odd
from tests.zero.cases import CASES, assert_all_equal_one_process
from tests.zero.training import Record, adamw, assert_equals_one_process, global_batch, plain_mlp, reference, train


@pytest.mark.parametrize("microbatches", [1, 2])
def test_odd_models_and_orders_of_passes_train_as_in_one_process_at_every_stage(microbatches):
    options = [{"stage": stage} for stage in (0, 1, 2, 3)]
    assert_all_equal_one_process(list(CASES), Layout(dp=2), microbatches, options)


def test_they_do_so_whenever_stage_3_gathers_and_releases():
    choices = [{"reshard": "backward"}, {"reshard": "step", "prefetch": 0}, {"prefetch": 0}, {"prefetch": 3}]
    assert_all_equal_one_process(list(CASES), Layout(dp=2), 2, [{"stage": 3} | chosen for chosen in choices])


def local_stages(stage: int) -> list[Tensor]:
    """Two modules whose own forward is never called, only that of what they hold."""
    mesh = Mesh.build(Layout(dp=2))
    torch.manual_seed(0)
    model = plain_mlp(mesh)
    stages = [nn.ModuleDict({str(i): model[i] for i in part}) for part in (range(3), range(3, 6))]
    zero = Zero(stages, mesh, stage=stage, optimizer=adamw, seed=None)
    for step in range(3):
        zero.begin(microbatches=1)
        batch = global_batch(step)
        (batch.part(mesh.dp.rank, 2).loss(model) / batch.mask.sum()).backward()
        zero.step(max_norm=0.5)
    with zero.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_several_local_stages_train_as_one_module():
    expected = list(reference(plain_mlp).weights.values())
    for stage in (1, 2, 3):
        for weights in run(local_stages, 2, stage):
            for weight, one in zip(weights, expected, strict=True):
                assert (weight - one).norm() <= 1e-10 * one.norm()


def partly_used(stages: Sequence[int]) -> list[Record]:
    mesh = Mesh.build(Layout(dp=2))
    return [train(lambda mesh: odd.PartlyUsed(), mesh, 2, {"stage": stage}) for stage in stages]


def test_half_of_a_unit_that_only_some_ranks_use_trains_as_in_one_process_up_to_stage_2():
    one = reference(lambda mesh: odd.PartlyUsed(), 4)
    for records in zip(*run(partly_used, 2, (0, 1, 2), checked=False), strict=True):
        assert_equals_one_process(records, one)

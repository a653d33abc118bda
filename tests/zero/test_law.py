"""Data parallelism changes no number: raw gradients, norm and weights are those of one process."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.layers.linear import ColumnParallelLinear
from megalite.mesh import Layout, Mesh
from tests.ranks import run
from tests.zero.models import ParallelMLP
from tests.zero.training import (
    MAX_NORM,
    WIDTH,
    assert_equals_one_process,
    global_batch,
    plain_mlp,
    put_off,
    reference,
    train,
)

cut_mlp = partial(ParallelMLP, sequence_parallel=False)
sequence_parallel_mlp = partial(ParallelMLP, sequence_parallel=True)


STAGES = [0, 1, 2, 3]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize(
    ("build", "layout"),
    [
        (plain_mlp, Layout(dp=2)),
        (plain_mlp, Layout(dp=4)),
        (plain_mlp, Layout(dp=2, cp=2)),
        (cut_mlp, Layout(tp=2)),
        (sequence_parallel_mlp, Layout(tp=2)),
        (cut_mlp, Layout(dp=2, tp=2)),
        (sequence_parallel_mlp, Layout(dp=2, tp=2)),
        (sequence_parallel_mlp, Layout(dp=2, tp=2, order=("dp", "tp", "cp", "pp"))),
    ],
)
def test_training_equals_one_process_on_every_layout_at_every_stage(build, layout, microbatches, stage):
    """With and without accumulation; the norm is that of all shards, and of tp's copies once."""
    records = run(train, layout.world_size, build, layout, microbatches, {"stage": stage})
    assert_equals_one_process(records, reference(build))
    assert min(reference(build).norms) > MAX_NORM, "each step must clip, or clipping is not tested"


def test_the_reference_has_gradients_in_which_a_norms_copies_would_show():
    one = reference(cut_mlp)
    scales = torch.cat([g for name, g in one.gradients[0].items() if name.endswith(".0.weight")])
    assert scales.norm().item() > 0.5 * one.norms[0]


@pytest.mark.parametrize("stage", STAGES)
def test_the_number_of_microbatches_may_change_from_step_to_step(stage):
    records = run(train, 2, plain_mlp, Layout(dp=2), (1, 4, 2), {"stage": stage})
    assert_equals_one_process(records, reference(plain_mlp))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("units", [(), (nn.Sequential,), (nn.Linear,)])
def test_the_units_are_a_matter_of_speed_only(units, stage):
    records = run(train, 2, cut_mlp, Layout(dp=2), 2, {"units": units, "stage": stage})
    assert_equals_one_process(records, reference(cut_mlp))


def frozen_layer(mesh: Mesh) -> nn.Module:
    model = plain_mlp(mesh)
    model[3].requires_grad_(False)
    return model


class UsedTwice(nn.Module):
    """One layer called twice in a forward: autograd still accumulates once a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.twice(torch.tanh(self.twice(self.first(x))))


class Tied(nn.Module):
    """One Parameter under two names in two units, as a tied embedding and head are."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(self.first(x))))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("build", [frozen_layer, lambda mesh: UsedTwice(), lambda mesh: Tied()])
def test_frozen_reused_and_tied_parameters_train_as_in_one_process(build, microbatches, stage):
    records = run(train, 2, build, Layout(dp=2), microbatches, {"stage": stage})
    assert_equals_one_process(records, reference(build))


class UsedBySome(nn.Module):
    """`middle` is used where a micro-batch's first entry is large, `never` nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.never, self.last = (
            nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        used = x[0, 0, 0] > 0.3
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(x)) if used else x)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("microbatches", [1, 4])
def test_a_parameter_that_only_some_ranks_and_microbatches_use_trains_as_in_one_process(microbatches, stage):
    """At stage 3 it is refused, see test_gathering."""
    parts = 2 * microbatches
    used = [[bool(global_batch(step).part(i, parts).x[0, 0, 0] > 0.3) for i in range(parts)] for step in range(3)]
    assert any(any(step[: parts // 2]) != any(step[parts // 2 :]) for step in used), "no step tests a skipping rank"
    records = run(train, 2, lambda mesh: UsedBySome(), Layout(dp=2), microbatches, {"stage": stage})
    assert_equals_one_process(records, reference(lambda mesh: UsedBySome(), parts))


class TiedToPlain(nn.Module):
    """A weight that a parallel linear defers under a split backward and a plain product does not: two arrivals."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.column = ColumnParallelLinear(WIDTH, WIDTH, tp=mesh.tp, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.column(x)), self.column.weight)


@pytest.mark.parametrize(
    ("build", "layout"),
    [(cut_mlp, Layout(dp=2)), (sequence_parallel_mlp, Layout(dp=2, tp=2)), (TiedToPlain, Layout(dp=2))],
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_backward_that_puts_weight_gradients_off_equals_one_that_does_not(build, layout, stage):
    records = run(train, layout.world_size, build, layout, 2, {"stage": stage}, put_off)
    assert_equals_one_process(records, reference(build))

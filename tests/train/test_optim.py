"""The learning rate at every step, and what the optimizer does to a weight."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from megalite.train.config import OptimConfig
from megalite.train.optim import learning_rate, optimizer

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def rates(config: OptimConfig, steps: int) -> list[float]:
    return [learning_rate(config, step, steps=steps) for step in range(1, steps + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("steps", [1, 2, 5, 20])
def test_the_rate_stays_within_its_bounds_and_begins_above_zero_at_every_edge(schedule, steps):
    for warmup, low in itertools.product([0, 1, 4, 20, 50], [0.0, 1e-4, 1e-3]):
        config = OptimConfig(lr=1e-3, min_lr=low, warmup_steps=warmup, schedule=schedule)
        found = rates(config, steps)
        assert all(math.isfinite(rate) for rate in found)
        assert found[0] > 0
        # one rounding of float64 in high - (high - low)
        assert min(found) >= low * (1 - 1e-15) and max(found) <= 1e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_the_rate_rises_to_its_peak_at_the_last_step_of_warm_up_and_never_after(schedule, warmup):
    found = rates(OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=warmup, schedule=schedule), 12)
    peak = max(warmup, 1)
    assert found[peak - 1] == 1.0
    assert all(before < after for before, after in itertools.pairwise(found[:peak]))
    assert all(before >= after for before, after in itertools.pairwise(found[peak - 1 :]))
    assert found[-1] == pytest.approx(1.0 if schedule == "constant" else 0.1, abs=1e-15)


def test_a_lowest_rate_that_is_not_set_is_a_tenth_of_the_peak():
    found = rates(OptimConfig(lr=0.5, warmup_steps=0, schedule="linear"), 12)
    assert found == rates(OptimConfig(lr=0.5, min_lr=0.05, warmup_steps=0, schedule="linear"), 12)
    assert found[-1] == pytest.approx(0.05, rel=1e-15)


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_wsd_is_stable_until_its_last_steps_and_ends_at_the_lowest_rate(shape):
    config = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=3, schedule="wsd", decay_steps=4, decay_shape=shape)
    found = rates(config, 12)
    assert found[2:8] == [1.0] * 6
    assert all(before > after for before, after in itertools.pairwise(found[7:]))
    assert found[-1] == pytest.approx(0.1, rel=1e-15)
    half_way = {"linear": 0.55, "cosine": 0.55, "sqrt": 1 - 0.9 * math.sqrt(0.5)}
    assert found[9] == pytest.approx(half_way[shape], rel=1e-15)


def test_a_stable_run_can_be_prolonged_without_a_change_to_what_it_was():
    """What WSD is for: up to the decay, a longer run's rates are the shorter one's."""
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_steps=3)
    assert rates(config, 10)[:7] == rates(config, 20)[:7]


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("decay_steps", [None, 0, 1, 12, 50])
def test_wsd_holds_its_bounds_for_any_length_of_decay(shape, decay_steps):
    """No decay at all, one step, as long as the run, longer: it begins at the peak at the earliest."""
    options = {"schedule": "wsd", "decay_steps": decay_steps, "decay_shape": shape}
    found = rates(OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=2, **options), 12)
    assert found[1] == 1.0 and found[0] == pytest.approx(0.55)
    assert min(found) >= 0.1 * (1 - 1e-15) and max(found) == 1.0
    assert found[-1] == (1.0 if decay_steps == 0 else pytest.approx(0.1, rel=1e-15))


def test_linear_and_cosine_meet_half_way_down():
    for schedule in ("linear", "cosine"):
        config = OptimConfig(lr=1.0, min_lr=0.2, warmup_steps=1, schedule=schedule)
        assert learning_rate(config, 6, steps=11) == pytest.approx(0.6, rel=1e-15)


def test_a_warm_up_longer_than_the_run_is_its_beginning():
    config = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=10, schedule="cosine")
    assert rates(config, 3) == pytest.approx([0.1, 0.2, 0.3], rel=1e-15)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_without_a_gradient_only_the_group_that_decays_shrinks(name):
    matrix, bias = torch.ones(4), torch.ones(4)
    groups = [{"params": [matrix], "decay": True}, {"params": [bias], "decay": False}]
    updated = optimizer(OptimConfig(name=name, lr=0.1, weight_decay=0.5))(groups)
    matrix.grad, bias.grad = torch.zeros(4), torch.zeros(4)
    updated.step()
    assert torch.equal(bias, torch.ones(4))
    torch.testing.assert_close(matrix, torch.full((4,), 0.95), rtol=1e-6, atol=0)  # 1 - lr x decay, in float32


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_groups_and_tensors_may_be_empty(name):
    """A rank may hold no parameter of a group, and no element of a parameter."""
    weight, nothing = torch.ones(2), torch.ones(0)
    updated = optimizer(OptimConfig(name=name))(
        [{"params": [weight, nothing], "decay": True}, {"params": [], "decay": False}]
    )
    weight.grad, nothing.grad = torch.ones(2), torch.ones(0)
    updated.step()
    assert (weight < 1).all() and nothing.shape == (0,)


def test_sgd_is_momentum_and_adamw_is_its_paper_after_one_step():
    config = OptimConfig(lr=0.1, betas=[0.9, 0.99], eps=1e-3, weight_decay=0.0)
    weight = torch.tensor([1.0, -2.0], dtype=torch.float64)
    gradient = torch.tensor([0.5, -0.25], dtype=torch.float64)
    for name, moved in {"adamw": gradient / (gradient.abs() + 1e-3), "sgd": gradient}.items():
        mine = weight.clone()
        config.name = name
        updated = optimizer(config)([{"params": [mine], "decay": True}])
        mine.grad = gradient.clone()
        updated.step()
        torch.testing.assert_close(mine, weight - 0.1 * moved, rtol=1e-12, atol=0)

"""The deep MLP is the chain of products that one writes by hand, backward pass included, on every tensor axis."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.mesh import Layout, Mesh
from megalite.models.config import MLPConfig
from megalite.models.microbatch import VectorMicrobatch
from megalite.models.mlp import MLP
from megalite.spec import init_parameters
from tests.counting import count
from tests.law import assert_equal, draw
from tests.ranks import run

BATCH, HIDDEN = 6, 8


def by_hand(weights: list[Tensor], x: Tensor, target: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The loss and every weight's gradient by the chain rule, for x <- relu(x W^T)."""
    inputs, masks = [], []
    for weight in weights:
        inputs.append(x)
        masks.append((x @ weight.t() > 0).double())
        x = (x @ weight.t()) * masks[-1]
    gradients, dx = [], 2 * (x - target)
    for weight, before, mask in zip(reversed(weights), reversed(inputs), reversed(masks), strict=True):
        dy = dx * mask
        gradients.append(dy.t() @ before)
        dx = dy @ weight
    return (x - target).square().sum(), gradients[::-1]


def outcome(layers: int, tp: int) -> tuple[Tensor, list[Tensor], list[tuple[slice, ...]], int, int]:
    """Loss, this rank's gradients and their boxes, and the collectives of forward and of backward."""
    config = MLPConfig(hidden_size=HIDDEN, num_hidden_layers=layers, hidden_act="relu", initializer_range=0.5)
    model = MLP(config, mesh=Mesh.build(Layout(tp=tp)), device="meta", dtype=torch.float64)
    init_parameters(model, seed=0)
    batch = VectorMicrobatch(draw(BATCH, HIDDEN), draw(BATCH, HIDDEN, seed=1), torch.arange(BATCH), 1)
    with count() as forward:
        loss = model(None, batch)
    with count() as backward:
        loss.backward()
    gradients = [layer.weight.grad for layer in model.layers.values()]
    boxes = [layer.specs["weight"].box() for layer in model.layers.values()]
    return loss.detach(), gradients, boxes, forward.calls(), backward.calls()


@pytest.mark.parametrize("layers", [1, 3, 4])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_and_gradients_are_those_of_the_chain_rule_and_a_pair_costs_one_all_reduce_each_way(layers, tp):
    config = MLPConfig(hidden_size=HIDDEN, num_hidden_layers=layers, initializer_range=0.5)
    whole = MLP(config, dtype=torch.float64)
    init_parameters(whole, seed=0)
    weights = [parameter.detach() for parameter in whole.parameters()]
    loss, gradients = by_hand(weights, draw(BATCH, HIDDEN), draw(BATCH, HIDDEN, seed=1))
    assert loss > 1 and all(gradient.any() for gradient in gradients)
    for value, parts, boxes, forward, backward in run(outcome, tp, layers, tp):
        assert_equal(value, loss, "loss")
        for part, box, gradient in zip(parts, boxes, gradients, strict=True):
            assert_equal(part, gradient[box], "dW")
        pairs, rest = divmod(layers, 2)
        # the first layer's input needs no gradient, so of its pair nothing is summed in backward
        assert (forward, backward) == ((pairs + rest, pairs + rest - 1) if tp > 1 else (0, 0))


@pytest.mark.parametrize("act", ["gelu", "silu"])
def test_the_nonlinearity_is_the_configs(act):
    model = MLP(MLPConfig(hidden_size=HIDDEN, num_hidden_layers=2, hidden_act=act), dtype=torch.float64)
    init_parameters(model, seed=0)
    x = draw(BATCH, HIDDEN)
    for layer in model.layers.values():
        x = getattr(F, act)(x @ layer.weight.t())
    assert_equal(model.outputs(draw(BATCH, HIDDEN)).detach(), x.detach(), act)

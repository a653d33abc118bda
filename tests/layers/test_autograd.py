"""What the layers' autograd functions share keeps torch's own laws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.layers.autograd import cast, once_differentiable
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.norm import RMSNorm
from megalite.layers.rotary import rotate
from megalite.mesh import Axis
from tests.law import draw

TP = Axis("tp")


class _Square(torch.autograd.Function):
    """x^2; its backward asserts that autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_runs_without_autograd_whether_or_not_a_graph_of_it_was_asked_for(create_graph):
    x, upstream = draw(3).requires_grad_(), draw(3, seed=1).requires_grad_()
    (dx,) = torch.autograd.grad(_Square.apply(x), x, upstream, create_graph=create_graph)
    assert torch.equal(dx, 2 * x * upstream) and dx.requires_grad == create_graph


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "square": _Square.apply,
    "column": ColumnParallelLinear(4, 4, tp=TP, dtype=torch.float64),
    "row": RowParallelLinear(4, 4, tp=TP, dtype=torch.float64),
    "norm": RMSNorm(4, dtype=torch.float64),
    "rotary": lambda x: rotate(x, draw(3, 2), draw(3, 2)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_second_derivatives_are_refused_and_not_wrong(name):
    x = draw(2, 3, 4).requires_grad_()
    (dx,) = torch.autograd.grad(LAYERS[name](x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


def test_casting_to_its_own_dtype_gives_the_tensor_itself():
    x = draw(3)
    assert cast(x, torch.float64) is x
    assert cast(x, torch.float32).dtype == torch.float32

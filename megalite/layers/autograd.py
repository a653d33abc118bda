"""What the autograd functions of the layers share: small things that each runs several times a layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's decorator of the same name, for the price of one question where nobody asks for second derivatives.

    Autograd records a backward only under create_graph=True; otherwise gradients are off already, and torch's guard,
    which turns them off again, costs as much as a small product.
    """
    guarded = torch.autograd.function.once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Tensor) -> Any:
        return (guarded if torch.is_grad_enabled() else backward)(ctx, *gradients)

    return run


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in that dtype. `to` says the same, and takes longer to find that there is nothing to do."""
    return x if x.dtype == dtype else x.to(dtype)


def own(y: Tensor) -> Tensor:
    """y as no view of another tensor, without a copy: autograd lets nobody write into a function's result that is one,
    and nn.ReLU(inplace=True) does."""
    return torch.ops.aten._unsafe_view.default(y, y.shape) if y._is_view() else y

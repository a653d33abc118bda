"""`ColumnParallelLinear` and `RowParallelLinear`: nn.Linear with its weight cut over the tensor axis.

A column-parallel layer cuts the outputs (f enters it), a row-parallel one the inputs (g leaves it); one after the other
needs no communication between (Megatron-LM, arXiv:1909.08053, section 3). Under sequence parallelism the tokens are cut
outside of the pair: an all-gather enters and a reduce-scatter leaves (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.layers.autograd import cast, once_differentiable, own
from megalite.layers.rows import SEQUENCE_DIM, from_memory_order, in_memory_order, sequence_first, to_rows
from megalite.mesh import Axis
from megalite.spec import Init, ParallelModule, ParamSpec, uniform, zeros
from megalite.weight_grad import open_store

Enter = Literal["whole", "copy", "all_gather"]
Leave = Literal["cut", "reduce", "reduce_scatter"]


def parallel_linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None = None, *, tp: Axis, enter: Enter, leave: Leave
) -> Tensor:
    """y = leave(enter(x) @ W.T) + bias, as one autograd function; both parallel linears are this.

    x: (..., seq, in_local), with enter="all_gather" (..., seq/tp, in_local). weight: any shape whose last dim is
    in_local; the others are flattened to the outputs.
    enter: "whole" x is used as it is and its gradient is complete; "copy" f; "all_gather" along seq.
    leave: "cut" y stays as it is; "reduce" g; "reduce_scatter" along seq. bias is added once, after leaving.

    In backward an input that was gathered is gathered again, not stored, and travels under the product dX = dY W; the
    reduction of dX travels under dW = dY^T X. While a `WeightGradStore` is open dW goes there instead.
    Raises ValueError if x and the weight differ in dtype where autocast does not decide it.
    """
    return _ParallelLinear.apply(in_precision_of(x, weight), weight, bias, tp, enter, leave)


def in_precision_of(x: Tensor, weight: Tensor) -> Tensor:
    """x as a product with the weight reads it, which autocast decides; as torch does, it leaves float64 alone."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return x.to(torch.get_autocast_dtype(x.device.type))
    if x.dtype != weight.dtype:
        raise ValueError(f"x is {x.dtype} and the weight {weight.dtype}: convert one, or use torch.autocast")
    return x


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: nn.Parameter, bias: Tensor | None, tp: Axis, enter: Enter, leave: Leave
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.tp, ctx.enter, ctx.leave = weight, tp, enter, leave
        ctx.bias_dtype = None if bias is None else bias.dtype
        whole = start_all_gather(x, tp, dim=SEQUENCE_DIM).wait() if enter == "all_gather" else x
        inside = cast(bias, x.dtype) if bias is not None and leave == "cut" else None
        order = sequence_first(whole)
        y = F.linear(in_memory_order(whole, sequence_first=order), _matrix(weight, x.dtype), inside)
        if leave == "reduce":
            y = start_all_reduce(y, tp).wait()
        y = from_memory_order(y, sequence_first=order)
        if leave == "reduce_scatter":
            y = start_reduce_scatter(y, tp, dim=SEQUENCE_DIM).wait()
        return own(y if bias is None or leave == "cut" else y.add_(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        store = open_store(ctx.weight)
        whole_x = _start_gather(x, ctx.tp, ctx.enter == "all_gather" and needs_weight and store is None)
        whole_gradient = _start_gather(gradient, ctx.tp, ctx.leave == "reduce_scatter").wait()
        dx = _start_input_gradient(ctx, whole_gradient) if needs_x else None
        dw = db = None
        if needs_weight and store is not None:
            x = x.detach()  # x itself would keep the graph that made it alive
            store.put(ctx.weight, _deferred(ctx, x, gradient), reads=(x, gradient))
        elif needs_weight:
            dw = _weight_gradient(whole_gradient, whole_x.wait(), ctx.weight)
        if needs_bias:
            db = cast(to_rows(gradient, sequence_first=sequence_first(gradient)).sum(0), ctx.bias_dtype)
        return None if dx is None else dx.wait(), dw, db, None, None, None


def _matrix(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return cast(weight if weight.ndim == 2 else weight.reshape(-1, weight.shape[-1]), dtype)


def _start_gather(x: Tensor, tp: Axis, wanted: bool) -> Pending[Tensor]:
    return start_all_gather(x, tp, dim=SEQUENCE_DIM) if wanted else Pending.done(x)


def _start_input_gradient(ctx: Any, gradient: Tensor) -> Pending[Tensor]:
    """dX = dY W, its sum over tp under way if the ranks hold summands of it."""
    order = sequence_first(gradient)
    dx = in_memory_order(gradient, sequence_first=order) @ _matrix(ctx.weight, gradient.dtype)
    dx = from_memory_order(dx, sequence_first=order)
    if ctx.enter == "copy":
        return start_all_reduce(dx, ctx.tp)
    if ctx.enter == "all_gather":
        return start_reduce_scatter(dx, ctx.tp, dim=SEQUENCE_DIM)
    return Pending.done(dx)


def _weight_gradient(gradient: Tensor, x: Tensor, weight: nn.Parameter) -> Tensor:
    """dW = dY^T X over all rows, both read in the same order."""
    order = sequence_first(x)
    product = to_rows(gradient, sequence_first=order).t() @ to_rows(x, sequence_first=order)
    return cast(product if weight.ndim == 2 else product.view(weight.shape), weight.dtype)


def _deferred(ctx: Any, x: Tensor, gradient: Tensor) -> Callable[[], Callable[[], Tensor]]:
    """The weight product for a store. It holds what is cut, of x and of the gradient, and gathers when it is run."""
    tp, weight = ctx.tp, ctx.weight
    gather_x, gather_gradient = ctx.enter == "all_gather", ctx.leave == "reduce_scatter"

    def start() -> Callable[[], Tensor]:
        whole_x, whole_gradient = _start_gather(x, tp, gather_x), _start_gather(gradient, tp, gather_gradient)
        return lambda: _weight_gradient(whole_gradient.wait(), whole_x.wait(), weight)

    return start


class ColumnParallelLinear(ParallelModule):
    """y = x @ W.T + b with W and b cut along the outputs: each rank computes its share of y.

    x: (..., seq, in_features), equal on all ranks -> (..., seq, out_features/tp). With sequence_parallel
    (..., seq/tp, in_features) -> (..., seq, out_features/tp). Positional arguments are nn.Linear's.
    out_shape, cut_dim: several products fused in one: the weight is (*out_shape, in_features), cut along cut_dim of
    out_shape, so that each of the fused parts is cut alike; out_features must be their product. matrices: which of them
    is a matrix of its own, as in `ParamSpec`.
    init: of the weight; default nn.Linear's. Raises ValueError if tp does not divide what it cuts.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        out_shape: tuple[int, ...] | None = None,
        cut_dim: int = 0,
        matrices: Mapping[int, tuple[int, ...]] | None = None,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        shape = out_shape or (out_features,)
        if math.prod(shape) != out_features:
            raise ValueError(f"out_shape={shape} has {math.prod(shape)} outputs, and out_features={out_features}")
        _require_divisible("out_features", shape[cut_dim], tp)
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.sequence_parallel = sequence_parallel
        bound = 1 / math.sqrt(in_features)
        weight = ParamSpec((*shape, in_features), init or uniform(bound), cut={tp: cut_dim}, matrices=matrices or {})
        self.weight = self.declare("weight", weight, device=device, dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            start = zeros if init else uniform(bound)
            spec = ParamSpec(shape, start, cut={tp: cut_dim}, decay=False, matrices=None)
            self.bias = self.declare("bias", spec, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        enter: Enter = "all_gather" if self.sequence_parallel else "copy"
        bias = None if self.bias is None else self.bias.flatten()
        return parallel_linear(x, self.weight, bias, tp=self.tp, enter=enter, leave="cut")

    def extra_repr(self) -> str:
        return _describe(self)


class RowParallelLinear(ParallelModule):
    """y = x @ W.T + b with W cut along the inputs: each rank holds a summand of y, and leaving sums them.

    x: (..., seq, in_features/tp) -> (..., seq, out_features), equal on all ranks; with sequence_parallel
    (..., seq/tp, out_features). The bias is added once, after the sum. Positional arguments are nn.Linear's.
    init: of the weight; default nn.Linear's. Raises ValueError if tp does not divide in_features.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        _require_divisible("in_features", in_features, tp)
        self.in_features, self.out_features, self.tp = in_features, out_features, tp
        self.sequence_parallel = sequence_parallel
        bound = 1 / math.sqrt(in_features)
        weight = ParamSpec((out_features, in_features), init or uniform(bound), cut={tp: 1})
        self.weight = self.declare("weight", weight, device=device, dtype=dtype)
        self.register_parameter("bias", None)
        if bias:
            start = zeros if init else uniform(bound)
            partial = (tp,) if sequence_parallel else ()  # each rank adds it to its own tokens only
            spec = ParamSpec((out_features,), start, partial=partial, decay=False)
            self.bias = self.declare("bias", spec, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        leave: Leave = "reduce_scatter" if self.sequence_parallel else "reduce"
        return parallel_linear(x, self.weight, self.bias, tp=self.tp, enter="whole", leave=leave)

    def extra_repr(self) -> str:
        return _describe(self)


def _require_divisible(name: str, size: int, tp: Axis) -> None:
    if size % tp.size:
        raise ValueError(
            f"{name}={size} cannot be cut over {tp.name}={tp.size}: take a size that is a multiple of {tp.size}"
        )


def _describe(layer: ColumnParallelLinear | RowParallelLinear) -> str:
    return (
        f"in_features={layer.in_features}, out_features={layer.out_features}, bias={layer.bias is not None}, "
        f"{layer.tp.name}={layer.tp.size}, sequence_parallel={layer.sequence_parallel}"
    )

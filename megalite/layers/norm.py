"""Layer norm and RMS norm, with what the tensor axis does to them.

What `tp` cuts of x decides how the weight is held and whether a rank's gradient of it is all of it:

| tp cuts of x | where                                                  | weight | its gradient    | said by         |
|--------------|--------------------------------------------------------|--------|-----------------|-----------------|
| nothing      | the norms of a block without sequence parallelism      | whole  | whole           |                 |
| tokens       | the same with sequence parallelism                     | whole  | summand         | `partial=(tp,)` |
| heads        | q and k norm over each head (Qwen 3), always           | whole  | summand         | `partial=(tp,)` |
| features     | q and k norm over all heads at once (OLMo 2)           | cut    | of its part     | `cut=tp`        |

Only the last communicates: the sums over the features are all-reduced, one number a row and sum. Statistics are
computed in float32 at least, whatever the precision; y has x's dtype and, where x is dense, its memory order
(`megalite.layers.rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite import comm
from megalite.layers.autograd import cast, once_differentiable
from megalite.layers.rows import from_rows, sequence_first, to_rows
from megalite.mesh import Axis
from megalite.spec import Init, ParallelModule, ParamSpec, ones, zeros

_WHOLE = Axis("whole")


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, *, eps: float, cut: Axis | None = None) -> Tensor:
    """y = (x - mean) / sqrt(variance + eps) * weight + bias over the last dim. arXiv:1607.06450.

    x: (..., features), weight and bias: (features,) or None for 1 and 0. With `cut` all are this rank's
    (..., features/cut), and mean and variance those of all features.
    """
    wide = _kernel_dtype(x, weight)
    scale, shift = (None if p is None else cast(p, wide) for p in (weight, bias))
    if cut is not None:  # layer norm is RMS norm of what is centred
        y = rms_norm(_centred(cast(x, wide), cut), scale, eps=eps, cut=cut)
        return cast(y if shift is None else y + shift, x.dtype)
    return _by_rows(x, lambda rows: cast(F.layer_norm(cast(rows, wide), rows.shape[-1:], scale, shift, eps), x.dtype))


def rms_norm(x: Tensor, weight: Tensor | None, *, eps: float, cut: Axis | None = None) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dim; shapes as `layer_norm`. arXiv:1910.07467."""
    if x.is_cuda and cut is None:  # where torch has it as one kernel; on the CPU its own is many, and slow
        wide = _kernel_dtype(x, weight)
        scale = None if weight is None else cast(weight, wide)
        return _by_rows(x, lambda rows: cast(F.rms_norm(cast(rows, wide), rows.shape[-1:], scale, eps), x.dtype))
    return _RMSNorm.apply(x, x.new_ones(x.shape[-1]) if weight is None else weight, eps, cut or _WHOLE)


class _RMSNorm(torch.autograd.Function):
    """Keeps x, the weight and one number a row, r = 1 / sqrt(mean(x^2) + eps). With g = dL/dy:

    dx = r (g w - x r^2 mean(g w x)),  dw = sum over rows of r g x.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cut: Axis) -> Tensor:
        wide, order = torch.promote_types(x.dtype, torch.float32), sequence_first(x)
        rows = cast(to_rows(x, sequence_first=order), wide)
        squares = torch.linalg.vector_norm(rows, dim=-1, keepdim=True).square_()
        inverse = comm.start_all_reduce(squares, cut).wait().div_(x.shape[-1] * cut.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        ctx.cut, ctx.order = cut, order
        y = torch.mul(rows, cast(weight, wide)).mul_(inverse)
        return from_rows(cast(y, x.dtype), x.shape[:-1], sequence_first=order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, inverse = ctx.saved_tensors
        wide, features = inverse.dtype, x.shape[-1] * ctx.cut.size
        rows, g = (cast(to_rows(part, sequence_first=ctx.order), wide) for part in (x, gradient))
        w = cast(weight, wide)
        dx = dw = None
        with _without_autocast(x.device.type):  # on CUDA it takes matrix-vector products in half precision
            product = g * rows
            if ctx.needs_input_grad[1]:
                dw = cast(torch.mv(product.t(), inverse.squeeze(-1)), weight.dtype)
            if ctx.needs_input_grad[0]:
                sums = comm.start_all_reduce(torch.mv(product, w).unsqueeze_(-1), ctx.cut).wait()
                pull = sums.mul_(inverse).mul_(inverse).div_(-features)
                dx = torch.mul(g, w, out=product).addcmul_(rows, pull).mul_(inverse)
                dx = from_rows(cast(dx, x.dtype), x.shape[:-1], sequence_first=ctx.order)
        return dx, dw, None, None


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _centred(x: Tensor, cut: Axis) -> Tensor:
    """x minus its mean over the last dim, of which each rank of `cut` has a part. Each rank uses the mean for its own
    features, so the mean's gradient is a sum over ranks: f after g."""
    total = comm.copy(comm.reduce(x.sum(-1, keepdim=True), cut), cut)
    return x - total / (x.shape[-1] * cut.size)


def _kernel_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """In what dtype torch's fused kernels, which want x and weight alike, compute statistics in float32 at least."""
    dtype = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    # On the CPU they sum half-precision weight gradients in half precision, percents off; on CUDA in float32.
    return torch.promote_types(dtype, torch.float32) if x.device.type == "cpu" else dtype


def _by_rows(x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    order = sequence_first(x)
    return from_rows(function(to_rows(x, sequence_first=order)), x.shape[:-1], sequence_first=order)


class _Norm(ParallelModule):
    """What both norms are: a shape, its weight and bias, and how these are held."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float,
        *,
        cut: Axis | None,
        partial: tuple[Axis, ...],
        weight: bool,
        bias: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if cut is not None and shape[0] % cut.size:
            raise ValueError(
                f"a norm over {shape} cannot be cut over {cut.name}={cut.size}: "
                f"take a first size that is a multiple of {cut.size}"
            )
        self.shape, self.eps, self.cut, self.partial = shape, eps, cut, partial
        self.weight = self._vector("weight", ones, device, dtype) if weight else None
        self.bias = self._vector("bias", zeros, device, dtype) if bias else None

    def _vector(
        self, name: str, init: Init, device: torch.device | str | None, dtype: torch.dtype | None
    ) -> nn.Parameter:
        over = {} if self.cut is None else {self.cut: 0}
        spec = ParamSpec(self.shape, init, cut=over, partial=self.partial, decay=False, matrices=None)
        return self.declare(name, spec, device=device, dtype=dtype)

    def _flat(self, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x, weight and bias with what is normalised over as one dim. ValueError if x does not end in this shape."""
        local = (self.shape[0] // (1 if self.cut is None else self.cut.size), *self.shape[1:])
        if x.shape[-len(local) :] != local:
            raise ValueError(f"x of shape {tuple(x.shape)} does not end in {local}, which this norm is over")
        if not x.is_floating_point():
            raise ValueError(f"x is {x.dtype}: a norm is of floating-point numbers")
        weight, bias = (None if p is None else p.flatten() for p in (self.weight, self.bias))
        return x.flatten(-len(local)), weight, bias

    def extra_repr(self) -> str:
        held = "" if self.cut is None else f", cut={self.cut.name}={self.cut.size}"
        held += "".join(f", partial={axis.name}={axis.size}" for axis in self.partial)
        return f"{self.shape}, eps={self.eps}, weight={self.weight is not None}, bias={self.bias is not None}{held}"


class LayerNorm(_Norm):
    """Layer norm over the last dims of x, `normalized_shape` (an int or a tuple, as nn.LayerNorm's).

    cut: the axis that cuts the first of them. partial: the axes that cut x's tokens or heads, so that each rank's
    gradient of weight and bias is one summand. elementwise_affine=False: neither weight nor bias (OLMo 1).
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        *,
        cut: Axis | None = None,
        partial: tuple[Axis, ...] = (),
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, cut=cut, partial=partial, weight=elementwise_affine,
            bias=elementwise_affine and bias, device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        rows, weight, bias = self._flat(x)
        return layer_norm(rows, weight, bias, eps=self.eps, cut=self.cut).view_as(x)


class RMSNorm(_Norm):
    """RMS norm over the last dims of x; arguments as `LayerNorm`. It has no bias."""

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-6,
        *,
        cut: Axis | None = None,
        partial: tuple[Axis, ...] = (),
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            normalized_shape, eps, cut=cut, partial=partial, weight=elementwise_affine, bias=False,
            device=device, dtype=dtype,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        rows, weight, _ = self._flat(x)
        return rms_norm(rows, weight, eps=self.eps, cut=self.cut).view_as(x)


class SequenceParallelLayerNorm(LayerNorm):
    """Layer norm of a residual stream, (batch, seq/tp, hidden); with sequence_parallel=False, (batch, seq, hidden).

    Under sequence parallelism each rank saw its own tokens only, so its gradients are summands (arXiv:2205.05198).
    """

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-5,
        *,
        tp: Axis,
        sequence_parallel: bool = True,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden, eps, partial=(tp,) if sequence_parallel else (), elementwise_affine=elementwise_affine, bias=bias,
            device=device, dtype=dtype,
        )  # fmt: skip


class SequenceParallelRMSNorm(RMSNorm):
    """RMS norm of a residual stream; arguments as `SequenceParallelLayerNorm`."""

    def __init__(
        self,
        hidden: int,
        eps: float = 1e-6,
        *,
        tp: Axis,
        sequence_parallel: bool = True,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            hidden, eps, partial=(tp,) if sequence_parallel else (), elementwise_affine=elementwise_affine,
            device=device, dtype=dtype,
        )  # fmt: skip

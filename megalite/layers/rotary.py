"""Rotary positions (RoFormer, arXiv:2104.09864): each pair of a head's channels is turned by position x frequency.

Pairs are (i, i + head_dim/2), Hugging Face's "rotate half". Angles are computed in float64 and cos and sin kept in
float32 at least, whatever the model's precision: bfloat16 tells apart only 769 of the positions 0 to 4095.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from megalite.layers.autograd import cast, once_differentiable


class RopeScaling(Protocol):
    """What `rotary_frequencies` reads; `megalite.models.config.RopeScaling` is one, and says what each means."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int | None
    low_freq_factor: float
    high_freq_factor: float
    beta_fast: float
    beta_slow: float
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    truncate: bool


def rotary_frequencies(head_dim: int, theta: float, *, scaling: RopeScaling | None = None) -> tuple[np.ndarray, float]:
    """Radians a position for each pair of channels, (head_dim/2,) float64, and the factor on cos and sin.

    Unscaled theta^(-2i/head_dim) and 1. `scaling` stretches them for contexts longer than a model was trained on, in
    Hugging Face's definitions. Raises ValueError for an odd head_dim or an unknown rope_type.
    """
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} must be even: rotary positions turn pairs of channels")
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    rope_type = "none" if scaling is None else scaling.rope_type
    if scaling is None or rope_type == "none":
        return frequencies, 1.0
    if rope_type == "linear":
        return frequencies / scaling.factor, 1.0
    if rope_type == "llama3":
        return _llama3(frequencies, scaling), 1.0
    if rope_type == "yarn":
        return _yarn(frequencies, theta, scaling), _yarn_attention_factor(scaling)
    raise ValueError(f"rope_type={rope_type} is unknown; take none, linear, llama3 or yarn")


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    """Pairs that turn more than high_freq_factor times in the original context keep their frequency, those that turn
    less than low_freq_factor times get it divided by `factor`, and between is a ramp. Llama 3.1."""
    turns = _original_context(scaling) * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return _blend(frequencies, kept.clip(0, 1), scaling.factor)


def _yarn(frequencies: np.ndarray, theta: float, scaling: RopeScaling) -> np.ndarray:
    """As llama3, with the ramp linear in the index of the pair, from the one that turns beta_fast times in the original
    context to the one that turns beta_slow times. YaRN, arXiv:2309.00071, section 3.2 ("NTK-by-parts")."""
    head_dim = 2 * len(frequencies)

    def pair_that_turns(turns: float) -> float:
        return head_dim * math.log(_original_context(scaling) / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(scaling.beta_fast), pair_that_turns(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (np.arange(len(frequencies)) - low) / (high - low or 0.001)
    return _blend(frequencies, 1 - ramp.clip(0, 1), scaling.factor)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    """YaRN's temperature, 0.1 ln(factor) + 1 (equation 22), or DeepSeek's quotient of two of them."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if (scaling.mscale is None) != (scaling.mscale_all_dim is None):
        raise ValueError(
            f"model.rope_scaling.mscale={scaling.mscale} and mscale_all_dim={scaling.mscale_all_dim} go together; "
            "give both"
        )
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)


def _original_context(scaling: RopeScaling) -> int:
    if scaling.original_max_position_embeddings is None:
        raise ValueError(f"rope_type={scaling.rope_type} needs original_max_position_embeddings, in tokens")
    return scaling.original_max_position_embeddings


def _blend(frequencies: np.ndarray, kept: np.ndarray, factor: float) -> np.ndarray:
    """Frequencies where kept = 1, frequencies / factor where it is 0."""
    return frequencies * kept + frequencies / factor * (1 - kept)


class Rotary(nn.Module):
    """Gives cos and sin of the angles at `positions`; `rotate` applies them. Arguments as `rotary_frequencies`.

    The frequencies are no buffer but numpy float64, so that neither `.to(bfloat16)` nor the meta device reaches them.
    """

    def __init__(self, head_dim: int, theta: float = 10000.0, *, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        self.frequencies, self.attention_factor = rotary_frequencies(head_dim, theta, scaling=scaling)

    def forward(self, positions: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """(seq,) or (batch, seq) integers -> cos, sin (..., seq, head_dim/2), float64 if `dtype` is, else float32."""
        frequencies = torch.from_numpy(self.frequencies).to(positions.device)
        angles = positions.unsqueeze(-1).double() * frequencies
        wide = torch.promote_types(dtype, torch.float32)
        return (angles.cos() * self.attention_factor).to(wide), (angles.sin() * self.attention_factor).to(wide)

    def extra_repr(self) -> str:
        return f"head_dim={2 * len(self.frequencies)}, attention_factor={self.attention_factor:g}"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin), x1 and x2 being the halves of each head's channels.

    x: (batch, seq, ..., head_dim), any strides; cos, sin: (seq, head_dim/2) or (batch, seq, head_dim/2), not
    differentiated. Computed in float32 at least; the result has x's dtype. Stores nothing of x: the gradient is turned
    back by the same angles.
    """
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(gradient, cos, sin, -1), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = _over_heads(cast(cos, wide), x), _over_heads(cast(sin, wide), x)
    y = torch.empty_like(x, dtype=wide)
    (x1, x2), (y1, y2) = cast(x, wide).chunk(2, dim=-1), y.chunk(2, dim=-1)
    torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-sign)
    torch.mul(x2, cos, out=y2).addcmul_(x1, sin, value=sign)
    return cast(y, x.dtype)


def _over_heads(table: Tensor, x: Tensor) -> Tensor:
    """cos or sin, (..., seq, head_dim/2), with the dims of x between seq and head_dim."""
    heads = x.shape[2:-1]
    table = table.reshape(*table.shape[:-1], *(1 for _ in heads), table.shape[-1])
    if x.device.type == "cpu" and x.stride(0) > x.stride(1):
        # Repeated for each head: a CPU kernel joins seq and heads into one long loop only where nothing is broadcast.
        table = table.expand(*table.shape[: -1 - len(heads)], *heads, -1).contiguous()
    return table

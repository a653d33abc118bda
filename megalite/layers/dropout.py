"""Dropout as a pure function of where an element stands in the run, so that no layout changes what is dropped.

Whether an element is kept depends on (seed, step, sequence id, layer, site, position, channel), all global, and on
nothing else: there is no stream of random numbers to keep in step over ranks, to save, or to restore when a block is
computed again. Ranks that hold the same activation draw the same mask; ranks that hold parts draw the parts of one.

How a number is drawn. (seed, step, layer, site) are hashed on the host and, with the sequence id and the position, give
64 random bits for each row of the tensor, i.e. for all channels of one token: an odd multiplier a and a summand b. A
channel c gives a random number k(c). An element is dropped if a k(c) + b modulo 2^32 is among the smallest p 2^32 as an
int32: multiply-shift hashing (Dietzfelbinger, 1996), under which any two channels of a row are independent, and rows
have keys of their own. It costs two passes of int32 arithmetic over the tensor, less than drawing from a stream.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megalite.layers.autograd import once_differentiable
from megalite.layers.rows import sequence_first
from megalite.mesh import Axis

_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, odd: consecutive integers become well spread


@dataclass(frozen=True, eq=False)
class DropoutKey:
    """Names the tokens that a layer sees: what dropout draws from, beside where in the model it stands.

    sequence_ids: (batch,) int64, the place of each sequence in the order of all samples. positions: (seq,) or
    (batch, seq) int64, the global positions of the tokens this rank has.
    """

    seed: int
    step: int
    sequence_ids: Tensor
    positions: Tensor

    def part(self, axis: Axis) -> DropoutKey:
        """The key of this rank's tokens where `axis` cuts the sequence. ValueError if it does not divide it."""
        mine = self.positions[..., axis.part(self.positions.shape[-1])]
        return DropoutKey(self.seed, self.step, self.sequence_ids, mine)

    @cached_property
    def tokens(self) -> Tensor:
        """(batch, seq) int64: 64 random bits for each (sequence id, position), shared by all layers."""
        return _mix(_mix(self.sequence_ids.unsqueeze(-1)) + self.positions)

    def rows(self, layer: int, site: str) -> Tensor:
        """(batch, seq) int64: 64 random bits for each token, of this seed, step, layer and site."""
        name = f"{self.seed}/{self.step}/{layer}/{site}".encode()
        return _mix(self.tokens ^ int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True))


def dropout(x: Tensor, p: float, *, key: DropoutKey, layer: int, site: str, channel_offset: int = 0) -> Tensor:
    """x with each element zero with probability p and divided by 1 - p otherwise; p = 0 gives x itself.

    x: (batch, seq, channels), in any memory order, which is kept. layer, site: where in the model, e.g. "mlp_out".
    channel_offset: the global index of the first channel, where channels are cut.
    Nothing the size of x is stored: backward draws the mask again. Raises ValueError if p is not in [0, 1) or if the
    key names other tokens than x has.
    """
    if not _drops(p):
        return x
    rows = key.rows(layer, site)
    if x.shape[:-1] != rows.shape:
        raise ValueError(f"x has (batch, seq) = {tuple(x.shape[:-1])} and the dropout key {tuple(rows.shape)}")
    if sequence_first(x):
        rows = rows.t().contiguous().t()  # so that the mask is drawn in the order in which x lies
    channels = torch.arange(channel_offset, channel_offset + x.shape[-1], device=x.device)
    return _Dropout.apply(x, *_affine(rows.unsqueeze(-1)), _low(_mix(channels)), p)


def attention_dropout(
    weights: Tensor, p: float, *, key: DropoutKey, layer: int, site: str, head_offset: int = 0
) -> Tensor:
    """`dropout` of attention weights (batch, heads, queries, keys), all of which the positions of `key` name.

    A row is a (sequence, head, query position), a channel a key position. head_offset: the global index of the first
    head, where heads are cut.
    """
    if not _drops(p):
        return weights
    batch, heads, *square = weights.shape
    rows = key.rows(layer, site)
    if (batch, *square) != (*rows.shape, rows.shape[-1]):
        raise ValueError(
            f"attention weights {tuple(weights.shape)} do not fit the dropout key's (batch, seq) = {tuple(rows.shape)}"
        )
    head = torch.arange(head_offset, head_offset + heads, device=weights.device)
    rows = _mix(rows.unsqueeze(1) + _mix(head).unsqueeze(-1))
    columns = key.positions if key.positions.ndim == 1 else key.positions[:, None, None]
    return _Dropout.apply(weights, *_affine(rows.unsqueeze(-1)), _low(_mix(columns)), p)


class _Dropout(torch.autograd.Function):
    """y = x keep / (1 - p), with keep from three small tensors: a and b of the rows, k of the columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, multiplier: Tensor, summand: Tensor, columns: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(multiplier, summand, columns)
        ctx.p = p
        return _drop(x, multiplier, summand, columns, p)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        multiplier, summand, columns = ctx.saved_tensors
        return _drop(gradient, multiplier, summand, columns, ctx.p), None, None, None, None


def _drop(x: Tensor, multiplier: Tensor, summand: Tensor, columns: Tensor, p: float) -> Tensor:
    bits = torch.mul(multiplier, columns).add_(summand)
    # 1 where x is kept, else 0. In place throughout: fresh memory is what costs here.
    y = torch.empty_like(x).copy_(bits.ge_(_threshold(p)))
    return y.mul_(x).mul_(1 / (1 - p))


def _threshold(p: float) -> int:
    """The p-quantile of a uniform int32: that part of all values lies below it."""
    return min(round(p * 2**32) - 2**31, 2**31 - 1)


def _drops(p: float) -> bool:
    if not 0 <= p < 1:
        raise ValueError(f"dropout p={p} must be a probability in [0, 1)")
    return p > 0


def _mix(x: Tensor) -> Tensor:
    """int64 -> int64, one to one, each bit of the result a function of all of x: splitmix64 (Steele et al., 2014)."""
    x = (x + 1) * _signed(_GOLDEN)
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """x >> bits with zeros coming in: torch's shift of int64 copies the sign."""
    return (x >> bits) & ((1 << 64 - bits) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >= 1 << 63 else word


def _affine(rows: Tensor) -> tuple[Tensor, Tensor]:
    """An odd multiplier and a summand, int32, from the high and the low half of 64 random bits."""
    return _low(rows >> 32) | 1, _low(rows)


def _low(x: Tensor) -> Tensor:
    """The low 32 bits of an int64, as an int32."""
    return ((x << 32) >> 32).to(torch.int32)

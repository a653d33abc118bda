"""Grouped-query self-attention with its heads cut over the tensor axis."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from megalite.comm import all_gather, copy
from megalite.layers.dropout import DropoutKey, attention_dropout
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from megalite.layers.recompute import Recompute
from megalite.layers.rotary import rotate
from megalite.layers.rows import SEQUENCE_DIM, sequence_first
from megalite.mesh import Axis
from megalite.spec import Init, ParallelModule, ParamSpec, PartOf, uniform, zeros


class HeadCut(NamedTuple):
    """How heads lie over the tensor axis `tp`: query heads are cut over all of it, key and value heads over `kv`.

    Where tp is larger than the number of key and value heads, each serves the `shared` ranks of a sub-axis, which hold
    equal weights and each a summand of their gradient. Else kv is tp, and shared has size 1. See `Mesh.divide`.
    """

    tp: Axis
    kv: Axis
    shared: Axis

    @classmethod
    def even(cls, tp: Axis) -> HeadCut:
        """Every rank has key and value heads of its own: tp divides their number."""
        return cls(tp, tp, Axis("shared"))


class QKVShape(NamedTuple):
    """kv_heads key and value heads of head_dim, each read by `queries` query heads."""

    kv_heads: int
    queries: int
    head_dim: int

    @property
    def fused(self) -> tuple[int, int, int]:
        """(kv_heads, queries + key + value, head_dim): the outputs of the one weight that makes all three."""
        return self.kv_heads, self.queries + 2, self.head_dim


class GroupedQueryAttention(nn.Module):
    """softmax(q k^T / sqrt(head_dim)) v over the heads of this rank, causal, between two parallel linears.

    x: (batch, seq[/tp], hidden) -> the same. `heads` query heads share `kv_heads` key and value heads in order: head h
    reads key h // (heads / kv_heads). q, k and v are one fused weight (kv_heads, heads/kv_heads + 2, head_dim, hidden),
    or two where `cut.shared` is larger than 1.
    window: a query sees that many tokens, itself the last; None = all before it. clip: bound on |q|, |k|, |v|.
    q_norm, k_norm: modules applied to (batch, seq, heads_local, head_dim) before the rotation, as in Qwen 3 and OLMo 2.
    implementation: "sdpa" (torch's fused kernels) or "eager" (explicit softmax in float32 at least, the reference;
    attention dropout needs it). Raises ValueError where the axis does not divide the heads.
    """

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        cut: HeadCut,
        sequence_parallel: bool = False,
        bias: bool = False,
        out_bias: bool = False,
        window: int | None = None,
        clip: float | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        dropout: float = 0.0,
        implementation: str = "sdpa",
        init: Init | None = None,
        out_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer: int = 0,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        if implementation not in ("sdpa", "eager"):
            raise ValueError(f"attn_implementation={implementation} is unknown; take sdpa or eager")
        if dropout and implementation != "eager":
            raise ValueError(f"attention_dropout={dropout} needs attn_implementation=eager, not {implementation}")
        if heads % kv_heads:
            raise ValueError(f"heads={heads} is not a multiple of kv_heads={kv_heads}")
        self.cut, self.head_dim = cut, head_dim
        self.window, self.clip, self.dropout, self.implementation = window, clip, dropout, implementation
        self.layer, self.recompute = layer, recompute or Recompute("none")
        shape = QKVShape(kv_heads, heads // kv_heads, head_dim)
        project = FusedQKV if cut.shared.size == 1 else SharedQKV
        options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device, "dtype": dtype}
        self.qkv = project(hidden, shape, bias, cut=cut, init=init, **options)
        self.q_norm, self.k_norm = q_norm, k_norm
        self.out = RowParallelLinear(heads * head_dim, hidden, out_bias, tp=cut.tp, init=out_init, **options)

    def forward(
        self,
        x: Tensor,
        *,
        rotary: tuple[Tensor, Tensor] | None = None,
        key: DropoutKey | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """rotary: cos and sin of all positions of the sequence; key: with the whole sequence's positions.

        documents: (batch, seq) int64, the number of the document that each token belongs to; a query sees its own
        document only. None = all tokens of a row are one document.
        """
        q, k, v = self.qkv(x)
        if self.clip is not None:
            q, k, v = (part.clamp(-self.clip, self.clip) for part in (q, k, v))
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        values = self.recompute.call("attention", self.layer, self._attend, q, k, v, key, documents)
        return self.out(_join_heads(values, sequence_first=sequence_first(x)))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key: DropoutKey | None, documents: Tensor | None) -> Tensor:
        """(batch, seq, heads, head_dim) each -> (batch, heads, seq, head_dim)."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seq = q.shape[2]
        window = seq if self.window is None else self.window
        mask = None
        if window < seq or documents is not None:
            mask = _visible(seq, window, q.device, documents)
        if self.implementation == "eager":
            return self._attend_eagerly(q, k, v, mask, key)
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=True)

    def _attend_eagerly(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, key: DropoutKey | None) -> Tensor:
        if mask is None:
            mask = _visible(q.shape[2], q.shape[2], q.device)
        k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q @ k.transpose(-2, -1)).to(wide) / math.sqrt(self.head_dim)
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        if self.dropout and self.training:
            if key is None:
                raise ValueError(f"attention_dropout={self.dropout} needs a DropoutKey")
            offset = self.cut.tp.rank * q.shape[1]
            weights = attention_dropout(
                weights, self.dropout, key=key, layer=self.layer, site="attention", head_offset=offset
            )
        return weights.to(v.dtype) @ v


class FusedQKV(ColumnParallelLinear):
    """q, k and v in one product: a weight (kv_heads, heads/kv_heads + 2, head_dim, hidden), cut along kv_heads."""

    def __init__(self, hidden: int, shape: QKVShape, bias: bool, *, cut: HeadCut, **options: Any) -> None:
        _require_heads("num_key_value_heads", shape.kv_heads, cut.kv)
        options |= {"out_shape": shape.fused, "matrices": {1: (shape.queries, 1, 1)}}
        super().__init__(hidden, math.prod(shape.fused), bias, tp=cut.tp, **options)
        self.shape = shape

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        """(batch, seq[/tp], hidden) -> q (batch, seq, heads/tp, head_dim); k, v (batch, seq, kv_heads/tp, head_dim)."""
        _, parts, head_dim = self.shape.fused
        grouped = rearrange(super().forward(x), "b s (g p d) -> b s g p d", p=parts, d=head_dim)
        q, k, v = grouped.split((parts - 2, 1, 1), dim=3)
        return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)


class SharedQKV(ParallelModule):
    """q cut over all of tp; k and v, fewer than its ranks, cut over `cut.kv` and equal on the ranks that share them.

    The two parameters are regions of FusedQKV's one, so that both are the same model. x enters once for both. Each
    sharing rank sees the gradient of its own query heads only: that of k and v is a summand over `cut.shared`.
    """

    q_weight: nn.Parameter
    kv_weight: nn.Parameter
    q_bias: nn.Parameter | None
    kv_bias: nn.Parameter | None

    def __init__(
        self,
        hidden: int,
        shape: QKVShape,
        bias: bool,
        *,
        cut: HeadCut,
        sequence_parallel: bool,
        init: Init | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        _require_heads("num_attention_heads", shape.kv_heads * shape.queries, cut.tp)
        _require_heads("num_key_value_heads", shape.kv_heads, cut.kv)
        self.shape, self.cut, self.sequence_parallel = shape, cut, sequence_parallel
        default = uniform(1 / math.sqrt(hidden))
        q = {"cut": {cut.kv: 0, cut.shared: 1}}
        kv = {"cut": {cut.kv: 0}, "partial": (cut.shared,)}
        wholes = {"weight": (init or default, (hidden,)), "bias": (zeros if init else default, ())}
        for whole, (start, tail) in wholes.items():
            parts = (("q", 0, (shape.queries,), q), ("kv", shape.queries, (1, 1), kv))
            for name, first, sizes, held in parts:
                part_of = PartOf(whole, (*shape.fused, *tail), (0, first, 0, *(0 for _ in tail)))
                size = (shape.kv_heads, sum(sizes), shape.head_dim, *tail)
                is_weight, fused = whole == "weight", {1: sizes} if len(sizes) > 1 else {}
                matrices = fused if is_weight else None
                spec = ParamSpec(size, start, decay=is_weight, part_of=part_of, matrices=matrices, **held)
                if whole == "weight" or bias:
                    self.declare(f"{name}_{whole}", spec, device=device, dtype=dtype)
                else:
                    self.register_parameter(f"{name}_{whole}", None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As FusedQKV's."""
        tp = self.cut.tp
        x = all_gather(x, tp, SEQUENCE_DIM) if self.sequence_parallel else copy(x, tp)
        q_bias, kv_bias = (None if b is None else b.flatten() for b in (self.q_bias, self.kv_bias))
        q = parallel_linear(x, self.q_weight, q_bias, tp=tp, enter="whole", leave="cut")
        kv = parallel_linear(x, self.kv_weight, kv_bias, tp=tp, enter="whole", leave="cut")
        k, v = rearrange(kv, "b s (g two d) -> two b s g d", two=2, d=self.shape.head_dim)
        return rearrange(q, "b s (h d) -> b s h d", d=self.shape.head_dim), k, v


def _require_heads(key: str, heads: int, axis: Axis) -> None:
    if heads % axis.size:
        raise ValueError(
            f"model.{key}={heads} cannot be cut over {axis.name}={axis.size}: take a multiple of {axis.size}"
        )


def _join_heads(values: Tensor, *, sequence_first: bool) -> Tensor:
    """(batch, heads, seq, head_dim) -> (batch, seq, heads x head_dim), in the memory order asked for."""
    if sequence_first:
        # Copied here, where it is 1/tp of the width of what the output product would otherwise copy.
        return rearrange(values, "b h s d -> s b (h d)").contiguous().transpose(0, 1)
    return rearrange(values, "b h s d -> b s (h d)")


def _visible(seq: int, window: int, device: torch.device, documents: Tensor | None = None) -> Tensor:
    """True where query i sees key j: i - window < j <= i, in one document. (seq, seq), or (batch, 1, seq, seq)."""
    at = torch.arange(seq, device=device)
    distance = at[:, None] - at[None, :]
    visible = (distance >= 0) & (distance < window)
    if documents is None:
        return visible
    return visible & (documents[:, None, :, None] == documents[:, None, None, :])

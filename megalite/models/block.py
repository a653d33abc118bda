"""One layer of a GPT: attention and MLP, each added to the residual stream; and what all parts of a model share."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.layers.attention import GroupedQueryAttention, HeadCut
from megalite.layers.dropout import DropoutKey, dropout
from megalite.layers.feed_forward import FeedForward
from megalite.layers.norm import LayerNorm, RMSNorm
from megalite.layers.recompute import Recompute
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig
from megalite.spec import Init, normal

NO_RECOMPUTE = Recompute("none")


@dataclass(frozen=True)
class Setting:
    """What all parts of a model are built with. seed: of dropout, which is a pure function of it."""

    mesh: Mesh
    sequence_parallel: bool = False
    recompute: Recompute = NO_RECOMPUTE
    seed: int = 0
    device: torch.device | str | None = None
    dtype: torch.dtype | None = None

    @property
    def tp(self) -> Axis:
        return self.mesh.tp


@dataclass(frozen=True)
class BlockInputs:
    """What a Block reads beside its activations, made once per micro-batch.

    rotary: cos and sin of every position, or None. key: of the whole sequence; local_key: of this rank's tokens.
    documents: (batch, seq), which tokens may see each other, or None for all.
    """

    rotary: tuple[Tensor, Tensor] | None
    key: DropoutKey
    local_key: DropoutKey
    documents: Tensor | None = None


class Block(nn.Module):
    """Attention, then the MLP, each added to the residual stream: x (batch, seq[/tp], hidden) -> the same."""

    def __init__(self, config: GPTConfig, layer: int, setting: Setting) -> None:
        super().__init__()
        self.layer, self.recompute, self.pdrop = layer, setting.recompute, config.resid_pdrop
        self.norm_first = config.norm_placement == "pre"
        self.attention_norm = stream_norm(config, setting)
        self.attention = _attention(config, layer, setting)
        self.mlp_norm = stream_norm(config, setting)
        self.mlp = FeedForward(
            config.hidden_size,
            config.intermediate_size,
            tp=setting.tp,
            act=config.hidden_act,
            gated=config.is_gated_act,
            bias=config.mlp_bias,
            **_of_both(config, layer, setting),
        )

    def forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        return self.recompute.call("block", self.layer, self._forward, x, inputs)

    def _forward(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        x = self._add(x, self.attention_norm, lambda h: self._attend(h, inputs), "attention_out", inputs)
        return self._add(x, self.mlp_norm, self.mlp, "mlp_out", inputs)

    def _add(
        self, x: Tensor, norm: nn.Module, sublayer: Callable[[Tensor], Tensor], site: str, inputs: BlockInputs
    ) -> Tensor:
        """x + dropout(f(norm x)), or x + dropout(norm(f x)) where the norm comes after."""
        normed = functools.partial(self.recompute.call, "norm", self.layer, norm)
        y = normed(x, into=sublayer) if self.norm_first else normed(sublayer(x))
        return x + dropout(y, self.pdrop if self.training else 0.0, key=inputs.local_key, layer=self.layer, site=site)

    def _attend(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        return self.attention(x, rotary=inputs.rotary, key=inputs.key, documents=inputs.documents)


def _attention(config: GPTConfig, layer: int, setting: Setting) -> GroupedQueryAttention:
    cut = _head_cut(config, setting)
    heads, kv_heads = config.num_attention_heads, config.kv_heads
    return GroupedQueryAttention(
        config.hidden_size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=config.dim_per_head,
        cut=cut,
        bias=config.attention_bias,
        out_bias=config.out_bias,
        window=config.window(layer),
        clip=config.clip_qkv,
        q_norm=_head_norm(config, setting, heads, cut.tp),
        k_norm=_head_norm(config, setting, kv_heads, cut.kv, shared=(cut.shared,)),
        dropout=config.attention_dropout,
        implementation=config.attn_implementation,
        **_of_both(config, layer, setting),
    )


def _of_both(config: GPTConfig, layer: int, setting: Setting) -> dict[str, Any]:
    """What attention and MLP are built with alike."""
    return {
        "sequence_parallel": setting.sequence_parallel,
        "init": normal(config.initializer_range),
        "out_init": _out_init(config),
        "device": setting.device,
        "dtype": setting.dtype,
        "layer": layer,
        "recompute": setting.recompute,
    }


def _head_cut(config: GPTConfig, setting: Setting) -> HeadCut:
    tp, kv_heads = setting.tp, config.kv_heads
    if tp.size <= kv_heads:
        return HeadCut.even(tp)
    return HeadCut(tp, *setting.mesh.divide(tp, kv_heads))


def _out_init(config: GPTConfig) -> Init:
    """Of the two projections that write into the residual stream, whose variance grows with every layer (GPT-2)."""
    layers = 2 * config.num_hidden_layers if config.residual_init_scaled else 1
    return normal(config.initializer_range / math.sqrt(layers))


def stream_norm(config: GPTConfig, setting: Setting) -> nn.Module:
    """A norm of the residual stream."""
    partial = (setting.tp,) if setting.sequence_parallel else ()  # each rank saw its own tokens only
    return _norm_over(config, setting, config.hidden_size, partial=partial)


def _head_norm(
    config: GPTConfig, setting: Setting, heads: int, cut: Axis, *, shared: tuple[Axis, ...] = ()
) -> nn.Module | None:
    """The norm of queries or keys, (batch, seq, heads/cut, head_dim), or None.

    Over each head alone ranks share the weight and saw different heads; over all heads the weight is cut as they are.
    """
    if config.qk_norm == "none":
        return None
    if config.qk_norm == "head":
        return _norm_over(config, setting, config.dim_per_head, partial=(setting.tp,))
    return _norm_over(config, setting, (heads, config.dim_per_head), cut=cut, partial=shared)


def _norm_over(config: GPTConfig, setting: Setting, shape: int | tuple[int, ...], **held: Any) -> nn.Module:
    held |= {"device": setting.device, "dtype": setting.dtype}
    if config.norm_type == "rmsnorm":
        return RMSNorm(shape, config.rms_norm_eps, **held)
    affine = config.norm_type == "layernorm"
    return LayerNorm(shape, config.layer_norm_epsilon, elementwise_affine=affine, **held)

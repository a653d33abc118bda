"""The layers: each is an nn.Module, or a function, that is given the axes it needs and runs alone on axes of size 1."""

from __future__ import annotations

from megalite.layers.attention import GroupedQueryAttention
from megalite.layers.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megalite.layers.dropout import DropoutKey
from megalite.layers.embedding import LearnedPositions, VocabParallelEmbedding
from megalite.layers.feed_forward import FeedForward
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from megalite.layers.norm import LayerNorm, RMSNorm, SequenceParallelLayerNorm, SequenceParallelRMSNorm
from megalite.layers.recompute import Recompute
from megalite.layers.rotary import Rotary

__all__ = [
    "ColumnParallelLinear",
    "DropoutKey",
    "FeedForward",
    "GroupedQueryAttention",
    "LayerNorm",
    "LearnedPositions",
    "RMSNorm",
    "Recompute",
    "Rotary",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabParallelEmbedding",
    "linear_cross_entropy",
    "parallel_linear",
    "vocab_parallel_cross_entropy",
]

"""The layers: each is an nn.Module, or a function, that is given the axes it needs and runs alone on axes of size 1."""

from megalite.layers.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megalite.layers.embedding import LearnedPositions, VocabParallelEmbedding
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelLinear",
    "LearnedPositions",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "linear_cross_entropy",
    "vocab_parallel_cross_entropy",
]

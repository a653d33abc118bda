"""The parameters that one rank holds, from the configuration alone: how many, cut how, whose gradients are summands.

The same facts as the models' own `ParamSpec`s, without building a model: a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megalite.models.config import GPTConfig, MLPConfig


@dataclass(frozen=True)
class Cut:
    """How the tensor axis cuts a model. sequence_parallel: activations between products are cut along the sequence."""

    tp: int = 1
    sequence_parallel: bool = False


@dataclass(frozen=True)
class Weight:
    """`count` parameters of one kind, `numel` entries each on this rank, padding included.

    summand: how many ranks must sum their gradients after the data axis (ParamSpec's `partial`); 1 = none.
    """

    name: str
    numel: int
    count: int = 1
    summand: int = 1


def weights_of(model: GPTConfig | MLPConfig, cut: Cut) -> tuple[Weight, ...]:
    """Every parameter of a rank. All ranks hold equally many numbers, since a vocabulary is padded to a multiple."""
    if isinstance(model, MLPConfig):
        return (Weight("layer", model.hidden_size**2 // cut.tp, count=model.num_hidden_layers),)
    return tuple(weight for weight in _of_gpt(model, cut) if weight.numel)


def units_of(model: GPTConfig | MLPConfig, cut: Cut) -> tuple[Weight, ...]:
    """What Zero keeps in one buffer each, in forward's order: name, entries and how many such units follow each other.

    A GPT's are the embedding, learned positions, the blocks, and the last norm with the head; a tied weight is a unit
    alone, used at both ends. summand is left at 1.
    """
    weights = weights_of(model, cut)
    if isinstance(model, MLPConfig):
        return weights
    around = {weight.name: weight for weight in weights}
    ends = {"embedding": ("embedding",), "positions": ("positions",), "head": ("last norm", "head")}
    outside = {name for names in ends.values() for name in names}
    block = sum(weight.numel for weight in weights if weight.name not in outside)
    sizes = {end: sum(around[name].numel for name in names if name in around) for end, names in ends.items()}
    units = (
        Weight("embedding", sizes["embedding"]),
        Weight("positions", sizes["positions"]),
        Weight("block", block, count=model.num_hidden_layers),
        Weight("norm and head", sizes["head"]),
    )
    return tuple(unit for unit in units if unit.numel)


def numel_of(weights: tuple[Weight, ...]) -> int:
    return sum(weight.numel * weight.count for weight in weights)


def padded_vocabulary(model: GPTConfig, tp: int) -> int:
    """The vocabulary, padded to the next multiple of tp."""
    return -(-model.vocab_size // tp) * tp


def sharing_ranks(model: GPTConfig, tp: int) -> int:
    """How many ranks of tp hold the same key and value heads: 1 unless there are fewer of them than ranks."""
    return max(tp // model.kv_heads, 1)


def _of_gpt(model: GPTConfig, cut: Cut) -> Iterator[Weight]:
    layers, hidden, tp = model.num_hidden_layers, model.hidden_size, cut.tp
    tokens = tp if cut.sequence_parallel else 1  # ranks that each saw only their own tokens
    norm = vectors_of_norm(model)
    table = padded_vocabulary(model, tp) // tp * hidden
    yield Weight("embedding", table)
    if model.position_embedding_type == "absolute":
        yield Weight("positions", model.max_position_embeddings * hidden, summand=tokens)
    yield Weight("norms of a block", 2 * norm * hidden, layers, tokens)
    for weight in _of_attention(model, cut):
        yield Weight(weight.name, weight.numel, layers, weight.summand)
    parts = 2 if model.is_gated_act else 1
    ffn = model.intermediate_size // tp
    yield Weight("up", parts * ffn * hidden, layers)
    yield Weight("down", ffn * hidden, layers)
    if model.mlp_bias:
        yield Weight("up bias", parts * ffn, layers)
        yield Weight("down bias", hidden, layers, tokens)
    yield Weight("last norm", norm * hidden, summand=tokens)
    if not model.tie_word_embeddings:
        yield Weight("head", table)


def _of_attention(model: GPTConfig, cut: Cut) -> Iterator[Weight]:
    hidden, head_dim, tp = model.hidden_size, model.dim_per_head, cut.tp
    heads = model.num_attention_heads // tp
    shared = sharing_ranks(model, tp)
    kv_heads = model.kv_heads * shared // tp
    norm = vectors_of_norm(model)
    yield Weight("q", heads * head_dim * hidden)
    yield Weight("k and v", 2 * kv_heads * head_dim * hidden, summand=shared)
    if model.attention_bias:
        yield Weight("q bias", heads * head_dim)
        yield Weight("k and v bias", 2 * kv_heads * head_dim, summand=shared)
    if model.qk_norm == "head":
        yield Weight("norms of q and k", 2 * norm * head_dim, summand=tp)
    elif model.qk_norm == "full":
        yield Weight("norm of q", norm * heads * head_dim)
        yield Weight("norm of k", norm * kv_heads * head_dim, summand=shared)
    yield Weight("attention out", heads * head_dim * hidden)
    if model.out_bias:
        yield Weight("attention out bias", hidden, summand=tp if cut.sequence_parallel else 1)


def vectors_of_norm(model: GPTConfig) -> int:
    """How many vectors one norm learns."""
    return {"rmsnorm": 1, "layernorm": 2, "layernorm_nonparametric": 0}[model.norm_type]

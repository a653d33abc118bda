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


@dataclass(frozen=True)
class UnitSize:
    """`count` units of Zero in a row, alike: `numel` entries each on this rank, without what shards are padded by.

    summands: (ranks, first, last entry) of those whose gradients are summed over so many ranks after the data axis.
    """

    name: str
    numel: int
    count: int
    summands: tuple[tuple[int, int, int], ...]


def units_of(model: GPTConfig | MLPConfig, cut: Cut) -> tuple[UnitSize, ...]:
    """What Zero keeps in one buffer each, in forward's order.

    A GPT's are the embedding, learned positions, the blocks, and the last norm with the head; a tied weight is a unit
    alone, used at both ends. What is a summand stands last in its unit, that of all of tp before that of a part of it.
    """
    weights = weights_of(model, cut)
    if isinstance(model, MLPConfig):
        return tuple(UnitSize(weight.name, weight.numel, weight.count, ()) for weight in weights)
    outside = {
        "embedding": "embedding",
        "positions": "positions",
        "last norm": "norm and head",
        "head": "norm and head",
    }
    members: dict[str, list[Weight]] = {name: [] for name in ("embedding", "positions", "block", "norm and head")}
    for weight in weights:
        members[outside.get(weight.name, "block")].append(weight)
    counts = {"block": model.num_hidden_layers}
    return tuple(_unit(name, held, counts.get(name, 1), cut.tp) for name, held in members.items() if held)


def _unit(name: str, weights: list[Weight], count: int, tp: int) -> UnitSize:
    order = [1, *sorted({weight.summand for weight in weights} - {1}, key=lambda ranks: ranks != tp)]
    start, summands = 0, []
    for ranks in order:
        stop = start + sum(weight.numel for weight in weights if weight.summand == ranks)
        if ranks > 1:
            summands.append((ranks, start, stop))
        start = stop
    return UnitSize(name, start, count, tuple(summands))


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

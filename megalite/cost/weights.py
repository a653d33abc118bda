"""The parameters that one rank holds, from the configuration alone: how many, cut how, whose gradients are summands.

The same facts as the models' own `ParamSpec`s, without building a model: a test holds the two against each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.part import Part


@dataclass(frozen=True)
class Cut:
    """How a model is cut, and what of it one rank has.

    tp: ranks of the tensor axis. sequence_parallel: activations between products are cut along the sequence. parts: of
    this rank of the pipeline, its stages in forward order; None = one stage, all of the model.
    """

    tp: int = 1
    sequence_parallel: bool = False
    parts: tuple[Part, ...] | None = None

    def stages(self, model: GPTConfig | MLPConfig) -> tuple[Part, ...]:
        """The parts, null resolved."""
        return (Part(range(model.num_hidden_layers)),) if self.parts is None else self.parts

    def layers(self, model: GPTConfig | MLPConfig) -> list[int]:
        """All layers of this rank."""
        return [layer for part in self.stages(model) for layer in part.layers]

    def has_first(self, model: GPTConfig | MLPConfig) -> bool:
        """Whether one of its stages is the model's first, which embeds."""
        return any(part.is_first for part in self.stages(model))

    def has_last(self, model: GPTConfig | MLPConfig) -> bool:
        """Whether one of its stages is the model's last, which has the head and the loss."""
        return any(part.is_last for part in self.stages(model))


@dataclass(frozen=True)
class Weight:
    """`count` parameters of one kind, `numel` entries each on this rank, padding included.

    summand: how many ranks must sum their gradients after the data axis (ParamSpec's `partial`); 1 = none. over: the
    axis on which they lie.
    """

    name: str
    numel: int
    count: int = 1
    summand: int = 1
    over: str = "tp"


def weights_of(model: GPTConfig | MLPConfig, cut: Cut) -> tuple[Weight, ...]:
    """Every parameter of a rank. All ranks of tp hold equally many numbers, since a vocabulary is padded to a multiple.

    A tied weight is there once where the first and the last stage lie on this rank, and on both ranks where they do
    not, which then sum its gradients.
    """
    if isinstance(model, MLPConfig):
        weights = [Weight("layer", model.hidden_size**2 // cut.tp, count=len(cut.layers(model)))]
    else:
        weights = list(_of_gpt(model, cut))
    return tuple(weight for weight in weights if weight.numel and weight.count)


class Summand(NamedTuple):
    """Entries first to last, not included, whose gradients are summed over so many ranks of an axis after the data."""

    axis: str
    ranks: int
    first: int
    last: int


@dataclass(frozen=True)
class UnitSize:
    """`count` units of Zero in a row, alike: `numel` entries each on this rank, without what shards are padded by."""

    name: str
    numel: int
    count: int
    summands: tuple[Summand, ...]


def units_of(model: GPTConfig | MLPConfig, cut: Cut) -> tuple[UnitSize, ...]:
    """What Zero keeps in one buffer each, in forward's order.

    A GPT's are the embedding, learned positions, the blocks of one stage after the other, and the last norm with the
    head; a tied weight is a unit alone, used at both ends, wherever they lie. What is a summand stands last in its
    unit, that of all of tp before that of a part of it.
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
    counts = {"block": len(cut.layers(model))}
    return tuple(_unit(name, held, counts.get(name, 1), cut.tp) for name, held in members.items() if held)


def _unit(name: str, weights: list[Weight], count: int, tp: int) -> UnitSize:
    kinds = {(weight.over, weight.summand) for weight in weights if weight.summand > 1}
    start, summands = sum(weight.numel for weight in weights if weight.summand == 1), []
    for over, ranks in sorted(kinds, key=lambda kind: kind != ("tp", tp)):
        stop = start + sum(weight.numel for weight in weights if (weight.over, weight.summand) == (over, ranks))
        summands.append(Summand(over, ranks, start, stop))
        start = stop
    return UnitSize(name, start, count, tuple(summands))


def used_units(model: GPTConfig | MLPConfig, cut: Cut) -> list[list[int]]:
    """For each stage of a rank the units that its forward enters, in order, by their places among all of them.

    The places are those of `units_of` with each unit written out `count` times.
    """
    names = [unit.name for unit in units_of(model, cut) for _ in range(unit.count)]
    blocks = iter(place for place, name in enumerate(names) if name in ("block", "layer"))
    used = []
    for part in cut.stages(model):
        first = [name for name in ("embedding", "positions") if part.is_first]
        last = ["norm and head"] if part.is_last else []
        if part.is_last and isinstance(model, GPTConfig) and model.tie_word_embeddings:
            last.append("embedding")
        inside = [next(blocks) for _ in part.layers]
        before, after = ([names.index(name) for name in ends if name in names] for ends in (first, last))
        used.append([*before, *inside, *after])
    return used


def padded_vocabulary(model: GPTConfig, tp: int) -> int:
    """The vocabulary, padded to the next multiple of tp."""
    return -(-model.vocab_size // tp) * tp


def sharing_ranks(model: GPTConfig, tp: int) -> int:
    """How many ranks of tp hold the same key and value heads: 1 unless there are fewer of them than ranks."""
    return max(tp // model.kv_heads, 1)


def _of_gpt(model: GPTConfig, cut: Cut) -> Iterator[Weight]:
    layers, hidden, tp = len(cut.layers(model)), model.hidden_size, cut.tp
    embeds, ends, tied = cut.has_first(model), cut.has_last(model), model.tie_word_embeddings
    tokens = tp if cut.sequence_parallel else 1  # ranks that each saw only their own tokens
    norm = vectors_of_norm(model)
    table = padded_vocabulary(model, tp) // tp * hidden
    if embeds or (ends and tied):
        yield Weight("embedding", table, summand=2 if tied and embeds != ends else 1, over="pp")
    if embeds and model.position_embedding_type == "absolute":
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
    if ends:
        yield Weight("last norm", norm * hidden, summand=tokens)
    if ends and not tied:
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

"""The most that one rank holds within a step, and where: an estimate, moment by moment.

Activations are at their most when forward ends, and each layer's backward puts gradients of activations on top before
it gives anything back. So the peak is at one of few moments: the loss, the output layer's backward, the last norm's, a
block's (what it computes again, and the largest of what lies between its products), the embedding's, the update. What
Zero holds of weights and gradients at each of them is exact; activations are those of `megalite.cost.activations`; the
temporaries are those of this program's layers on the CPU, the large ones only.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from megalite.cost.activations import (
    Pass,
    around_blocks,
    block_activations,
    head_activations,
    kept_activations,
    local_tokens,
    mlp_activations,
)
from megalite.cost.memory import Recipe, Sharing, State
from megalite.cost.weights import Cut, padded_vocabulary, sharing_ranks, units_of
from megalite.models.config import GPTConfig, MLPConfig

CPU_BLOCK, CUDA_BLOCK = 2**17, 2**26
"""Entries of the logits that the loss widens at a time: `megalite.layers.cross_entropy`."""


class Moment(NamedTuple):
    """Bytes at one moment of a step. weights, gradients: Zero's. activations: what is still kept for backward."""

    name: str
    weights: int
    gradients: int
    activations: int
    temporaries: int
    optimizer: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.activations + self.temporaries + self.optimizer


@dataclass(frozen=True)
class Training:
    """All that a step's memory depends on. microbatches: of one rank in a step. held: as `state` gives it."""

    model: GPTConfig | MLPConfig
    cut: Cut
    micro: Pass
    sharing: Sharing
    recipe: Recipe
    microbatches: int
    held: State


def peak(training: Training) -> Moment:
    """The moment at which most is held."""
    return max(moments(training), key=lambda moment: moment.total)


def moments(training: Training) -> Iterator[Moment]:
    """The moments that can be the highest, in the order of a step's last micro-batch."""
    model = training.model
    units = [unit.numel for unit in units_of(training.model, training.cut) for _ in range(unit.count)]
    last = len(units) - 1
    if isinstance(model, MLPConfig):
        wide = training.micro.batch * model.hidden_size * training.micro.value_bytes
        kept = kept_activations(model, training.cut, training.micro)
        yield _moment(training, units, last, "backward", kept, 3 * wide + units[last] * training.recipe.weights)
    else:
        yield from _of_gpt(training, model, units)
    yield _update(training, units)


def _of_gpt(training: Training, model: GPTConfig, units: list[int]) -> Iterator[Moment]:
    cut, micro, last = training.cut, training.micro, len(units) - 1
    around, layers = around_blocks(model, cut, micro), model.num_hidden_layers
    by_layer = [block_activations(model, cut, micro, layer) for layer in range(layers)]
    kept = around + sum(by_layer) + head_activations(model, cut, micro)
    table = padded_vocabulary(model, cut.tp) // cut.tp * model.hidden_size * micro.value_bytes
    message = local_tokens(cut, micro) * model.hidden_size * micro.value_bytes
    for name, temporary in _of_loss(model, cut, micro):
        yield _moment(training, units, last, name, kept, temporary, begun=name != "loss")
    tied = table if model.tie_word_embeddings else 0  # the head's gradient waits for the embedding's
    wide = local_tokens(cut, micro) * model.hidden_size * micro.wide_bytes
    kept = around + sum(by_layer) + message
    copies = 4 if micro.value_bytes < 4 else 3  # of the input, its gradient and their product; the result
    yield _moment(training, units, last, "last norm", kept, message + (copies - 1) * wide + message + tied)
    before = last - layers  # units before the blocks
    for layer in reversed(range(layers)):
        kept = around + sum(by_layer[: layer + 1])
        temporary = block_temporaries(model, cut, micro, layer) + tied
        yield _moment(training, units, before + layer, f"block {layer}", kept, temporary)
    whole = micro.tokens * model.hidden_size
    gradient = whole * (micro.value_bytes + (4 if micro.value_bytes < 4 else 0))
    summed = table // micro.value_bytes * micro.wide_bytes + (table if micro.value_bytes < 4 else 0)
    yield _moment(training, units, 0, "embedding", around, gradient + summed + tied)


def _of_loss(model: GPTConfig, cut: Cut, micro: Pass) -> Iterator[tuple[str, int]]:
    """Temporaries of the loss's forward and of its backward with the output layer's."""
    e, w, columns = micro.value_bytes, micro.wide_bytes, padded_vocabulary(model, cut.tp) // cut.tp
    hidden, tokens = model.hidden_size, micro.tokens
    rows = min(micro.chunk_tokens or tokens, tokens)
    block = min(max((CPU_BLOCK if micro.on_cpu else CUDA_BLOCK) // columns, 1), rows) * columns * w
    widened = 2 if e < w else 1
    chunk = 0 if micro.chunk_tokens is None else rows * columns * e
    gathered = tokens * hidden * e if cut.sequence_parallel and cut.tp > 1 else 0
    yield "loss", chunk + widened * block + (gathered if chunk else 0)
    dx, dw = tokens * hidden * e, columns * hidden
    if micro.chunk_tokens is None:
        # The input is gathered again, and its gradient, a summand, goes out in parts.
        yield "output layer", dx + dw * e + 2 * gathered
        return
    yield "output layer", gathered + dx + dw * w + chunk + max(dw * e, (widened if e < w else 0) * block)


def block_temporaries(model: GPTConfig, cut: Cut, micro: Pass, layer: int) -> int:
    """The most that a block's backward holds beside what blocks up to this one have kept."""
    e, w = micro.value_bytes, micro.wide_bytes
    message = local_tokens(cut, micro) * model.hidden_size * e
    whole = micro.tokens * model.hidden_size * e
    moves = whole if cut.sequence_parallel and cut.tp > 1 else 0
    again = 0
    if micro.recomputes("block", layer):
        again = block_activations(model, cut, replace(micro, recompute="none"), layer) - message
        micro = replace(micro, recompute="none")
    gradient = message * (2 if model.resid_pdrop else 1)
    ffn = model.intermediate_size // cut.tp
    inner, parts = micro.tokens * ffn * e, 2 if model.is_gated_act else 1
    kept = mlp_activations(model, cut, micro, layer)
    full = mlp_activations(model, cut, replace(micro, recompute="none"), layer)
    computed = full - kept + (message if micro.recomputes("mlp", layer) and micro.recomputes("norm", layer) else 0)
    down = computed + inner + ffn * model.hidden_size * e + moves
    act = computed + parts * inner
    # Gate's and up's gradients are joined, and under sequence parallelism brought into the sequence's order once more.
    reordered = parts * inner if moves and model.is_gated_act else 0
    up = parts * inner + reordered - kept + whole + parts * ffn * model.hidden_size * e + 2 * moves
    # What the MLP kept is gone when attention's turn comes; its own gradients lie on top of what it kept.
    heads = model.num_attention_heads // cut.tp
    kv_heads = model.kv_heads * sharing_ranks(model, cut.tp) // cut.tp
    q, k = (micro.tokens * count * model.dim_per_head * e for count in (heads, kv_heads))
    core = 2 * q + 2 * k
    if model.attn_implementation == "eager":
        scores = micro.batch * heads * micro.seq_len**2
        core += 2 * q + scores * (2 * w + e) + (scores * (w + e) if micro.recomputes("attention", layer) else 0)
    turned = q * (2 * w + e) // e + q + 2 * k - (2 * q + k) if model.position_embedding_type == "rope" else 0
    out = q + moves + heads * model.dim_per_head * model.hidden_size * e
    attention = max(core, turned, out) - kept - message
    return again + gradient + max(down, act, up, attention)


def _moment(
    training: Training,
    units: list[int],
    at: int,
    name: str,
    activations: int,
    temporaries: int,
    *,
    begun: bool = True,
) -> Moment:
    """What Zero holds when backward is at a unit: its gradients if they have begun, the reduction of the one before."""
    sharing, recipe, held = training.sharing, training.recipe, training.held
    padded, share = ([size(numel) for numel in units] for size in (sharing.padded, sharing.share))
    weights, gradients = held.weights, held.gradients
    if sharing.spreads_weights:
        first = 0 if sharing.reshard != "forward" else max(at - sharing.prefetch, 0)
        last = len(units) - 1 if sharing.reshard == "step" else at
        weights += sum(padded[first : last + 1]) * recipe.weights
    moving = at + 1 < len(units)
    if sharing.stage >= 2:
        summed = sum(share) if training.microbatches > 1 else sum(share[at + 2 :])
        gradients = (summed + (padded[at + 1] if moving else 0)) * recipe.gradients
        gradients += begun * units[at] * recipe.weights  # as backward left them, until they are all there
    if sharing.stage >= 1 and sharing.shards > 1 and moving:
        # With Gloo the parts of all other ranks, in one of which the sum is made; with NCCL the sum alone.
        parts = sharing.shards - 1 if training.micro.on_cpu else 1
        temporaries += parts * share[at + 1] * recipe.gradients
    return Moment(name, weights, gradients, activations, temporaries, held.masters + held.moments)


def _update(training: Training, units: list[int]) -> Moment:
    """Gradients and moments that are kept narrow are widened for one slice, of one unit at most, at a time."""
    sharing, recipe, held = training.sharing, training.recipe, training.held
    slice_ = max(sharing.share(numel) for numel in units)
    narrow = (recipe.gradients < recipe.wide) + (2 if recipe.moments < recipe.wide else 0)
    temporaries = 0 if sharing.offload else narrow * slice_ * recipe.wide
    return Moment("update", held.weights, held.gradients, 0, temporaries, held.masters + held.moments)


def most_weights(training: Training) -> int:
    """A bound of the weights that are there at once: the shards, 1 + prefetch whole units, and a tied one."""
    sharing, held = training.sharing, training.held
    if not sharing.spreads_weights:
        return held.weights
    units = [sharing.padded(unit.numel) for unit in units_of(training.model, training.cut) for _ in range(unit.count)]
    ahead = 1 + sharing.prefetch if sharing.reshard == "forward" else len(units)
    window = max(sum(units[start : start + ahead]) for start in range(len(units)))
    tied = units[0] if isinstance(training.model, GPTConfig) and training.model.tie_word_embeddings else 0
    return held.weights + (window + tied) * training.recipe.weights


def most_gradients(training: Training) -> int:
    """A bound of Zero's own gradients: what is kept of all units, and of one either both what backward has left and the
    buffer in which it is summed, or the latter while the next unit's come."""
    sharing, held, recipe = training.sharing, training.held, training.recipe
    if sharing.stage < 2:
        return held.gradients
    units = [sharing.padded(unit.numel) for unit in units_of(training.model, training.cut) for _ in range(unit.count)]
    alone = max(units) * (recipe.weights + recipe.gradients)
    pairs = [now * recipe.weights + before * recipe.gradients for now, before in itertools.pairwise(units)]
    two = max(alone, *pairs) if pairs else alone
    return held.gradients + two

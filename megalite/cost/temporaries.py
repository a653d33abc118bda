"""What this program's layers hold for a moment, beside what they keep: an estimate, of the large ones, on the CPU."""

from __future__ import annotations

from dataclasses import replace

from megalite.cost.activations import Pass, block_activations, local_tokens, mlp_activations
from megalite.cost.deferred import deferred_of_mlp
from megalite.cost.weights import Cut, padded_vocabulary, sharing_ranks
from megalite.models.config import GPTConfig

CPU_BLOCK, CUDA_BLOCK = 2**17, 2**26
"""Entries of the logits that the loss widens at a time: `megalite.layers.cross_entropy`."""


def loss_temporaries(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """The most that the loss holds in forward."""
    _, block, chunk, gathered = _sizes(model, cut, micro)
    return chunk + (2 if micro.value_bytes < micro.wide_bytes else 1) * block + (gathered if chunk else 0)


def head_temporaries(model: GPTConfig, cut: Cut, micro: Pass, *, splits: bool = False) -> int:
    """The most that the backward of loss and output layer holds. splits: as for `block_temporaries`."""
    e, w = micro.value_bytes, micro.wide_bytes
    columns, block, chunk, gathered = _sizes(model, cut, micro)
    dx, dw = micro.tokens * model.hidden_size * e, columns * model.hidden_size
    if micro.chunk_tokens is None:
        # The input is gathered again, and its gradient, a summand, goes out in parts.
        return dx + gathered if splits else dx + dw * e + 2 * gathered
    return gathered + dx + dw * w + chunk + max(dw * e, (2 if e < w else 0) * block)


def _sizes(model: GPTConfig, cut: Cut, micro: Pass) -> tuple[int, int, int, int]:
    """Columns of the logits; bytes of the block of them that is widened at a time, of a chunk, and of the input where
    it is gathered."""
    e, w, columns = micro.value_bytes, micro.wide_bytes, padded_vocabulary(model, cut.tp) // cut.tp
    rows = min(micro.chunk_tokens or micro.tokens, micro.tokens)
    block = min(max((CPU_BLOCK if micro.on_cpu else CUDA_BLOCK) // columns, 1), rows) * columns * w
    chunk = 0 if micro.chunk_tokens is None else rows * columns * e
    gathered = micro.tokens * model.hidden_size * e if cut.sequence_parallel and cut.tp > 1 else 0
    return columns, block, chunk, gathered


def embedding_temporaries(model: GPTConfig, cut: Cut, micro: Pass, *, splits: bool = False) -> int:
    """Of the embedding's backward: the gradient, whole and wide, and the table that it is summed into."""
    table, whole = padded_vocabulary(model, cut.tp) // cut.tp * model.hidden_size, micro.tokens * model.hidden_size
    e, w = micro.value_bytes, micro.wide_bytes
    if splits:
        return whole * e
    return whole * (e + (w if e < w else 0)) + table * (w + (e if e < w else 0))


def block_temporaries(model: GPTConfig, cut: Cut, micro: Pass, layer: int, *, splits: bool = False) -> int:
    """The most that a block's backward holds beside what blocks up to this one have kept.

    splits: weights' gradients come later, so that there are none of them, and what they read stays.
    """
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
    products = 0 if splits else e * model.hidden_size  # of a weight's gradient, for each of its rows
    down = computed + inner + ffn * products + moves
    act = computed + parts * inner + (inner if splits else 0)  # what down's product reads stays
    # Gate's and up's gradients are joined, and under sequence parallelism brought into the sequence's order once more.
    reordered = parts * inner if moves and model.is_gated_act else 0
    up = parts * inner + reordered - kept + whole + parts * ffn * products + (1 if splits else 2) * moves
    # What the MLP kept is gone when attention's turn comes; its own gradients lie on top of what it kept.
    heads = model.num_attention_heads // cut.tp
    kv_heads = model.kv_heads * sharing_ranks(model, cut.tp) // cut.tp
    q, k = (micro.tokens * count * model.dim_per_head * e for count in (heads, kv_heads))
    core = 2 * q + 2 * k
    if model.attn_implementation == "eager":
        scores = micro.batch * heads * micro.seq_len**2
        core += 2 * q + scores * (2 * w + e) + (scores * (w + e) if micro.recomputes("attention", layer) else 0)
    turned = q * (2 * w + e) // e + q + 2 * k - (2 * q + k) if model.position_embedding_type == "rope" else 0
    out = q + moves + heads * model.dim_per_head * products
    attention = max(core, turned, out) - kept - message
    attention += deferred_of_mlp(model, cut, micro) if splits else 0
    return again + gradient + max(down, act, up, attention)

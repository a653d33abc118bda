"""Bytes of activations that one rank's GPT really keeps from the forward of a micro-batch to its backward: exact.

With T = batch x seq tokens, t = T, or T/tp under sequence parallelism; h, f, q, k for hidden, ffn/tp, and the widths
of this rank's queries and keys; e bytes of a value and w = max(e, 4) of a wide one, a block keeps

| what                                                   | bytes                       | not where recomputed      |
|--------------------------------------------------------|-----------------------------|---------------------------|
| the residual stream, before each sublayer              | 2 t h e                     |                           |
| the norms' statistics and results                      | 2 t (w + h e)               | norm                      |
| q, k, v as the fused product made them (v is a view)   | T (q + 2 k) e               |                           |
| q and k, turned by their positions                     | T (q + k) e                 |                           |
| attention's values, and a number for each row's softmax| T q e + T heads w           | attention: the number     |
| up (gated: gate and up, the nonlinearity)              | T f e (3 T f e)             | mlp; the last, activation |
| what down multiplies                                   | T f e                       | mlp, activation           |

and the variants below. No mask of a dropout is kept, and nothing that is gathered for a product. Where a block is
computed again its input is all that is kept. The output layer keeps its input, the logits unless they come in chunks,
and two numbers a token. A stage of a pipeline keeps what its blocks keep, what it has of the ends, and its input.
arXiv:2205.05198, section 4, counts another block: `megalite.cost.published`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.cost.weights import Cut, padded_vocabulary, sharing_ranks, vectors_of_norm
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.part import Part


@dataclass(frozen=True)
class Pass:
    """One micro-batch of one rank, as far as it is chosen.

    batch x seq_len tokens (for the deep MLP, batch samples); value_bytes of an activation.
    recompute: none, selective (of `ops`) or full, in layers 0, every, 2 every, ...
    chunk_tokens: logits of so many tokens live at once; None = all. separate_documents: every sequence has a mask.
    on_cpu: where a norm in half precision keeps a wide copy of its input, since the CPU's kernel sums in what it reads.
    """

    batch: int
    seq_len: int
    value_bytes: int
    recompute: str = "none"
    ops: Sequence[str] = ()
    every: int = 1
    chunk_tokens: int | None = None
    separate_documents: bool = False
    on_cpu: bool = True

    @property
    def tokens(self) -> int:
        return self.batch * self.seq_len

    @property
    def wide_bytes(self) -> int:
        return max(self.value_bytes, 4)

    def recomputes(self, op: str, layer: int) -> bool:
        """Whether an op of this layer, or all of it (`block`), is computed again in backward."""
        chosen = {"none": (), "selective": tuple(self.ops) or ("attention",), "full": ("block",)}[self.recompute]
        return op in chosen and layer % self.every == 0


def kept_activations(model: GPTConfig | MLPConfig, cut: Cut, micro: Pass) -> int:
    """Of one micro-batch, in each of a rank's stages."""
    return sum(stage_activations(model, cut, micro, part) for part in cut.stages(model))


def stage_activations(model: GPTConfig | MLPConfig, cut: Cut, micro: Pass, part: Part) -> int:
    """Everything that a stage has of a micro-batch at the end of its forward and had not before, but for what it gives:
    the loss, or what goes to the next stage. What came from the stage before is held too, since it gets a gradient.
    """
    came = 0 if part.is_first else handed_on(model, cut, micro, part.layers.start)
    if isinstance(model, MLPConfig):
        return _of_mlp(model, cut, micro, part) + (came if not part.layers else 0)
    blocks = sum(block_activations(model, cut, micro, layer) for layer in part.layers)
    head = head_activations(model, cut, micro) if part.is_last else 0
    held = 0 if _keeps_input(model, cut, micro, part) else came
    return blocks + around_blocks(model, cut, micro, part) + head + held


def handed_on(model: GPTConfig | MLPConfig, cut: Cut, micro: Pass, layer: int) -> int:
    """What goes from the stage that ends before this layer to the next, and its gradient back. (The deep MLP's is cut
    over tp between a pair of layers.)"""
    tokens = micro.batch if isinstance(model, MLPConfig) else local_tokens(cut, micro)
    within_pair = isinstance(model, MLPConfig) and layer % 2
    return tokens * model.hidden_size * micro.value_bytes // (cut.tp if within_pair else 1)


def _keeps_input(model: GPTConfig, cut: Cut, micro: Pass, part: Part) -> bool:
    """Whether what a stage reads is kept for its backward."""
    norm = _Norm.of(model, micro, rows=1, features=1)
    if not part.layers:
        return part.is_first or norm.keeps_input
    first = part.layers[0]
    if micro.recomputes("block", first):
        return True
    if model.norm_placement == "post":  # read by q, k and v, gathered where ranks share key heads
        return not (cut.sequence_parallel and sharing_ranks(model, cut.tp) > 1)
    return norm.keeps_input or micro.recomputes("norm", first)


def local_tokens(cut: Cut, micro: Pass) -> int:
    """Of the residual stream on this rank."""
    return micro.tokens // (cut.tp if cut.sequence_parallel else 1)


def around_blocks(model: GPTConfig, cut: Cut, micro: Pass, part: Part) -> int:
    """What the blocks of a stage share: cos and sin of the positions; random bits of tokens, for a dropout to be drawn
    again."""
    turns = part.layers and model.position_embedding_type == "rope"
    held = micro.seq_len * model.dim_per_head * micro.wide_bytes if turns else 0
    if model.embd_pdrop and part.is_first:
        held += _dropout(local_tokens(cut, micro), model.hidden_size)
    return held + 8 * _tokens_drawn_again(model, cut, micro, part)


def _tokens_drawn_again(model: GPTConfig, cut: Cut, micro: Pass, part: Part) -> int:
    """Of how many tokens a block that is computed again holds the random bits: here, and of the whole sequence."""
    here, whole = local_tokens(cut, micro), micro.tokens
    block, core = (any(micro.recomputes(op, layer) for layer in part.layers) for op in ("block", "attention"))
    embedding = model.embd_pdrop if part.is_first else 0
    if not cut.sequence_parallel:  # both are one
        drops = embedding or model.resid_pdrop or model.attention_dropout
        return whole if drops and (block or core) else 0
    held = here if block and (embedding or model.resid_pdrop) else 0
    return held + (whole if model.attention_dropout and (block or core) else 0)


def head_activations(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """The last norm, the output layer and the loss."""
    tokens, e, w = local_tokens(cut, micro), micro.value_bytes, micro.wide_bytes
    message = tokens * model.hidden_size * e
    norm = _Norm.of(model, micro, rows=tokens, features=model.hidden_size)
    return norm.own + norm.keeps_input * message + message + logits(model, cut, micro) + 2 * micro.tokens * w


def logits(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """This rank's columns of those that are kept; in backward they become their own gradient."""
    if micro.chunk_tokens is not None:
        return 0
    return micro.tokens * padded_vocabulary(model, cut.tp) // cut.tp * micro.value_bytes


def block_activations(model: GPTConfig, cut: Cut, micro: Pass, layer: int) -> int:
    """What one block keeps."""
    tokens = local_tokens(cut, micro)
    message = tokens * model.hidden_size * micro.value_bytes
    if micro.recomputes("block", layer):
        return message
    norm = _Norm.of(model, micro, rows=tokens, features=model.hidden_size)
    pre, again = model.norm_placement == "pre", micro.recomputes("norm", layer)
    gathers = cut.sequence_parallel and sharing_ranks(model, cut.tp) > 1
    shared_input = message * cut.tp if gathers else message  # q, and k and v, read one gathered tensor
    normed = 0 if again else norm.own + norm.keeps_input * message
    if again:
        normed = message
    if pre:  # the norm's input is the residual stream, and its result what the sublayer reads
        attention_in, mlp_in = (0, 0) if again and not gathers else (shared_input, 0 if again else message)
    else:  # what a sublayer reads is the residual stream, and the norm's input what it gives
        attention_in, mlp_in = shared_input, message
    dropouts = 2 * _dropout(tokens, model.hidden_size) if model.resid_pdrop else 0
    inside = _attention(model, cut, micro, layer) + mlp_activations(model, cut, micro, layer)
    return 2 * normed + attention_in + mlp_in + dropouts + inside


@dataclass(frozen=True)
class _Norm:
    """own: bytes that a norm makes and keeps; keeps_input: whether it keeps its input as it came."""

    own: int
    keeps_input: bool

    @classmethod
    def of(cls, model: GPTConfig, micro: Pass, *, rows: int, features: int, cut: bool = False) -> _Norm:
        """cut: one over all heads, whose features are this rank's part of a sum that ranks share."""
        w = micro.wide_bytes
        if model.norm_type == "rmsnorm":
            return cls(rows * w, True)
        vectors = vectors_of_norm(model) * features * w if micro.value_bytes < w and micro.on_cpu else 0
        if cut:  # what is centred, and RMS norm's number; where it learns nothing, ones
            weight = vectors // 2 if vectors_of_norm(model) else features * w
            return cls(rows * (features + 1) * w + weight, False)
        widens = micro.value_bytes < w and micro.on_cpu
        return cls(rows * (2 + features * widens) * w + vectors, not widens)


class Heads(NamedTuple):
    """What this rank has of attention: bytes of q and of k (v has as many), and how they lie in memory."""

    q: int
    k: int
    heads: int
    q_is_apart: bool  # not a view of the product that made k and v too
    sequence_first: bool  # q's memory goes through the sequence first, as sequence parallelism has it


def heads_of(model: GPTConfig, cut: Cut, micro: Pass) -> Heads:
    heads, shared = model.num_attention_heads // cut.tp, sharing_ranks(model, cut.tp)
    kv_heads = model.kv_heads * shared // cut.tp
    q, k = (micro.tokens * count * model.dim_per_head * micro.value_bytes for count in (heads, kv_heads))
    is_copied = shared == 1 and heads > kv_heads > 1  # several queries a key, out of groups that lie apart
    normed = model.qk_norm == "head" or (
        model.qk_norm == "full" and shared == 1 and (model.norm_type == "rmsnorm" or kv_heads > 1)
    )
    cuts = cut.sequence_parallel and cut.tp > 1 and micro.batch > 1
    return Heads(q, k, heads, shared > 1 or is_copied, cuts and not is_copied and not normed)


def _attention(model: GPTConfig, cut: Cut, micro: Pass, layer: int) -> int:
    """Between its input and the residual stream."""
    e, w, shared = micro.value_bytes, micro.wide_bytes, sharing_ranks(model, cut.tp) > 1
    q, k, heads, q_is_apart, sequence_first = heads_of(model, cut, micro)
    again, eager = micro.recomputes("attention", layer), model.attn_implementation == "eager"
    reads_as_given = not eager or again  # eager attention reads copies of its own

    # What the core is given is new where something stands between; what that keeps of its own input comes on top.
    clips, normed = model.clip_qkv is not None, model.qk_norm != "none"
    new_qk = model.position_embedding_type == "rope" or normed or clips
    norm_keeps = model.qk_norm == "head" and model.norm_type == "rmsnorm"
    reads_product = clips or norm_keeps
    if eager and not new_qk and not q_is_apart and (micro.batch == 1 or heads == 1 or sequence_first):
        reads_product, q_is_view = True, True  # q needs no copy to be a stack of matrices
    else:
        q_is_view = False
    kept = q if q_is_apart and (reads_product or (reads_as_given and not new_qk)) else 0
    if reads_product or reads_as_given:
        kept += 2 * k if shared else q + 2 * k
    if clips and reads_as_given:
        kept += 2 * k + q if norm_keeps else k
    if reads_as_given and new_qk:
        kept += q + k
    kept += _head_norms(model, cut, micro) + q  # the values, joined
    if again:
        return kept
    if eager:
        return kept + _eager(model, micro, heads=heads, values=q) - (q if q_is_view else 0)
    masked = micro.separate_documents or (model.window(layer) or micro.seq_len) < micro.seq_len
    mask = masked * micro.seq_len**2 * e * (micro.batch if micro.separate_documents else 1)
    cuts = cut.sequence_parallel and cut.tp > 1 and micro.batch > 1
    copied = q if cuts and not sequence_first else 0  # to be joined in the residual stream's order
    return kept + copied + micro.tokens * heads * w + mask


def _head_norms(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """What the norms of q and k make and keep."""
    heads = model.num_attention_heads // cut.tp
    kv_heads = model.kv_heads * sharing_ranks(model, cut.tp) // cut.tp
    if model.qk_norm == "none":
        return 0
    kept, over_all = 0, model.qk_norm == "full"
    for count in (heads, kv_heads):
        rows, features = (1, count * model.dim_per_head) if over_all else (count, model.dim_per_head)
        norm = _Norm.of(model, micro, rows=micro.tokens * rows, features=features, cut=over_all)
        kept += norm.own
        if over_all and norm.keeps_input and count > 1:  # heads that lie apart are copied to be one row
            kept += micro.tokens * features * micro.value_bytes
    return kept


def _eager(model: GPTConfig, micro: Pass, *, heads: int, values: int) -> int:
    """Copies of q, and of k and v for every query head; the softmax; and what multiplies v."""
    e, w = micro.value_bytes, micro.wide_bytes
    square = micro.seq_len**2
    scores = micro.batch * heads * square
    kept = 3 * values + scores * w + square * (micro.batch if micro.separate_documents else 1)
    if e < w or model.attention_dropout:
        kept += scores * e
    if model.attention_dropout:
        kept += 8 * micro.tokens * heads + 4 * micro.seq_len
    return kept


def mlp_activations(model: GPTConfig, cut: Cut, micro: Pass, layer: int) -> int:
    """What an MLP keeps beside its input."""
    if micro.recomputes("mlp", layer):
        return 0
    ffn = micro.tokens * model.intermediate_size // cut.tp * micro.value_bytes
    parts = 2 if model.is_gated_act else 1
    if micro.recomputes("activation", layer):
        return parts * ffn
    if model.is_gated_act:
        return 4 * ffn  # gate and up; the nonlinearity; the product
    return ffn if model.hidden_act == "relu" else 2 * ffn  # relu's gradient is read from its result


def _dropout(tokens: int, channels: int) -> int:
    """64 bits a token and 32 a channel, from which the mask is drawn again."""
    return 8 * tokens + 4 * channels


def _of_mlp(model: MLPConfig, cut: Cut, micro: Pass, part: Part) -> int:
    """Each layer's product, for the nonlinearity, and its result, which the next one reads; then the errors.

    What lies between a pair of layers is cut. relu's gradient is read from its result. What came from the stage before
    is what the first layer reads.
    """
    whole, relu = micro.batch * model.hidden_size * micro.value_bytes, model.hidden_act == "relu"
    kept = whole if part.is_last else 0  # the errors
    kept += handed_on(model, cut, micro, part.layers.start) if part.layers and not part.is_first else 0
    for layer in part.layers:
        is_read = relu or layer < part.layers[-1]
        kept += ((not relu) + is_read) * (whole // cut.tp if layer % 2 == 0 else whole)
    return kept

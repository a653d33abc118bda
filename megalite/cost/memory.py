"""Bytes that one rank holds: weights, masters, gradients and moments exactly, activations by a published formula.

Stage 0 of Zero: every data rank holds all of its tensor rank's numbers. Masters are a copy in float32 where weights are
of half precision, and otherwise the weights themselves; gradients and the optimizer's moments have the masters' dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.cost.weights import Cut, numel_of, padded_vocabulary, weights_of
from megalite.models.config import GPTConfig, MLPConfig

GIB = 2**30


@dataclass(frozen=True)
class Pass:
    """What one micro-batch of one rank keeps for backward, as far as it is chosen.

    batch x seq_len tokens; value_bytes of an activation. recompute: none, selective (of `ops`) or full, in a share of
    the layers. chunk_tokens: logits of so many tokens live at once; None = all.
    """

    batch: int
    seq_len: int
    value_bytes: int
    recompute: str = "none"
    ops: Sequence[str] = ()
    recomputed_layers: int = 0
    chunk_tokens: int | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes of one rank. The first four are exact, but for some bytes of the optimizer's step counters.

    activations: an estimate, of what all layers keep for one micro-batch. logits: of the output layer.
    """

    weights: int
    masters: int
    gradients: int
    moments: int
    activations: float
    logits: float

    @property
    def held(self) -> int:
        """What is there all the time."""
        return self.weights + self.masters + self.gradients + self.moments

    @property
    def total(self) -> float:
        return self.held + self.activations + self.logits


def memory(model: GPTConfig | MLPConfig, cut: Cut, micro: Pass, *, moments: int) -> Memory:
    """moments: numbers that the optimizer keeps for each weight (AdamW 2, SGD with momentum 1)."""
    numel = numel_of(weights_of(model, cut))
    wide = max(micro.value_bytes, 4)
    masters = numel * wide if micro.value_bytes < 4 else 0
    if isinstance(model, MLPConfig):
        # What a layer was given, and its product for the nonlinearity: whole on one side, cut on the other.
        kept = 2 * model.num_hidden_layers * micro.batch * model.hidden_size * micro.value_bytes
        activations, logits = kept * (1 + 1 / cut.tp) / 2, 0.0
    else:
        activations, logits = gpt_activations(model, cut, micro), _logits(model, cut, micro)
    return Memory(numel * micro.value_bytes, masters, numel * wide, moments * numel * wide, activations, logits)


def gpt_activations(model: GPTConfig, cut: Cut, micro: Pass) -> float:
    """An estimate of what all blocks keep: Korthikanti et al., arXiv:2205.05198, sections 4.1 and 4.2, table 2.

    With s, b, h, a, t for sequence, batch, hidden size, heads, tensor ranks, a block keeps in half precision

        s b h (10 + 24/t + 5 a s / (h t))       tensor parallel; with sequence parallelism the 10 is divided too
        s b h 2                                 where it is computed again

    of which 8/t are each of the MLP's two inner tensors, 4 the norms' outputs and 5as/ht the scores of attention, which
    fused attention (sdpa) does not keep. The paper's block has an MLP of 4h, as many key as query heads, and dropout;
    the estimate is that block's, in proportion to value_bytes / 2.
    """
    tp, across = cut.tp, cut.tp if cut.sequence_parallel else 1
    message = micro.seq_len * micro.batch * model.hidden_size * micro.value_bytes / 2
    scores = 5 * model.num_attention_heads * micro.seq_len / (model.hidden_size * tp)
    scores = scores if model.attn_implementation == "eager" else 0.0
    whole = 10 / across + 24 / tp + scores
    saved = {"attention": scores, "norm": 4 / across, "activation": 8 / tp, "mlp": 16 / tp}
    if micro.recompute == "full":
        again = 2 / across
    else:
        again = whole - sum(saved[op] for op in micro.ops) if micro.recompute == "selective" else whole
    layers = model.num_hidden_layers
    kept = (layers - micro.recomputed_layers) * whole + micro.recomputed_layers * again
    if micro.recompute == "full" and micro.recomputed_layers:
        kept += whole - again  # the block that is being computed again
    return kept * message


def _logits(model: GPTConfig, cut: Cut, micro: Pass) -> float:
    """This rank's columns of them; in backward they become their own gradient."""
    tokens = micro.batch * micro.seq_len
    if micro.chunk_tokens is not None:
        tokens = min(tokens, micro.chunk_tokens)
    return tokens * padded_vocabulary(model, cut.tp) / cut.tp * micro.value_bytes

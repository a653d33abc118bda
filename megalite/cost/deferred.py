"""Bytes that a backward which is split holds from its B to its W: exact.

B hands the gradients of activations on and lets the activations go; what W still needs for the weights' gradients are
each product's input and the gradient of its output (arXiv:2401.10241). With sizes as in `megalite.cost.activations`:

| product                 | input  | output's gradient        |
|-------------------------|--------|--------------------------|
| q, k and v              | t h e  | T (q + 2 k) e            |
| what joins the heads    | T q e  | t h e                    |
| up (gated: gate and up) | t h e  | T f e (2 T f e)          |
| down                    | T f e  | t h e                    |
| the output layer        | t h e  | the logits' place        |
| the embedding           |        | t h e                    |

So a block of a GPT-2 with an MLP of 4 h holds 16 t h e, also where it is computed again and its forward kept t h e.
"""

from __future__ import annotations

import itertools

from megalite.cost.activations import Pass, handed_on, heads_of, logits
from megalite.cost.weights import Cut, padded_vocabulary, sharing_ranks
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.part import Part


def deferred_activations(model: GPTConfig | MLPConfig, cut: Cut, micro: Pass, part: Part) -> int:
    """Of one micro-batch in one stage."""
    if isinstance(model, MLPConfig):
        ends = [handed_on(model, cut, micro, layer) for layer in (*part.layers, part.layers.stop)]
        both = [into + out for into, out in itertools.pairwise(ends)]
        return sum(both) - (ends[0] if part.is_first else 0)  # the batch is there anyway
    message = handed_on(model, cut, micro, 0)
    held = sum(deferred_of_block(model, cut, micro) for _ in part.layers) + (message if part.is_first else 0)
    if part.is_last and micro.chunk_tokens is None:
        held += message + logits(model, cut, micro)
    elif part.is_last:  # the product itself: see megalite.layers.cross_entropy
        held += padded_vocabulary(model, cut.tp) // cut.tp * model.hidden_size * micro.value_bytes
    return held


def deferred_of_block(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """Of one block: of q, k and v, of what joins the heads, of up and of down."""
    message = handed_on(model, cut, micro, 0)
    gathers = cut.sequence_parallel and sharing_ranks(model, cut.tp) > 1
    heads = heads_of(model, cut, micro)
    attention = (message * cut.tp if gathers else message) + heads.q + 2 * heads.k + heads.q + message
    return attention + deferred_of_mlp(model, cut, micro)


def deferred_of_mlp(model: GPTConfig, cut: Cut, micro: Pass) -> int:
    """Of up and of down."""
    ffn = micro.tokens * model.intermediate_size // cut.tp * micro.value_bytes
    return 2 * handed_on(model, cut, micro, 0) + (3 if model.is_gated_act else 2) * ffn

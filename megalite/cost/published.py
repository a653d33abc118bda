"""Memory as two papers count it, to be set beside what `megalite.cost.memory` counts of this program.

ZeRO (arXiv:1910.02054, figure 1 and table 1) counts bytes of model state a parameter; Korthikanti et al.
(arXiv:2205.05198, section 4) activations of a transformer layer. Neither counts padding, temporaries or fragments.
"""

from __future__ import annotations

from collections.abc import Sequence

GB = 10**9


def state_bytes(
    parameters: float, *, stage: int, ranks: int, weights: float = 2, gradients: float = 2, optimizer: float = 12
) -> float:
    """Of one of `ranks` data ranks; weights, gradients, optimizer: bytes a parameter, masters among the last.

    2 + 2 + 12 are ZeRO's K = 12: fp16 weights and gradients, and masters and two moments in fp32.
    """
    shared = (optimizer, gradients, weights)[:stage]
    whole = (optimizer, gradients, weights)[stage:]
    return parameters * (sum(whole) + sum(shared) / ranks)


def largest_model(device_bytes: float, **how: float) -> float:
    """The parameters whose state fills a device. how: as for `state_bytes`."""
    return device_bytes / state_bytes(1, **how)  # type: ignore[arg-type]


def layer_activations(
    *,
    batch: int,
    seq: int,
    hidden: int,
    heads: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    ops: Sequence[str] = ("attention",),
    value_bytes: int = 2,
    fused_attention: bool = False,
) -> float:
    """What one layer keeps, arXiv:2205.05198, table 2: with s, b, h, a, t for sequence to tensor ranks, in 16 bits

        s b h (10 + 24/t + 5 a s / (h t))       tensor parallel; with sequence parallelism the 10 is divided too
        s b h 2                                 where it is computed again, and /t under sequence parallelism

    of which 8/t are each of the MLP's two inner tensors, 4 the norms' outputs and 5as/ht the scores of attention, which
    a fused kernel does not keep. The paper's layer has an MLP of 4h, as many key heads as query heads, and masks of
    dropout; other precisions are taken in proportion.
    """
    across = tp if sequence_parallel else 1
    message = seq * batch * hidden * value_bytes / 2
    if recompute == "full":
        return message * 2 / across
    scores = 0.0 if fused_attention else 5 * heads * seq / (hidden * tp)
    left_out = {"attention": scores, "norm": 4 / across, "activation": 8 / tp, "mlp": 16 / tp}
    saved = sum(left_out[op] for op in ops) if recompute == "selective" else 0.0
    return message * (10 / across + 24 / tp + scores - saved)

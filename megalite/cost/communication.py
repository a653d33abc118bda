"""Bytes that one rank sends in one training step, axis by axis: the ideal of each collective, as a ring would send it.

With n ranks and b bytes of the full tensor an all-reduce sends 2 (n-1)/n b, an all-gather and a reduce-scatter
(n-1)/n b each. With T tokens in a micro-batch, h the hidden size, e bytes a value, a "message" is T h e bytes:

| what                  | tensor parallel             | with sequence parallelism               |
|-----------------------|-----------------------------|-----------------------------------------|
| embedding             | forward: all-reduce         | forward reduce-scatter, backward gather |
| linears of a sublayer | all-reduce each way         | 2 gathers + 1 reduce-scatter to enter,  |
|                       |                             | 1 reduce-scatter + 1 gather to leave    |
| output layer          | backward: all-reduce        | 2 gathers, 1 reduce-scatter             |
| loss                  | gather of 3 numbers a token | the same                                |

(arXiv:1909.08053, section 3, and arXiv:2205.05198, section 4.2.2; that the input is gathered again in backward is the
price for not storing it whole.) A block that is computed again sends its forward's share again. Data ranks all-reduce
every gradient once a step; gradients that are summands are all-reduced over tensor ranks, once a step.

Exact for a training step. Left out: what evaluation sends, the comparison of gradients in the first step (8 doubles a
parameter), and the look at all ranks' times (16 bytes a rank, every log.ranks_every steps).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.cost.weights import Cut, numel_of, sharing_ranks, weights_of
from megalite.models.config import GPTConfig, MLPConfig


class Traffic(NamedTuple):
    """What one rank sends in a step: over which axis, for what, how many bytes."""

    axis: str
    what: str
    bytes: float


@dataclass(frozen=True)
class Step:
    """One training step of one data rank.

    tokens: of a micro-batch on this rank (batch x seq_len; for the deep MLP, samples). value_bytes: of a weight and an
    activation. recomputed: blocks whose forward runs again in backward; recomputed_mlps: of which only the MLP does.
    """

    microbatches: int
    tokens: int
    value_bytes: int
    label_smoothing: bool = False
    recomputed: int = 0
    recomputed_mlps: int = 0

    @property
    def wide_bytes(self) -> int:
        """Of a value in at least float32: statistics, masters, gradients."""
        return max(self.value_bytes, 4)


def all_reduce(full_bytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) * full_bytes / ranks


def gather(full_bytes: float, ranks: int) -> float:
    """Also of a reduce-scatter, which is its transpose."""
    return (ranks - 1) * full_bytes / ranks


def traffic(model: GPTConfig | MLPConfig, cut: Cut, step: Step, *, data_ranks: int, world: int) -> list[Traffic]:
    """Everything that is sent, in rows that add up; rows of 0 bytes are left out."""
    of_tp = _of_mlp(model, cut, step) if isinstance(model, MLPConfig) else _of_gpt(model, cut, step)
    rows = [Traffic(row.axis, row.what, row.bytes * step.microbatches) for row in of_tp]
    weights = weights_of(model, cut)
    rows.append(Traffic("dp", "gradients", all_reduce(numel_of(weights) * step.wide_bytes, data_ranks)))
    rows.append(Traffic("dp", "count and loss", all_reduce(2 * 8, data_ranks)))
    for weight in weights:
        sent = all_reduce(weight.numel * weight.count * step.wide_bytes, weight.summand)
        rows.append(Traffic("tp", "gradients that are summands", sent))
    rows.append(Traffic("world", "norm", all_reduce(3 * 8, world)))
    return [row for row in rows if row.bytes]


def by_axis(rows: Sequence[Traffic]) -> dict[str, float]:
    """Axis -> bytes that a rank sends in a step."""
    sums: dict[str, float] = {}
    for row in rows:
        sums[row.axis] = sums.get(row.axis, 0.0) + row.bytes
    return sums


def _of_gpt(model: GPTConfig, cut: Cut, step: Step) -> Iterator[Traffic]:
    """Over tp, in one micro-batch."""
    tp, sp = cut.tp, cut.sequence_parallel
    message = step.tokens * model.hidden_size * step.value_bytes
    reduced, gathered = all_reduce(message, tp), gather(message, tp)
    layers, again, mlps_again = model.num_hidden_layers, step.recomputed, step.recomputed_mlps

    yield Traffic("tp", "embedding", 2 * gathered if sp else reduced)
    forward = 2 * gathered if sp else reduced  # of one sublayer
    backward = 3 * gathered if sp else reduced
    # Where ranks share key and value heads, q and k, v enter together, and what was gathered is stored.
    attention_backward = 2 * gathered if sp and sharing_ranks(model, tp) > 1 else backward
    attention = layers * (forward + attention_backward) + again * forward
    yield Traffic("tp", "attention", attention)
    if model.qk_norm == "full":
        yield Traffic("tp", "norms of q and k", (2 * layers + again) * _of_cut_norms(model, cut, step))
    yield Traffic("tp", "mlp", layers * (forward + backward) + (again + mlps_again) * forward)
    yield Traffic("tp", "output layer", 3 * gathered if sp else reduced)
    statistics = (4 if step.label_smoothing else 3) * step.tokens * step.wide_bytes
    yield Traffic("tp", "loss", gather(tp * statistics, tp))


def _of_cut_norms(model: GPTConfig, cut: Cut, step: Step) -> float:
    """Those of one block, one way: a sum a token over all of q's features, and k's; of a layer norm, two."""
    sums = 1 if model.norm_type == "rmsnorm" else 2
    each = sums * step.tokens * step.wide_bytes
    return all_reduce(each, cut.tp) + all_reduce(each, cut.tp // sharing_ranks(model, cut.tp))


def _of_mlp(model: MLPConfig, cut: Cut, step: Step) -> Iterator[Traffic]:
    """Over tp, in one micro-batch: an all-reduce for each pair forward, and for each but the first backward."""
    message = step.tokens * model.hidden_size * step.value_bytes
    layers = model.num_hidden_layers
    yield Traffic("tp", "layers", (layers // 2 + (layers + 1) // 2 - 1) * all_reduce(message, cut.tp))
    if layers % 2:
        yield Traffic("tp", "outputs", gather(message, cut.tp))

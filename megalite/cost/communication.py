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
price for not storing it whole.) A block that is computed again sends its forward's share again.

Over data ranks, with m micro-batches and in units of (n-1)/n of a Zero unit's gradients or weights:

| stage | gradients | weights                                                                                          |
|-------|-----------|--------------------------------------------------------------------------------------------------|
| 0     | 2         | 0                                                                                                |
| 1     | 1         | 1: gathered after the update                                                                     |
| 2     | m         | 1                                                                                                |
| 3     | m         | 2m: for forward and for backward; m of the last unit of forward, which stays whole, and of an    |
|       |           | untied embedding and positions, whose backward reads no weight; of all with                      |
|       |           | reshard_after_forward=false m, with reshard=step 1                                               |

(arXiv:1910.02054, section 7.) Where only some of the data ranks share, each rank's share of the gradients is
all-reduced over the others once a step. Gradients that are summands are all-reduced over tensor ranks once a step, a
share each.

Exact for a training step after the first. Left out: what evaluation sends, what the first step compares and learns,
the look at all ranks' times (16 bytes a rank, every log.ranks_every steps), and what muon and adafactor gather.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.cost.memory import Sharing
from megalite.cost.weights import Cut, UnitSize, sharing_ranks, units_of
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
    activation; gradient_bytes: of a gradient that is summed over ranks. recomputed: blocks whose forward runs again in
    backward; recomputed_mlps: of which only the MLP does.
    """

    microbatches: int
    tokens: int
    value_bytes: int
    gradient_bytes: int
    label_smoothing: bool = False
    recomputed: int = 0
    recomputed_mlps: int = 0

    @property
    def wide_bytes(self) -> int:
        """Of a value in at least float32: statistics."""
        return max(self.value_bytes, 4)


def all_reduce(full_bytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) * full_bytes / ranks


def gather(full_bytes: float, ranks: int) -> float:
    """Also of a reduce-scatter, which is its transpose."""
    return (ranks - 1) * full_bytes / ranks


def traffic(model: GPTConfig | MLPConfig, cut: Cut, step: Step, *, sharing: Sharing, world: int) -> list[Traffic]:
    """Everything that is sent, in rows that add up; rows of 0 bytes are left out."""
    of_tp = _of_mlp(model, cut, step) if isinstance(model, MLPConfig) else _of_gpt(model, cut, step)
    rows = [Traffic(row.axis, row.what, row.bytes * step.microbatches) for row in of_tp]
    rows += _of_zero(model, cut, step, sharing)
    rows.append(Traffic("dp", "count and loss", all_reduce(2 * 8, sharing.data_ranks)))
    rows.append(Traffic("world", "norm", all_reduce(4 * 8, world)))
    return [row for row in rows if row.bytes]


def _of_zero(model: GPTConfig | MLPConfig, cut: Cut, step: Step, sharing: Sharing) -> Iterator[Traffic]:
    """Over the data axis, then over tp, in one step."""
    m, stage, ranks = step.microbatches, sharing.stage, sharing.shards
    units = units_of(model, cut)
    for unit in units:
        share, padded = sharing.share(unit.numel), sharing.padded(unit.numel)
        gradients = (m if stage >= 2 else 1) * gather(padded * step.gradient_bytes, ranks)
        gradients += all_reduce(share * step.gradient_bytes, sharing.replicas)
        yield Traffic("dp", "gradients", unit.count * gradients)
        gathers = [_gathers(model, unit, m, sharing, is_last=unit is units[-1] and place == unit.count - 1)
                   for place in range(unit.count)]  # fmt: skip
        yield Traffic("dp", "weights", sum(gathers) * gather(padded * step.value_bytes, ranks))
        mine = range(sharing.rank * share, (sharing.rank + 1) * share)
        for summed_over, start, stop in unit.summands:
            numel = max(min(stop, mine.stop) - max(start, mine.start), 0)
            sent = unit.count * all_reduce(numel * step.gradient_bytes, summed_over)
            yield Traffic("tp", "gradients that are summands", sent)


def _gathers(model: GPTConfig | MLPConfig, unit: UnitSize, m: int, sharing: Sharing, *, is_last: bool) -> int:
    """How often a unit's weights are gathered in a step."""
    if sharing.stage < 3 or sharing.reshard == "step":
        return 1
    if sharing.reshard == "backward":
        return m
    tied = isinstance(model, GPTConfig) and model.tie_word_embeddings
    stays = is_last and not tied  # a tied weight comes last of all, and twice
    reads_no_weight = unit.name == "positions" or (unit.name == "embedding" and not tied)
    return m if stays or reads_no_weight else 2 * m


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

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
price for not storing it whole.) A block that is computed again sends its forward's share again; one whose backward is
split gathers the gradients of what leaves its sublayers in B and again in W.

Over data ranks, with m micro-batches and in units of (n-1)/n of a Zero unit's gradients or weights:

| stage | gradients | weights                                                                                          |
|-------|-----------|--------------------------------------------------------------------------------------------------|
| 0     | 2         | 0                                                                                                |
| 1     | 1         | 1: gathered after the update                                                                     |
| 2     | m         | 1                                                                                                |
| 3     | m         | 2m: for forward and for backward; m of an embedding and positions, whose backward reads no       |
|       |           | weight; less of a stage's last unit, which stays whole into a backward that follows at once, m   |
|       |           | if all do. With reshard_after_forward=false m of all where they do, with reshard=step 1          |

(arXiv:1910.02054, section 7.) Where only some of the data ranks share, each rank's share of the gradients is
all-reduced over the others once a step. Gradients that are summands are all-reduced over tensor ranks once a step, a
share each.

Over ranks of the pipeline, for every boundary between stages of two ranks and every micro-batch, a message goes forward
and one comes back: T h e, T/tp h e with sequence parallelism. A tied weight that lies on two ranks is a summand over
them. And the loss is summed over all.

Exact for a training step after the first. Left out: what evaluation sends, what the first step compares and learns,
the look at all ranks' times (16 bytes a rank, every log.ranks_every steps), and what muon and adafactor gather.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megalite.cost.activations import Pass, handed_on
from megalite.cost.memory import Sharing
from megalite.cost.weights import Cut, sharing_ranks, units_of, used_units
from megalite.models.config import GPTConfig, MLPConfig
from megalite.pipeline.schedule import Row


class Traffic(NamedTuple):
    """What one rank sends in a step: over which axis, for what, how many bytes."""

    axis: str
    what: str
    bytes: float


@dataclass(frozen=True)
class Step:
    """One training step of one rank.

    row: what it does, in order. tokens: of a micro-batch (batch x seq_len; for the deep MLP, samples). value_bytes: of
    a weight and an activation; gradient_bytes: of a gradient that is summed over ranks. recomputed: blocks of this rank
    whose forward runs again in backward; recomputed_mlps: of which only the MLP does.
    """

    row: Row
    tokens: int
    value_bytes: int
    gradient_bytes: int
    label_smoothing: bool = False
    recomputed: int = 0
    recomputed_mlps: int = 0

    @property
    def microbatches(self) -> int:
        return len({action.microbatch for action in self.row})

    @property
    def wide_bytes(self) -> int:
        """Of a value in at least float32: statistics."""
        return max(self.value_bytes, 4)


def all_reduce(full_bytes: float, ranks: int) -> float:
    return 2 * (ranks - 1) * full_bytes / ranks


def gather(full_bytes: float, ranks: int) -> float:
    """Also of a reduce-scatter, which is its transpose."""
    return (ranks - 1) * full_bytes / ranks


def traffic(
    model: GPTConfig | MLPConfig, cut: Cut, step: Step, *, sharing: Sharing, world: int, pp: int = 1
) -> list[Traffic]:
    """Everything that is sent, in rows that add up; rows of 0 bytes are left out. pp: ranks of the pipeline."""
    of_tp = _of_mlp(model, cut, step) if isinstance(model, MLPConfig) else _of_gpt(model, cut, step)
    rows = [Traffic(row.axis, row.what, row.bytes * step.microbatches) for row in (*of_tp, *_of_pp(model, cut, step))]
    rows += _of_splitting(model, cut, step)
    rows += _of_zero(model, cut, step, sharing)
    rows.append(Traffic("dp", "count and loss", all_reduce(2 * 8, sharing.data_ranks)))
    rows.append(Traffic("pp", "loss", all_reduce(8, pp)))
    rows.append(Traffic("world", "norm", all_reduce(4 * 8, world)))
    return [row for row in rows if row.bytes]


def _of_pp(model: GPTConfig | MLPConfig, cut: Cut, step: Step) -> Iterator[Traffic]:
    """To the ranks of the stages before and after, in one micro-batch. Neighbouring stages of one rank send nothing."""
    parts = cut.stages(model)
    starts, stops = {part.layers.start for part in parts}, {part.layers.stop for part in parts}
    for part in parts:
        if not part.is_last and part.layers.stop not in starts - {part.layers.start}:
            yield Traffic("pp", "activations", _handed_on(model, cut, step, part.layers.stop))
        if not part.is_first and part.layers.start not in stops - {part.layers.stop}:
            yield Traffic("pp", "gradients of activations", _handed_on(model, cut, step, part.layers.start))


def _handed_on(model: GPTConfig | MLPConfig, cut: Cut, step: Step, layer: int) -> int:
    return handed_on(model, cut, Pass(step.tokens, 1, step.value_bytes), layer)


def _of_zero(model: GPTConfig | MLPConfig, cut: Cut, step: Step, sharing: Sharing) -> Iterator[Traffic]:
    """Over the data axis, then over those of summands, in one step."""
    m, stage, ranks = step.microbatches, sharing.stage, sharing.shards
    gathers = iter(_gathers(model, cut, step.row, sharing))
    for unit in units_of(model, cut):
        share, padded = sharing.share(unit.numel), sharing.padded(unit.numel)
        gradients = (m if stage >= 2 else 1) * gather(padded * step.gradient_bytes, ranks)
        gradients += all_reduce(share * step.gradient_bytes, sharing.replicas)
        yield Traffic("dp", "gradients", unit.count * gradients)
        times = sum(itertools.islice(gathers, unit.count))
        yield Traffic("dp", "weights", times * gather(padded * step.value_bytes, ranks))
        mine = range(sharing.rank * share, (sharing.rank + 1) * share)
        for axis, summed_over, start, stop in unit.summands:
            numel = max(min(stop, mine.stop) - max(start, mine.start), 0)
            sent = unit.count * all_reduce(numel * step.gradient_bytes, summed_over)
            yield Traffic(axis, "gradients that are summands", sent)


def _gathers(model: GPTConfig | MLPConfig, cut: Cut, row: Row, sharing: Sharing) -> list[int]:
    """How often each unit's weights are gathered in a step, of all units one after the other.

    As `megalite.zero.gathering` has it: `prefetch` units are fetched ahead, also for the next pass; with what is then
    needed, that is all that stays whole (with reshard_after_forward=false forward gives nothing back). W reads none.
    """
    names = [unit.name for unit in units_of(model, cut) for _ in range(unit.count)]
    if sharing.stage < 3 or sharing.reshard == "step":
        return [1] * len(names)
    numbers = sorted({action.stage for action in row})
    of_stage = dict(zip(numbers, zip(cut.stages(model), used_units(model, cut), strict=True), strict=True))

    def entered(kind: str, stage: int) -> list[int]:
        part, places = of_stage[stage]
        lookups = sum(names[place] in ("embedding", "positions") for place in places[:2]) if part.is_first else 0
        return places if kind == "F" else places[lookups:][::-1]

    passes = [entered(action.kind, action.stage) for action in row if action.kind != "W"]
    number, times, whole, ahead = 0, [0] * len(names), set[int](), set[int]()
    for kind, _, _ in row:
        if kind != "W":
            mine, following = passes[number], passes[number + 1] if number + 1 < len(passes) else []
            number += 1
            for index, unit in enumerate(mine):
                rest = mine[index + 1 :]
                ahead = {*[*rest, *(one for one in following if one != unit)][: sharing.prefetch]}
                needed = ahead | {unit}
                for place in needed - whole:
                    times[place] += 1
                whole = needed if sharing.reshard == "forward" else whole | needed
                ahead = needed if not rest and following[:1] == [unit] else ahead
                whole = whole if kind == "F" else whole - ({unit} - ahead)
        whole = whole if kind == "F" else whole & ahead
    return times


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
    layers, again, mlps_again = len(cut.layers(model)), step.recomputed, step.recomputed_mlps

    if cut.has_first(model):
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
    if cut.has_last(model):
        yield Traffic("tp", "output layer", 3 * gathered if sp else reduced)
        statistics = (4 if step.label_smoothing else 3) * step.tokens * step.wide_bytes
        yield Traffic("tp", "loss", gather(tp * statistics, tp))


def _of_splitting(model: GPTConfig | MLPConfig, cut: Cut, step: Step) -> Iterator[Traffic]:
    """Over tp, in one step: gradients that came in parts, and were gathered in B, are gathered again in W."""
    if isinstance(model, MLPConfig) or not cut.sequence_parallel:
        return
    message = step.tokens * model.hidden_size * step.value_bytes
    numbers = sorted({action.stage for action in step.row})
    layers = {stage: len(part.layers) for stage, part in zip(numbers, cut.stages(model), strict=True)}
    split = sum(layers[action.stage] for action in step.row if action.kind == "W")
    yield Traffic("tp", "gradients again in W", 2 * split * gather(message, cut.tp))


def _of_cut_norms(model: GPTConfig, cut: Cut, step: Step) -> float:
    """Those of one block, one way: a sum a token over all of q's features, and k's; of a layer norm, two."""
    sums = 1 if model.norm_type == "rmsnorm" else 2
    each = sums * step.tokens * step.wide_bytes
    return all_reduce(each, cut.tp) + all_reduce(each, cut.tp // sharing_ranks(model, cut.tp))


def _of_mlp(model: MLPConfig, cut: Cut, step: Step) -> Iterator[Traffic]:
    """Over tp, in one micro-batch: an all-reduce for each pair forward, and for each but the first backward."""
    message = step.tokens * model.hidden_size * step.value_bytes
    # Forward a row-parallel layer sums; backward a column-parallel one, unless its input is the batch.
    sums = sum(layer > 0 for layer in cut.layers(model))
    yield Traffic("tp", "layers", sums * all_reduce(message, cut.tp))
    if model.num_hidden_layers % 2 and cut.has_last(model):
        yield Traffic("tp", "outputs", gather(message, cut.tp))

"""How a run's steps are made: spans of steps with one sequence length, one batch and one set of sources each.

A ramp or a phase of the data changes a few numbers at a step that the configuration names, so which samples a step
reads stays a pure function of the step: nothing is counted while training, and a resumed run needs no other state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from megalite.models.config import GPTConfig
from megalite.train.config import Config, PhaseConfig

RAMPED = ("seq_len", "global_batch_size")
"""Keys of the configuration that a key `<name>_ramp` changes from step to step."""

MICROBATCHES_A_RANK = 4
"""Micro-batches for each rank of a pipeline where micro_batch_size is null: 1F1B's bubble is then below a fifth."""


@dataclass(frozen=True)
class Span:
    """Steps first_step to last_step, both included.

    first_sample: how many samples the steps before have read. paths, weights: as data.paths and data.weights.
    """

    first_step: int
    last_step: int
    first_sample: int
    seq_len: int
    global_batch_size: int
    paths: tuple[str, ...]
    weights: tuple[float, ...] | None
    has_sequences: bool = True

    def samples_consumed(self, step: int) -> int:
        """How many samples all steps before this one have read."""
        return self.first_sample + (step - self.first_step) * self.global_batch_size

    @property
    def tokens_per_step(self) -> int:
        """Tokens in a step over all ranks; for a model without sequences, samples."""
        return self.global_batch_size * (self.seq_len if self.has_sequences else 1)


def spans_of(config: Config) -> tuple[Span, ...]:
    """The spans of a run, in order; they cover steps 1 to config.steps once each."""
    values = {name: _from_steps(getattr(config, name), getattr(config, f"{name}_ramp")) for name in RAMPED}
    phases = [PhaseConfig(1, config.data.paths, config.data.weights), *config.data.phases]
    starts = {phase.from_step for phase in phases}.union(*(by_step for by_step in values.values()))
    spans: list[Span] = []
    consumed = 0
    for first, after in _pairs(sorted(start for start in starts if start <= config.steps), config.steps + 1):
        phase = max((phase for phase in phases if phase.from_step <= first), key=lambda phase: phase.from_step)
        span = Span(
            first,
            after - 1,
            consumed,
            **{name: by_step[max(step for step in by_step if step <= first)] for name, by_step in values.items()},
            paths=tuple(phase.paths),
            weights=None if phase.weights is None else tuple(phase.weights),
            has_sequences=isinstance(config.model, GPTConfig),
        )
        consumed = span.samples_consumed(after)
        spans.append(span)
    return tuple(spans)


def micro_batch(config: Config, batch: int) -> int:
    """Samples in one pass of one rank, of a global batch; null resolved. config: as `check` gives it."""
    assert config.layout.dp is not None, "check() fills it in"
    share = batch // config.layout.dp
    if config.micro_batch_size is not None or config.layout.pp == 1:
        return config.micro_batch_size or share
    wanted = MICROBATCHES_A_RANK * config.layout.pp
    return share // next(count for count in range(min(wanted, share), share + 1) if share % count == 0)


def microbatches(config: Config, span: Span) -> int:
    """How many passes a rank makes in a step of this span."""
    assert config.layout.dp is not None, "check() fills it in"
    return span.global_batch_size // (config.layout.dp * micro_batch(config, span.global_batch_size))


def span_at(spans: Sequence[Span], step: int) -> Span:
    """The span that a step, from 1, lies in; the last one's rule holds on after its end."""
    return spans[bisect_right([span.first_step for span in spans], step) - 1]


def _from_steps(start: int, ramp: Sequence[Sequence[int]]) -> dict[int, int]:
    return {1: start, **{step: value for step, value in ramp}}


def _pairs(starts: Sequence[int], end: int) -> list[tuple[int, int]]:
    return list(zip(starts, [*starts[1:], end], strict=True))

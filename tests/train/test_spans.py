"""Which steps of a run are alike: every step lies in one span, and samples are counted without a gap."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.models.config import MLPConfig
from megalite.train.config import Config, DataConfig, PhaseConfig
from megalite.train.spans import span_at, spans_of

RAMPED = replace(
    Config(),
    steps=40,
    seq_len=16,
    seq_len_ramp=[[10, 32], [30, 64]],
    global_batch_size=4,
    global_batch_size_ramp=[[20, 8], [30, 16]],
    data=DataConfig(paths=["a"], phases=[PhaseConfig(25, ["a", "b"], [1.0, 3.0]), PhaseConfig(41, ["c"])]),
)


def test_without_ramps_and_phases_a_run_is_one_span():
    (span,) = spans_of(Config())
    assert (span.first_step, span.last_step, span.first_sample) == (1, Config().steps, 0)
    assert (span.seq_len, span.global_batch_size) == (Config().seq_len, Config().global_batch_size)


def test_a_span_begins_where_a_ramp_or_a_phase_does_and_holds_until_the_next():
    found = [(s.first_step, s.last_step, s.seq_len, s.global_batch_size, s.paths, s.weights) for s in spans_of(RAMPED)]
    assert found == [
        (1, 9, 16, 4, ("a",), None),
        (10, 19, 32, 4, ("a",), None),
        (20, 24, 32, 8, ("a",), None),
        (25, 29, 32, 8, ("a", "b"), (1.0, 3.0)),
        (30, 40, 64, 16, ("a", "b"), (1.0, 3.0)),
    ]


def test_samples_are_consumed_without_a_gap_over_all_spans():
    spans = spans_of(RAMPED)
    consumed = 0
    for step in range(1, RAMPED.steps + 1):
        span = span_at(spans, step)
        assert span.first_step <= step <= span.last_step
        assert span.samples_consumed(step) == consumed
        consumed += span.global_batch_size
    assert consumed == 4 * 19 + 8 * 10 + 16 * 11


def test_what_comes_after_a_step_does_not_change_the_steps_before():
    """A phase or a step of a ramp may be added to a run that has come so far."""
    shorter = replace(RAMPED, seq_len_ramp=[[10, 32]], global_batch_size_ramp=[[20, 8]], data=DataConfig(paths=["a"]))
    for step in range(1, 25):
        ours, theirs = span_at(spans_of(RAMPED), step), span_at(spans_of(shorter), step)
        assert replace(ours, last_step=0) == replace(theirs, last_step=0)


@pytest.mark.parametrize(("model", "tokens"), [(Config().model, 16 * 4), (MLPConfig(), 4)])
def test_tokens_of_a_step_are_those_of_its_sequences_or_its_samples(model, tokens):
    assert spans_of(replace(RAMPED, model=model))[0].tokens_per_step == tokens

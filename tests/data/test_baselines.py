"""The baselines against counting by hand."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from megalite.data import baselines as module
from megalite.data.baselines import MOST_TOKENS, baselines_of
from megalite.data.source import Source, Windows
from megalite.data.split import CHUNK, Part


def source(chunks: int, *, vocab_size: int, dtype=np.uint16, seed: int = 0) -> Source:
    """Tokens of which each depends on the last one: the last plus a small step."""
    steps = np.random.default_rng(seed).integers(0, 5, chunks * CHUNK + 123)
    return Source("walk", (np.cumsum(steps) % vocab_size).astype(dtype), vocab_size=vocab_size)


def both(sources: list[Source]) -> tuple[list[Windows], list[Windows]]:
    """The training and the validation windows of 64."""
    training, validation = ([one.windows(64, part) for one in sources] for part in Part)
    return training, validation


def by_hand(sources: list[Source], vocab_size: int) -> tuple[float, float]:
    """Unigram and bigram cross-entropy in nats, with dictionaries."""
    pairs = {part: Counter() for part in Part}
    for windows in both(sources)[0] + both(sources)[1]:
        for row in windows.read(np.arange(len(windows))).tolist():
            pairs[windows.part].update(pairwise(row))
    before, after = Counter(), Counter()
    for (a, b), count in pairs[Part.TRAIN].items():
        before[a] += count
        after[b] += count
    seen, total = pairs[Part.TRAIN], pairs[Part.TRAIN].total()
    scored = pairs[Part.VALIDATION]
    unigram = -sum(n * math.log((after[b] + 1) / (total + vocab_size)) for (_, b), n in scored.items())
    bigram = -sum(n * math.log((seen[a, b] + 1) / (before[a] + vocab_size)) for (a, b), n in scored.items())
    return unigram / scored.total(), bigram / scored.total()


@pytest.mark.parametrize("vocab_size", [16, 256, 700])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_baselines_equal_counting_by_hand_whatever_the_block(vocab_size, block, monkeypatch):
    monkeypatch.setattr(module, "BLOCK_TOKENS", block)
    sources = [source(5, vocab_size=vocab_size), source(23, vocab_size=vocab_size, seed=1)]
    floor = baselines_of(*both(sources))
    # Sums of at most 1e6 terms in another order: rounding stays far below 1e-10.
    assert (floor.unigram_nats, floor.bigram_nats) == pytest.approx(by_hand(sources, vocab_size), rel=1e-10)


def test_a_walk_of_five_steps_has_a_bigram_of_log_five():
    """The next token is one of five, equally likely; its own distribution is uniform over the vocabulary."""
    floor = baselines_of(*both([source(100, vocab_size=256, dtype=np.uint8)]))
    assert floor.unigram_nats == pytest.approx(math.log(256), abs=0.01)
    assert floor.bigram_nats == pytest.approx(math.log(5), abs=0.2)  # add-one on 1500 counts a row costs 0.15


def test_no_pair_joins_two_runs():
    """Each run is one token repeated, and no two neighbouring runs have the same: a pair over a border would be one of
    two different tokens, and there is none."""
    tokens = np.repeat(np.arange(40, dtype=np.uint8), CHUNK)
    tokens = np.where(np.arange(40).repeat(CHUNK) % 20 == 19, 7, 5).astype(np.uint8)
    floor = baselines_of(*both([Source("runs", tokens, vocab_size=16)]))
    assert floor.bigram_nats == pytest.approx(
        math.log(16), rel=1e-12
    )  # 7 was never seen before anything: add-one alone


def test_a_vocabulary_too_large_for_a_table_of_pairs_has_a_unigram_alone():
    sources = [source(5, vocab_size=5000)]
    floor = baselines_of(*both(sources))
    assert floor.bigram_nats is None
    assert floor.unigram_nats == pytest.approx(by_hand(sources, 5000)[0], rel=1e-10)


def test_of_a_long_source_a_part_is_counted_and_says_nearly_the_same():
    one = source(400, vocab_size=64)
    whole, part = (baselines_of(*both([one]), most_tokens=most) for most in (1 << 26, 100 * CHUNK))
    assert part != whole
    assert part.bigram_nats == pytest.approx(whole.bigram_nats, rel=0.02)  # a quarter of the counts


def test_however_many_tokens_and_sources_there_are_no_more_are_read_than_asked_for(monkeypatch):
    """So the start of a run takes as long for a terabyte as for 16 million tokens."""
    read = []
    labelled = Windows.labelled
    monkeypatch.setattr(
        Windows, "labelled", lambda self, which, **kind: read.append(which.size) or labelled(self, which, **kind)
    )
    baselines_of(*both([source(40, vocab_size=64, seed=seed) for seed in range(5)]), most_tokens=40_000)
    assert 0.3 * 40_000 < 64 * sum(read) <= 40_000
    assert MOST_TOKENS == 1 << 24


def test_a_vocabulary_of_200000_is_counted_right():
    one = source(6, vocab_size=200_000, dtype=np.int32)
    assert baselines_of(*both([one])).unigram_nats == pytest.approx(by_hand([one], 200_000)[0], rel=1e-10)


def test_labels_out_of_the_loss_are_out_of_the_baselines():
    tokens = np.tile(np.array([1, 2, 3, 9], dtype=np.uint8), 10 * CHUNK)
    masked = Source("a", tokens, vocab_size=16, mask=(tokens != 9).astype(np.uint8))
    floor = baselines_of(*both([masked]))
    # three equally likely tokens, certain given the one before: what add-one leaves of 16 is below a thousandth
    assert floor.unigram_nats == pytest.approx(math.log(3), abs=1e-2)
    assert floor.bigram_nats == pytest.approx(0, abs=1e-2)


def test_without_validation_there_is_nothing_to_score():
    training, _ = both([source(5, vocab_size=16)])
    assert baselines_of(training, []) is None

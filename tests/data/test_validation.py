"""Validation windows: each counted once, in equal shapes on every rank, with the bytes that they stand for."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data.samples import shard
from megalite.data.source import IGNORED, Source
from megalite.data.split import CHUNK, Part
from megalite.data.validation import Validation, validation_steps

LAYOUTS = [(1, 12), (1, 4), (2, 6), (2, 2), (4, 3), (4, 1), (3, 4), (12, 1)]  # (dp, micro) of a batch of 12


def source(tokens: int, **facts) -> Source:
    row = np.random.default_rng(tokens).integers(0, 50_000, tokens).astype(np.uint16)
    return Source("a", row, vocab_size=50_000, **facts)


def whole(one: Source, seq_len: int):
    """All of a source, as data.validation_paths is read."""
    return one.windows(seq_len, Part.TRAIN, period=0)


@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
def test_validation_reads_each_window_once_in_equal_shapes_on_every_rank(dp, micro):
    windows = [source(chunks * CHUNK).windows(500, Part.VALIDATION) for chunks in (2, 61)]
    validation = Validation(windows)
    expected = np.concatenate([one.read(np.arange(len(one))) for one in windows])
    count = len(validation)
    assert count == len(expected) and count % 12  # there are absent rows
    present = {}
    for step in range(validation_steps(count, global_batch_size=12)):
        for rank in range(dp):
            numbers = shard(12 * step, global_batch_size=12, micro_batch_size=micro, dp_size=dp, dp_rank=rank)
            for indices in numbers:
                batch = validation.read(indices)
                assert batch.tokens.shape == batch.labels.shape == (micro, 500)
                for tokens, labels, number in zip(*batch[:3], strict=True):
                    if number < 0:
                        assert (tokens == 0).all() and (labels == IGNORED).all()
                    else:
                        assert number not in present
                        present[int(number)] = [*tokens.tolist(), int(labels[-1])]
                        assert np.array_equal(tokens[1:], labels[:-1])
    assert [present[i] for i in range(count)] == expected.tolist()


@pytest.mark.parametrize(("count", "batch", "steps"), [(5, 4, 2), (8, 4, 2), (1, 4, 1), (0, 4, 0)])
def test_validation_takes_as_many_steps_as_hold_all_windows(count, batch, steps):
    assert validation_steps(count, global_batch_size=batch) == steps


@pytest.mark.parametrize("windows", [1, 5])
def test_a_source_read_whole_gives_every_token_but_its_first_as_a_label_once(windows):
    one = source(16 * windows + 1)
    batch = Validation([whole(one, 16)]).read(np.arange(windows + 2))
    assert batch.labels[:windows].ravel().tolist() == one.tokens[1:].tolist()
    assert (batch.labels[windows:] == IGNORED).all() and batch.sample_ids[windows:].tolist() == [-1, -1]


def test_tokens_and_labels_share_no_memory():
    batch = Validation([whole(source(100), 16)]).read(np.array([0]))
    assert not np.shares_memory(batch.tokens, batch.labels)


def test_label_bytes_are_those_of_the_labels_that_count_by_table_or_by_mean():
    lengths = np.arange(50_000, dtype=np.int32) % 7
    mask = (np.arange(101) % 3 > 0).astype(np.uint8)
    table, mean = source(101, token_bytes=lengths, mask=mask), source(100, mean_bytes=4.5)
    validation = Validation([whole(table, 10), whole(mean, 10)])
    batch = validation.read(np.arange(len(validation) + 3))  # the last three are absent: no bytes
    by_hand = lengths[table.tokens[1:]][mask[1:] == 1].sum() + 90 * 4.5
    assert batch.label_bytes == by_hand


def test_bytes_are_unknown_on_all_ranks_where_any_source_does_not_know_them():
    """A rank that reads only the other one must not wait for a sum that no one else makes."""
    validation = Validation([whole(source(101, mean_bytes=1.0), 10), whole(source(100), 10)])
    assert validation.read(np.array([0])).label_bytes is None

"""The split against a list made by hand: every token marked by its chunk, every window looked at."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.split import CHUNK, PERIOD, Part, Split, chunk_tokens, largest_seq_len


def all_starts(split: Split, part: Part) -> np.ndarray:
    return split.starts(part, np.arange(split.windows(part), dtype=np.int64))


def parts_of_tokens(split: Split) -> np.ndarray:
    """True where a token is validation, from the words of the rule and not from the code."""
    chunks = np.arange(split.tokens) // split.chunk
    return chunks % split.period == split.period - 1


sizes = st.tuples(st.integers(2 * CHUNK, 50 * CHUNK), st.integers(1, 3 * CHUNK)).filter(
    lambda pair: pair[1] <= largest_seq_len(pair[0])
)


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_windows_lie_inside_one_run_of_their_own_part(size):
    split = Split(*size)
    validation = parts_of_tokens(split)
    borders = np.cumsum(np.concatenate([[0], validation[1:] != validation[:-1]]))
    for part in Part:
        starts = all_starts(split, part)
        last = starts + split.seq_len
        assert starts.min() >= 0 and last.max() < split.tokens
        assert (validation[starts] == (part is Part.VALIDATION)).all()
        assert (borders[starts] == borders[last]).all()


@settings(max_examples=30, deadline=None)
@given(sizes)
def test_each_part_has_every_window_that_fits_and_no_label_twice(size):
    split = Split(*size)
    validation = parts_of_tokens(split)
    for part in Part:
        starts = all_starts(split, part)
        by_hand: list[int] = []
        edges = np.flatnonzero(np.diff(np.concatenate([[False], validation == (part is Part.VALIDATION), [False]])))
        for begin, end in edges.reshape(-1, 2):
            by_hand += range(begin, end - split.seq_len, split.seq_len)
        assert starts.tolist() == by_hand
        assert len(starts) >= 1


@pytest.mark.parametrize("chunks", [20, 39, 40, 47])
def test_every_twentieth_chunk_of_4096_is_validation(chunks):
    starts = all_starts(Split(chunks * CHUNK, 128), Part.VALIDATION)
    assert sorted(set((starts // CHUNK).tolist())) == list(range(PERIOD - 1, chunks, PERIOD))


@pytest.mark.parametrize(("period", "validation"), [(2, [1, 3, 5]), (3, [2, 5]), (7, [6]), (100, [6]), (0, [])])
def test_the_period_says_which_chunks_are_validation_and_0_keeps_none(period, validation):
    """Of seven chunks; a period of more than there are is one of as many."""
    split = Split(7 * CHUNK, 64, validation_period=period)
    chunks = [sorted(set((all_starts(split, part) // CHUNK).tolist())) for part in Part if split.windows(part)]
    assert chunks == [[chunk for chunk in range(7) if chunk not in validation], *([validation] * bool(validation))]


@given(st.integers(2, 10_000), st.integers(1, 9_999))
def test_without_validation_all_windows_that_fit_are_for_training(tokens, seq_len):
    if seq_len <= largest_seq_len(tokens, period=0):
        split = Split(tokens, seq_len, validation_period=0)
        assert all_starts(split, Part.TRAIN).tolist() == list(range(0, tokens - seq_len, seq_len))
        assert split.windows(Part.VALIDATION) == 0


def test_the_longest_seq_len_of_a_run_makes_the_chunks_of_all():
    short, long = Split(90 * CHUNK, 64, 9000), Split(90 * CHUNK, 9000)
    assert short.chunk == long.chunk == 3 * CHUNK
    chunks = {
        (split, part): {int(start) // short.chunk for start in all_starts(split, part)}
        for split in (short, long)
        for part in Part
    }
    for one, other in [(short, long), (long, short)]:
        assert not chunks[one, Part.TRAIN] & chunks[other, Part.VALIDATION]


@pytest.mark.parametrize(("seq_len", "chunk"), [(1, 4096), (4095, 4096), (4096, 8192), (8191, 8192), (8192, 12288)])
def test_a_chunk_is_the_smallest_multiple_of_4096_that_holds_a_window(seq_len, chunk):
    assert chunk_tokens(seq_len) == chunk


@given(st.integers(2 * CHUNK, 1 << 50))
def test_the_largest_seq_len_is_legal_and_the_next_is_not(tokens):
    largest = largest_seq_len(tokens)
    split = Split(tokens, largest)
    assert split.windows(Part.TRAIN) >= 1 and split.windows(Part.VALIDATION) >= 1
    assert 2 * chunk_tokens(largest + 1) > tokens

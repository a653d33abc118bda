"""Sources: what is read is what lies in the file, and what cannot be read is refused in one line."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from megalite.data.documents import Ends
from megalite.data.opening import open_text
from megalite.data.samples import Samples, Stretch
from megalite.data.source import IGNORED, Source
from megalite.data.split import CHUNK, Part
from tests.data.refusals import refusal


def text_file(path, size: int):
    path.write_bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes())
    return path


def test_a_window_is_the_bytes_of_the_file_from_its_start(tmp_path):
    path = text_file(tmp_path / "my.txt", 25 * CHUNK + 100)
    content = path.read_bytes()
    for part in Part:
        windows = open_text(path).windows(50, part)
        indices = np.array([len(windows) - 1, 0, len(windows) // 2])
        rows = windows.read(indices)
        assert rows.shape == (3, 51) and rows.dtype == np.int64
        for row, start in zip(rows, windows.split.starts(part, indices), strict=True):
            assert bytes(row.tolist()) == content[start : start + 51]


@pytest.mark.parametrize("index", [-1, 10**6])
def test_a_window_outside_the_part_is_an_error_and_never_other_tokens(tmp_path, index):
    windows = open_text(text_file(tmp_path / "my.txt", 2 * CHUNK)).windows(50, Part.TRAIN)
    with pytest.raises(IndexError, match=r"my\.txt"):
        windows.read(np.array([0, index]))


@pytest.mark.parametrize("start", [-1, 2 * CHUNK - 9])
def test_tokens_outside_the_source_are_an_error(tmp_path, start):
    source = open_text(text_file(tmp_path / "my.txt", 2 * CHUNK))
    with pytest.raises(IndexError):
        source.read(np.array([start]), 10)


def test_the_map_cannot_be_written(tmp_path):
    source = open_text(text_file(tmp_path / "my.txt", 2 * CHUNK))
    with pytest.raises(ValueError, match="read-only"):
        source.tokens[0] = 7


def test_a_source_too_small_for_seq_len_is_refused_with_both_numbers_and_the_largest_legal_one(tmp_path):
    source = open_text(text_file(tmp_path / "my.txt", 20_000))
    message = refusal(lambda: source.windows(9000, Part.TRAIN))
    for word in ["data.paths", "my.txt", "20000", "seq_len=9000", "24576", "8191"]:
        assert word in message
    assert len(source.windows(8191, Part.TRAIN)) == len(source.windows(8191, Part.VALIDATION)) == 1
    assert "seq_len=0" in refusal(lambda: source.windows(0, Part.TRAIN))


def test_a_description_is_one_line_with_name_size_and_fingerprint(tmp_path):
    source = open_text(text_file(tmp_path / "my.txt", 40 * CHUNK))
    line = source.describe()
    for word in ["my.txt", f"{40 * CHUNK} bytes", source.fingerprint]:
        assert word and word in line
    assert "\n" not in line


def tokens_of(count: int, **facts) -> Source:
    row = np.random.default_rng(count).integers(0, 100, count).astype(np.int32)
    return Source("mine", row, vocab_size=facts.pop("vocab_size", 100), **facts)


@pytest.mark.parametrize("wrong", [100, 2**31 - 1, -1])
def test_a_token_outside_of_the_vocabulary_is_an_error_that_names_it_and_its_place(wrong):
    source = tokens_of(500, vocabulary="model.vocab_size")
    source.tokens[321] = wrong
    assert source.read(np.array([0, 322]), 100).shape == (2, 100)
    message = refusal(lambda: source.read(np.array([0, 300]), 100))
    for word in ["mine", f"token {wrong} ", "place 321", "model.vocab_size=100"]:
        assert word in message


def test_a_label_counts_unless_its_own_token_is_masked():
    mask = np.random.default_rng(1).integers(0, 2, 401).astype(np.uint8)
    source = tokens_of(401, mask=mask)
    rows = source.windows(20, Part.TRAIN, period=0).labelled(np.arange(20))
    expected = np.where(mask[1:] == 1, source.tokens[1:], IGNORED)
    assert rows.labels.ravel().tolist() == expected.tolist()
    assert rows.tokens.ravel().tolist() == source.tokens[:-1].tolist()  # a masked token is still read


def test_documents_are_told_apart_and_none_predicts_the_first_token_of_the_next():
    ends = np.array([7, 8, 8, 30, 31, 60, 401])
    source = tokens_of(401, documents=Ends(ends))
    rows = source.windows(20, Part.TRAIN, period=0).labelled(np.arange(20), separate=True)
    number = np.searchsorted(ends, np.arange(401), side="right")  # the document of each token, empty ones too
    for window, (tokens, labels, documents) in enumerate(zip(*rows, strict=True)):
        here = number[window * 20 : window * 20 + 21]
        assert documents.tolist() == np.unique(here, return_inverse=True)[1][:20].tolist()
        ahead = source.tokens[window * 20 + 1 : window * 20 + 21]
        assert labels.tolist() == np.where(here[1:] == here[:-1], ahead, IGNORED).tolist()
        assert tokens.tolist() == source.tokens[window * 20 : window * 20 + 20].tolist()


def test_a_source_without_documents_is_one_and_joined_ones_lose_no_label():
    plain, joined = tokens_of(401), tokens_of(401, documents=Ends(np.array([7, 401])))
    rows = plain.windows(20, Part.TRAIN, period=0).labelled(np.arange(20), separate=True)
    assert not rows.documents.any() and (rows.labels != IGNORED).all()
    assert joined.windows(20, Part.TRAIN, period=0).labelled(np.arange(20)).documents is None
    assert (joined.windows(20, Part.TRAIN, period=0).labelled(np.arange(20)).labels != IGNORED).all()


@pytest.fixture
def huge(tmp_path):
    """2**31 + 2**20 tokens of 16 bits, all zero (a hole, no disk) but the last ones, which count up to 65535."""
    tokens = np.memmap(tmp_path / "huge.bin", dtype=np.uint16, mode="w+", shape=((1 << 31) + (1 << 20),))
    tokens[-2000:] = np.arange(65536 - 2000, 65536)
    tokens.flush()
    return Source("huge", np.memmap(tmp_path / "huge.bin", dtype=np.uint16, mode="r"), vocab_size=65536)


def test_past_two_to_the_31_tokens_the_last_sample_reads_right(huge):
    """A 32-bit offset would wrap to a negative one."""
    last = huge.read(np.array([len(huge) - 129]), 129)
    assert last.tolist() == [list(range(65536 - 129, 65536))]
    windows = huge.windows(128, max(Part, key=lambda part: huge.split(128).starts(part, last_of(huge, part))[0]))
    index = np.array([len(windows) - 1])
    start = int(windows.split.starts(windows.part, index)[0])
    assert start > 1 << 31
    first = 65536 - (len(huge) - start)
    assert windows.read(index).tolist() == [list(range(first, first + 129))]


def last_of(source: Source, part: Part) -> np.ndarray:
    return np.array([source.split(128).windows(part) - 1])


def test_a_shuffled_read_of_a_huge_source_holds_no_more_memory_than_of_a_small_one(huge, tmp_path):
    small = open_text(text_file(tmp_path / "small.txt", 10 * CHUNK))
    peaks = []
    for source in (small, huge):
        tracemalloc.start()
        Samples([source], [Stretch(0, 128)], seed=0).read(np.arange(64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.5 * peaks[0]  # both a few hundred KB, mostly the rows; an index of windows would be 128 MB

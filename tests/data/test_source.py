"""Sources: what is read is what lies in the file, and what cannot be read is refused in one line."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest

from megalite.data.samples import Samples
from megalite.data.source import DataError, Source, open_text, open_texts
from megalite.data.split import CHUNK, Part


def text_file(path, size: int):
    path.write_bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes())
    return path


def refusal(call) -> str:
    with pytest.raises(DataError) as caught:
        call()
    message = str(caught.value)
    assert isinstance(caught.value, ValueError) and "\n" not in message
    return message


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
        source.view(0, 1)[0] = 7


def bad_paths(folder):
    (folder / "empty.txt").touch()
    text_file(folder / "small.txt", 2 * CHUNK - 1)
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    return {
        "missing.txt": ["does not exist"],
        "empty.txt": [" 0 bytes", str(2 * CHUNK)],
        "small.txt": [str(2 * CHUNK - 1), str(2 * CHUNK)],
        "": ["is a directory", "my.txt"],
        "pipe": ["not a regular file"],
        "loop": ["cannot be read"],
        "small.txt/below": ["cannot be read"],
        "nul\0.txt": ["cannot be read"],
    }


def test_a_path_that_cannot_be_a_text_is_refused_by_key_place_and_path(tmp_path):
    good = text_file(tmp_path / "good.txt", 2 * CHUNK)
    for name, words in bad_paths(tmp_path).items():
        path = os.path.join(tmp_path, name)
        message = refusal(lambda path=path: open_texts([good, path]))
        for word in ["data.paths[1]", path, *words]:
            assert word in message


def test_an_unreadable_file_is_refused_by_path(tmp_path, monkeypatch):
    """Permissions do not bind the superuser, under whom tests may run, so the refusal of the system is played."""
    path = text_file(tmp_path / "secret.txt", 2 * CHUNK)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(np, "memmap", refuse)
    message = refusal(lambda: open_text(path))
    assert "data.paths" in message and "secret.txt" in message and "Permission denied" in message


def test_a_source_too_small_for_seq_len_is_refused_with_both_numbers_and_the_largest_legal_one(tmp_path):
    source = open_text(text_file(tmp_path / "my.txt", 20_000))
    message = refusal(lambda: source.windows(9000, Part.TRAIN))
    for word in ["data.paths", "my.txt", "20000", "seq_len=9000", "24576", "8191"]:
        assert word in message
    assert len(source.windows(8191, Part.TRAIN)) == len(source.windows(8191, Part.VALIDATION)) == 1
    assert "seq_len=0" in refusal(lambda: source.windows(0, Part.TRAIN))


def test_a_description_is_one_line_with_name_bytes_and_windows(tmp_path):
    source = open_text(text_file(tmp_path / "my.txt", 40 * CHUNK))
    line = source.describe(100)
    train, validation = (len(source.windows(100, part)) for part in Part)
    for word in ["my.txt", f"{40 * CHUNK} bytes", f"{train} training", f"{validation} validation"]:
        assert word in line
    assert "\n" not in line


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
        Samples([source], seq_len=128, seed=0).read(np.arange(64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] <= 1.5 * peaks[0]  # both a few hundred KB, mostly the rows; an index of windows would be 128 MB

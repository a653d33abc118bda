"""What a user names is opened as what it is, or refused in one line."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

from megalite.data.indexed import IndexedWriter
from megalite.data.meta import Meta, fingerprint, write_meta, write_token_bytes
from megalite.data.opening import open_source, open_sources, open_text
from megalite.data.split import CHUNK
from tests.data.refusals import refusal


def text_file(path, size: int):
    path.write_bytes(np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8).tobytes())
    return path


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
        message = refusal(lambda path=path: open_sources([good, path], cache_dir=tmp_path))
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


def test_a_validation_text_may_be_as_short_as_two_bytes(tmp_path):
    path = text_file(tmp_path / "short.txt", 2)
    assert len(open_text(path, least_bytes=2)) == 2


def test_paths_come_before_the_default_corpus(tmp_path):
    (tmp_path / "my.txt").write_bytes(b"hello " * 2000)
    (source,) = open_sources([tmp_path / "my.txt"], cache_dir=tmp_path / "cache")
    assert len(source) == 12_000 and not (tmp_path / "cache").exists()
    assert source.label_bytes(np.arange(7)) == 7  # a byte is a byte


@pytest.fixture
def pair(tmp_path):
    """A pair with all that may lie beside it: 30 documents of 40 tokens, each ended by 99."""
    prefix = tmp_path / "set"
    with IndexedWriter(prefix, np.uint16, masked=True) as out:
        for number in range(30):
            out.add(np.append(np.arange(39) + number, 99), np.arange(40) % 2)
    write_meta(prefix, Meta("mine", 100, 99, 1200, 30, 4800, "uint16", fingerprint(prefix)))
    write_token_bytes(prefix, np.append(np.full(99, 5), 0))
    return prefix


@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_a_pair_is_one_source_by_each_of_its_names(pair, end):
    source = open_source(f"{pair}{end}")
    assert len(source) == 1200 and source.vocab_size == 100 and len(source.documents) == 30
    assert source.label_bytes(np.array([1, 2, 99])) == 10 and source.tokenizer == "mine"
    assert source.mask.tolist() == [0, 1] * 600 and source.fingerprint == fingerprint(pair)


def test_without_a_table_of_bytes_the_mean_of_the_text_is_taken(pair):
    os.remove(f"{pair}.token_bytes.npy")
    assert open_source(pair).label_bytes(np.array([1, 2, 99])) == 3 * 4800 / 1200


def test_a_pair_without_a_description_is_held_to_the_vocabulary_of_the_model(pair):
    os.remove(f"{pair}.json")
    assert "model.vocab_size" in refusal(lambda: open_source(pair))
    assert open_source(pair, vocab_size=100).read(np.array([0]), 1200).max() == 99
    small = open_source(pair, vocab_size=99)
    message = refusal(lambda: small.read(np.array([10]), 60))
    for word in [str(pair), "token 99 ", "place 39", "model.vocab_size=99"]:
        assert word in message


def test_a_pair_swapped_under_its_description_is_refused_with_both_values(pair):
    old = Meta("mine", 100, 99, 1200, 30, 4800, "uint16", fingerprint(pair))
    for fact, told in {"tokens": 1201, "documents": 29, "dtype": "int32", "fingerprint": "0123456789abcdef"}.items():
        write_meta(pair, replace(old, **{fact: told}))
        message = refusal(lambda: open_source(pair, key="data.paths[3]"))
        for word in ["data.paths[3]", fact, str(told), str(getattr(old, fact))]:
            assert word in message


def test_another_set_of_equal_sizes_under_the_same_name_is_refused(pair, tmp_path):
    content = bytearray((tmp_path / "set.bin").read_bytes())
    content[1000] ^= 1
    (tmp_path / "set.bin").write_bytes(content)
    assert "fingerprint" in refusal(lambda: open_source(pair))


def test_a_name_that_is_a_file_and_a_pair_is_refused(pair):
    text_file(pair, 3 * CHUNK)
    assert f"name {pair}.bin" in refusal(lambda: open_source(pair))
    assert len(open_source(f"{pair}.bin")) == 1200

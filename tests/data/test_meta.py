"""What lies beside a token file is read as it was written, and recognised by its fingerprint."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megalite.data.errors import DataError
from megalite.data.indexed import IndexedWriter
from megalite.data.meta import (
    BLOCK_BYTES,
    BLOCKS,
    Meta,
    fingerprint,
    read_meta,
    read_token_bytes,
    write_meta,
    write_token_bytes,
)

META = Meta("gpt2", 50257, 50256, 12, 3, 40, "uint16", "0123456789abcdef")


@pytest.mark.parametrize("end", [50256, None])
def test_a_description_survives(tmp_path, end):
    meta = Meta(**{**vars(META), "end_of_document": end})
    write_meta(tmp_path / "a", meta)
    assert read_meta(tmp_path / "a") == meta and read_meta(tmp_path / "b") is None
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize(
    ("change", "word"),
    [({"tokens": "12"}, "tokens"), ({"tokens": True}, "tokens"), ({"more": 1}, "more"), ({"dtype": None}, "dtype")],
)
def test_a_description_of_another_form_is_refused_by_what_is_wrong(tmp_path, change, word):
    (tmp_path / "a.json").write_text(json.dumps(vars(META) | change))
    with pytest.raises(DataError, match=rf"a\.json.*{word}"):
        read_meta(tmp_path / "a")


@pytest.mark.parametrize("content", ["{", "[]", "7", "{}"])
def test_what_is_no_description_is_refused(tmp_path, content):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=r"a\.json"):
        read_meta(tmp_path / "a")


def test_bytes_of_tokens_survive_and_must_be_one_for_each(tmp_path):
    assert read_token_bytes(tmp_path / "a", vocab_size=3) is None
    write_token_bytes(tmp_path / "a", [1, 0, 7])
    assert read_token_bytes(tmp_path / "a", vocab_size=3).tolist() == [1, 0, 7]
    with pytest.raises(DataError, match=r"\(3,\).*\(4,\)"):
        read_token_bytes(tmp_path / "a", vocab_size=4)


def test_a_fingerprint_is_of_content_and_not_of_the_name(tmp_path):
    for name in ("a", "b", "c"):
        with IndexedWriter(tmp_path / name, np.uint16 if name != "c" else np.int32) as out:
            out.add([1, 2, 3])
    same = {fingerprint(f"{tmp_path / name}{end}") for name in "ab" for end in ("", ".bin", ".idx")}
    assert len(same) == 1 and fingerprint(tmp_path / "c") not in same
    text = tmp_path / "my.txt"
    text.write_bytes(b"hello" * 1000)
    first = fingerprint(text)
    assert len(first) == 16 and first == fingerprint(text)
    seen = {first}
    for content in (b"hello" * 999, b"hello" * 999 + b"hella", b"jello" + b"hello" * 999):
        text.write_bytes(content)
        seen.add(fingerprint(text))
    assert len(seen) == 4


def test_documents_cut_elsewhere_have_another_fingerprint(tmp_path):
    for name, cut in (("a", 3), ("b", 4)):
        with IndexedWriter(tmp_path / name, np.uint16) as out:
            out.add(np.arange(cut))
            out.add(np.arange(cut, 9))
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")


def test_a_fingerprint_reads_as_much_of_a_huge_file_as_of_any(tmp_path):
    """A hole of a terabyte: to read it would take minutes; its first, last and middle blocks are in it."""
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    before = fingerprint(path)
    last = (1 << 40) - BLOCK_BYTES
    for place in (0, last * 31 // (BLOCKS - 1), (1 << 40) - 1):
        with open(path, "r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert fingerprint(path) != before
        before = fingerprint(path)

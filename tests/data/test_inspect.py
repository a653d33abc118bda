"""What is said of a token file is what is in it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from megalite.data.encode import Job
from megalite.data.errors import DataError
from megalite.data.indexed import IndexedWriter
from megalite.data.inspect import inspect
from megalite.data.meta import fingerprint
from megalite.data.texts import Reading
from megalite.data.tokenize import tokenize
from tests.data import small_tokenizers as small


def rows(report: str) -> dict[str, str]:
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in report.splitlines() if "  " in line)


def write(prefix: Path, documents: list[list[int]]) -> str:
    with IndexedWriter(str(prefix), np.uint16) as out:
        for document in documents:
            out.add(document)
    return str(prefix)


@pytest.fixture
def three(tmp_path: Path) -> str:
    lines = [{"text": text, "prompt": "go: "} for text in ("ab", "ö" * 100, "abc")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenize(
        [str(tmp_path / "a.jsonl")],
        str(tmp_path / "out"),
        Job("bytes", reading=Reading(prompt_field="prompt")),
        workers=1,
    )
    return str(tmp_path / "out")


@pytest.mark.parametrize("end", ["", ".bin", ".idx"])
def test_the_report_has_sizes_lengths_ends_and_samples(three: str, end: str) -> None:
    found = rows(inspect(three + end, sample=3))
    tokens = 7 + 205 + 8
    assert found | {"fingerprint": ""} == {
        "documents": "3",
        "tokens": f"{tokens}",
        "bytes per token": f"{(tokens - 3) / tokens:.3f}",
        "vocabulary": "257",
        "tokenizer": "bytes",
        "dtype": "uint16",
        "fingerprint": "",
        "document lengths": "shortest 7, median 8, longest 205",
        "end of document": "256, exactly one at the end of each document",
        "counts in the loss": f"{tokens - 12} of {tokens} tokens",
    }
    assert found["fingerprint"] == fingerprint(f"{three}.bin")
    samples = inspect(three, sample=3).splitlines()[-3:]
    assert samples[0] == "document 0: 'go: ab<|endoftext|>'"
    assert samples[1] == f"document 1: {'go: ' + 'ö' * 30!r} ..."
    assert len(inspect(three, sample=0).splitlines()) == len(inspect(three, sample=3).splitlines()) - 3


@pytest.mark.parametrize(
    ("documents", "complaint"),
    [
        ([[1, 256], [2, 256, 256], [3, 256]], "not exactly one ends 1 of 3 documents, the first of them 1"),
        ([[1, 256], [2]], "not exactly one ends 1 of 2 documents, the first of them 1"),
        ([[1], [2], [3, 256]], "not exactly one ends 2 of 3 documents, the first of them 0"),
        ([[256], [256]], "exactly one at the end of each document"),
    ],
)
def test_documents_that_do_not_end_in_exactly_one_end_are_counted_and_the_first_is_named(
    tmp_path: Path, documents: list[list[int]], complaint: str
) -> None:
    """Also across the borders of what is looked at together."""
    for at_once in (1, 2, 100):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("megalite.data.inspect.AT_ONCE", at_once)
            found = rows(inspect(write(tmp_path / "out", documents), sample=0, name="bytes"))
        assert complaint in found["end of document"]


def test_without_a_description_the_tokenizer_is_named_or_numbers_are_shown(tmp_path: Path) -> None:
    prefix = write(tmp_path / "out", [[104, 105, 256]])
    report = inspect(prefix, sample=1)
    assert rows(report)["vocabulary"] == "unknown; at least 257" and rows(report)["end of document"] == "unknown"
    assert report.splitlines()[-2:] == [
        "numbers are shown: no tokenizer is known; name one with --tokenizer",
        "document 0: 104 105 256",
    ]
    assert inspect(prefix, sample=1, name="bytes").splitlines()[-1] == "document 0: 'hi<|endoftext|>'"
    with pytest.raises(ValueError, match="--tokenizer gpt2 is none"):
        inspect(prefix, sample=1, name="gpt2")


def test_numbers_are_shown_where_the_tokenizer_is_gone(tmp_path: Path) -> None:
    path = small.byte_level(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the fox")
    tokenize([str(tmp_path / "a.txt")], str(tmp_path / "out"), Job(str(path)), workers=1)
    assert inspect(str(tmp_path / "out"), sample=1).splitlines()[-1] == "document 0: 'the fox<|endoftext|>'"
    path.unlink()
    why, shown = inspect(str(tmp_path / "out"), sample=1).splitlines()[-2:]
    assert why.startswith(f"numbers are shown: --tokenizer {path} is none") and shown.startswith("document 0: ")


def test_a_tokenizer_that_cannot_have_written_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token 999 is none of bytes, whose vocabulary is 257"):
        inspect(write(tmp_path / "out", [[999]]), sample=1, name="bytes")


def test_a_text_is_shown_as_the_bytes_that_training_reads(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello")
    report = inspect(str(tmp_path / "a.txt"), sample=1)
    assert "documents        1 (a text, read as bytes)" in report and "sample: 'hello'" in report
    (tmp_path / "empty.txt").write_text("")
    for name in ("empty.txt", "none", "."):
        with pytest.raises(DataError):
            inspect(str(tmp_path / name), sample=1)

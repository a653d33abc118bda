"""Text into a token file: what goes in comes out, for every tokenizer, in the format and the type that it says."""

from __future__ import annotations

import gzip
import json
import multiprocessing
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from megalite.data.command import main
from megalite.data.encode import Job
from megalite.data.errors import DataError
from megalite.data.indexed import open_indexed
from megalite.data.meta import fingerprint, read_meta, read_token_bytes
from megalite.data.texts import Reading
from megalite.data.tokenize import Made, tokenize
from megalite.data.tokenizers import END_OF_TEXT, open_tokenizer
from tests.data import small_tokenizers as small

DOCUMENTS = ["the quick brown fox", "", "Zwölf 数据 🙂\n\n", f"{END_OF_TEXT} inside and last {END_OF_TEXT}", "x"]


def write_lines(path: Path, documents: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return str(path)


def documents_of(prefix: Path | str) -> list[list[int]]:
    found = open_indexed(prefix)
    ends = found.documents.ends(np.arange(len(found.documents))).tolist()
    return [found.tokens[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]


def make(names: list[str], prefix: Path, job: Job, **options: object) -> Made:
    return tokenize(names, str(prefix), job, workers=1, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["bytes", "byte_level", "ranks", "pieces"])
def test_every_document_is_its_tokens_and_one_end_and_the_description_says_so(tmp_path: Path, kind: str) -> None:
    name = {
        "bytes": "bytes",
        "byte_level": str(small.byte_level(tmp_path / "tokenizer.json")),
        "ranks": str(small.ranks(tmp_path / "small.tiktoken")),
        "pieces": str(small.pieces(tmp_path / "small.model")),
    }[kind]
    made = make([write_lines(tmp_path / "a.jsonl", DOCUMENTS)], tmp_path / "out", Job(name))
    tokenizer = open_tokenizer(name)
    kept = [text for text in DOCUMENTS if text]
    expected = [[*tokens.tolist(), tokenizer.end_of_document] for tokens in tokenizer.encode(kept)]
    assert documents_of(tmp_path / "out") == expected
    assert all(document.count(tokenizer.end_of_document) == 1 for document in expected)  # special text stayed text
    meta = read_meta(tmp_path / "out")
    assert meta == made.meta and made.skipped == 1
    assert meta.tokenizer == tokenizer.name and meta.vocab_size == tokenizer.vocab_size
    assert (meta.documents, meta.tokens) == (len(kept), sum(map(len, expected)))
    assert meta.text_bytes == sum(len(text.encode()) for text in kept)
    assert meta.fingerprint == fingerprint(tmp_path / "out.bin") and meta.dtype == "uint16"
    lengths = read_token_bytes(tmp_path / "out", vocab_size=meta.vocab_size)
    assert lengths is not None
    spaces = len(kept) if kind == "pieces" else 0  # the one that sentencepiece puts in front
    assert sum(lengths[document].sum() for document in expected) == meta.text_bytes + spaces
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("out")) == [
        "out.bin", "out.idx", "out.json", "out.token_bytes.npy",
    ]  # fmt: skip


def test_special_text_that_is_asked_for_becomes_special_and_still_each_document_ends_in_one(tmp_path: Path) -> None:
    name = str(small.byte_level(tmp_path / "tokenizer.json"))
    make([write_lines(tmp_path / "a.jsonl", DOCUMENTS)], tmp_path / "out", Job(name, special_tokens=True))
    end = open_tokenizer(name).end_of_document
    found = documents_of(tmp_path / "out")
    assert [document.count(end) for document in found] == [1, 1, 2, 1]  # the one inside, and the last
    assert all(document[-1] == end and document[-2] != end for document in found)


def test_a_tokenizer_without_an_end_is_refused_by_the_name_of_the_option(tmp_path: Path) -> None:
    name = str(small.byte_level(tmp_path / "tokenizer.json", end=False))
    lines = write_lines(tmp_path / "a.jsonl", ["a"])
    with pytest.raises(ValueError, match=r"names no token that ends a document; name one with --end-of-document"):
        make([lines], tmp_path / "out", Job(name))
    make([lines], tmp_path / "out", Job(name, end_of_document="!"))
    assert documents_of(tmp_path / "out")[0][-1] == open_tokenizer(name).id_of("!")


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "int32"), (70000, "int32")])
def test_the_largest_id_comes_back_and_the_type_is_recorded(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    name = str(small.words(tmp_path / "words.json", vocab_size))
    last = vocab_size - 1
    lines = write_lines(tmp_path / "a.jsonl", [f"w1 w{last} w32768 w{last}"])
    assert make([lines], tmp_path / "out", Job(name)).meta.dtype == dtype
    assert documents_of(tmp_path / "out") == [[1, last, 32768, last, 0]]
    assert open_indexed(tmp_path / "out").tokens.dtype == dtype
    assert (tmp_path / "out.bin").stat().st_size == 5 * np.dtype(dtype).itemsize
    assert not (tmp_path / "out.token_bytes.npy").exists()


def test_a_prompt_is_written_and_masked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "ab", "text": "cde"}\n{"prompt": "x", "text": ""}\n')
    job = Job("bytes", reading=Reading(prompt_field="prompt"))
    assert make([str(tmp_path / "a.jsonl")], tmp_path / "out", job).skipped == 1
    assert documents_of(tmp_path / "out") == [[*b"abcde", 256]]
    mask = open_indexed(tmp_path / "out").mask
    assert mask is not None and mask.tolist() == [0, 0, 1, 1, 1, 1]


def test_files_of_all_kinds_make_one_set_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_lines(folder / "a.jsonl", ["one", "two"])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["three", "four"]}), folder / "c.parquet")
    (folder / "d.txt").write_text("five\n\nsix")
    for split_on, last in ((None, ["five\n\nsix"]), ("\n\n", ["five", "six"])):
        prefix = tmp_path / f"out{len(last)}"
        make([str(folder)], prefix, Job("bytes", reading=Reading(split_on=split_on)))
        texts = [bytes(document[:-1]).decode() for document in documents_of(prefix)]
        assert texts == ["one", "two", "one", "two", "three", "four", *last]


def test_parts_and_workers_leave_no_trace_in_the_output(tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [f"document {n} " * (n % 7) for n in range(300)])
    job = Job("bytes", reading=Reading(prompt_field="text"))
    outputs = []
    for number, (workers, part_bytes) in enumerate([(1, 1 << 20), (2, 1 << 20), (1, 2000), (3, 500)]):
        prefix = tmp_path / str(number) / "out"
        tokenize([str(tmp_path / "a.jsonl")], str(prefix), job, workers=workers, part_bytes=part_bytes)
        outputs.append({path.name: path.read_bytes() for path in prefix.parent.iterdir()})
        assert not multiprocessing.active_children()
    assert len(outputs[0]) == 5 and all(output == outputs[0] for output in outputs)


def test_a_document_longer_than_a_batch_is_one_document(tmp_path: Path) -> None:
    content = b"line of text\n" * 300_000  # some megabytes, in four fragments
    (tmp_path / "a.txt").write_bytes(content)
    make([str(tmp_path / "a.txt")], tmp_path / "out", Job("bytes"))
    found = open_indexed(tmp_path / "out")
    assert len(found.documents) == 1 and len(found.tokens) == len(content) + 1
    assert found.tokens[:-1].astype(np.uint8).tobytes() == content


def test_input_without_text_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="the input holds no text: 1 documents, all of them empty"):
        make([str(tmp_path / "a.txt")], tmp_path / "out", Job("bytes"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["tokenize", "a.jsonl", "--output", "out"], 0, ""),
        (["tokenize", "a.jsonl", "--output", "out", "--workers", "0"], 2, "whole number from 1 up"),
        (["tokenize", "a.jsonl"], 2, "--output"),
        (["tokenize", "a.jsonl", "--output", "out", "--tokenizer", "gpt2"], 2, "--tokenizer gpt2 is none"),
        (["tokenize", "a.jsonl", "--output", "out", "--split-on", ""], 2, "--split-on is empty"),
        (["tokenize", "a.jsonl", "--output", "out", "--field", "body"], 3, "a.jsonl:1: there is no field 'body'"),
        (["tokenize", "none.jsonl", "--output", "out"], 3, "none.jsonl does not exist"),
        (["tokenize", "a.jsonl", "--output", "a.jsonl/out"], 3, "--output a.jsonl/out cannot be written"),
        (["inspect", "none"], 3, "none does not exist"),
        (["inspect", "a.jsonl"], 0, ""),
        ([], 2, "COMMAND"),
    ],
)
def test_exit_codes_tell_the_command_line_from_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
    arguments: list[str], code: int, complaint: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "a.jsonl", ["a"])
    try:
        found = main(arguments)
    except SystemExit as end:  # argparse's own refusals
        found = int(str(end.code))
    shown = capfd.readouterr()
    assert (found, shown.err.count("error: ")) == (code, int(code > 0))
    assert complaint in shown.err and "Traceback" not in shown.err
    if code == 3:
        assert len(shown.err.splitlines()) == 1
    if arguments[:1] == ["tokenize"] and code == 0:
        assert "data.paths=[out] model.vocab_size=257" in shown.out


def test_what_lies_between_documents_is_written_as_in_a_shell(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\\n--\ttwo\\n--\tthree")
    assert main(["tokenize", str(tmp_path / "a.txt"), "--output", str(tmp_path / "o"), "--split-on", r"\\n--\t"]) == 0
    assert [bytes(document[:-1]) for document in documents_of(tmp_path / "o")] == [b"one", b"two", b"three"]

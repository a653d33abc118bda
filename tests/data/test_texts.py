"""Documents out of files: the same ones however the file is cut, whole after the fragments are joined again."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data import texts
from megalite.data.errors import DataError
from megalite.data.inputs import Input, Piece, cut, find_inputs
from megalite.data.texts import Reader, Reading, cut_at
from megalite.data.tokenizers import open_tokenizer
from tests.data import small_tokenizers as small


def read(path: Path, *, part_bytes: int = 1 << 20, **reading: object) -> list[str]:
    """The documents of a file; of a prompt, `prompt|text`."""
    how = Reading(**reading)  # type: ignore[arg-type]
    documents, open_ = [], ""
    for part in cut(find_inputs([str(path)]), part_bytes=part_bytes, split_text=how.split_on is not None):
        for piece in part:
            counted = True
            for fragment in Reader(piece, how):
                assert fragment.text_bytes == len(fragment.text.encode())
                open_ += ("|" if fragment.counts and not counted else "") + fragment.text
                counted = fragment.counts
                if fragment.ends:
                    documents, open_ = [*documents, open_], ""
            assert not open_
    return documents


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "FRAGMENT_BYTES", 7)
    monkeypatch.setattr(texts, "BLOCK_BYTES", 5)


@pytest.mark.parametrize("part_bytes", [1, 2, 3, 10, 1000])
@pytest.mark.parametrize("separator", ["\n\n", "\n", "---", "aba"])
def test_a_text_that_is_split_gives_the_same_documents_however_it_is_cut(
    tmp_path: Path, small_blocks: None, separator: str, part_bytes: int
) -> None:
    """Also where separators overlap (`ababa`) or run on, and where a document is longer than a fragment."""
    content = "\n\n\n\none\n\ntwo ö\nthree\n\n\nfour and five and six---abab-ababaaba---\n\nlast\n"
    path = tmp_path / "a.txt"
    path.write_bytes(content.encode())
    found = read(path, part_bytes=part_bytes, split_on=separator)
    # what lies between two places where a separator stands, found by looking at every place
    ends = [at for at in range(len(content)) if content.startswith(separator, at)]
    begins = [0, *(at + len(separator) for at in ends)]
    expected = [content[begin:end] for begin, end in zip(begins, [*ends, len(content)], strict=True) if end > begin]
    assert found == expected


@given(
    st.text(alphabet="ab\n ö🙂", max_size=60).filter(lambda text: "\r" not in text),
    st.sampled_from(["\n\n", "\n", "aa", "aba", "b"]),
    st.integers(1, 30),
)
def test_any_text_is_split_alike_in_one_part_and_in_many(content: str, separator: str, part_bytes: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "FRAGMENT_BYTES", 7)
        patch.setattr(texts, "BLOCK_BYTES", 5)
        path = Path(folder, "a.txt")
        path.write_bytes(content.encode())
        assert read(path, part_bytes=part_bytes, split_on=separator) == read(path, split_on=separator)
        assert read(path) == [content]


@pytest.mark.parametrize("part_bytes", [1, 7, 20, 64, 1000])
@pytest.mark.parametrize("end", ["\n", "", "\r\n", "\n\n\n"])
def test_lines_of_json_give_the_same_documents_however_they_are_cut(
    tmp_path: Path, small_blocks: None, part_bytes: int, end: str
) -> None:
    documents = ["one", "", "zwei ö 🙂", "three\nlines\nof it", "x" * 100]
    separator = end or "\n"
    lines = [json.dumps({"n": n, "text": text}, ensure_ascii=n % 2 == 0) for n, text in enumerate(documents)]
    path = tmp_path / "a.jsonl"
    path.write_bytes((separator.join(lines) + end).encode())
    assert read(path, part_bytes=part_bytes) == documents
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert read(tmp_path / "b.jsonl.gz", part_bytes=part_bytes) == documents


def test_a_text_is_one_document_whatever_its_ends_and_its_byte_order_mark_is_none_of_it(
    tmp_path: Path, small_blocks: None
) -> None:
    content = "a\r\nb\n\n  c\tö" * 5
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + content.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(content.encode()))
    (tmp_path / "c.txt").write_bytes(b"")
    assert [read(tmp_path / name) for name in ("a.txt", "b.txt.gz", "c.txt")] == [[content], [content], [""]]


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rows_of_parquet_are_documents_in_order(tmp_path: Path, rows: int) -> None:
    documents = ["one", "", "zwei ö", "three"]
    table = pyarrow.table({"text": documents, "prompt": ["p"] * 4, "other": [1, 2, 3, 4]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=rows)
    assert read(tmp_path / "a.parquet", part_bytes=1) == documents
    assert read(tmp_path / "a.parquet", prompt_field="prompt") == ["p|one", "", "p|zwei ö", "p|three"]
    with pytest.raises(DataError, match="has no column 'body', only text, prompt, other"):
        read(tmp_path / "a.parquet", field="body")


def test_a_prompt_comes_first_and_is_marked(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"q": "what", "a": "that"}\n{"q": "", "a": "x"}\n')
    assert read(tmp_path / "a.jsonl", field="a", prompt_field="q") == ["what|that", "|x"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b'{"text": "a"', r"a\.jsonl:4: this is no JSON"),
        (b'["text"]', r"a\.jsonl:4: this is a list"),
        (b'{"body": "a", "id": 1}', r"a\.jsonl:4: there is no field 'text', only body, id; .*--field"),
        (b"{}", r"a\.jsonl:4: there is no field 'text', only none"),
        (b'{"text": null}', r"a\.jsonl:4: field 'text' is of type NoneType"),
        (b'{"text": "\xff"}', r"a\.jsonl:4: byte 0xff is not UTF-8 .*--invalid-utf8 replace"),
        (b'{"text": "\\ud800"}', r"a\.jsonl:4: .* is half of a pair .*--invalid-utf8 replace"),
        (b"[" * 100_000, r"a\.jsonl:4: this is no JSON"),
    ],
)
def test_what_a_line_has_wrong_is_one_line_with_file_and_number(tmp_path: Path, line: bytes, complaint: str) -> None:
    """The number in the file, also where the part begins later."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n' + line + b"\n")
    for part_bytes in (1, 1000):
        with pytest.raises(DataError, match=complaint) as refusal:
            read(path, part_bytes=part_bytes)
        assert "\n" not in str(refusal.value)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(DataError, match=complaint.replace("jsonl", "jsonl.gz", 1)):
        read(tmp_path / "a.jsonl.gz")


def test_bytes_that_are_no_text_are_refused_with_their_line_or_replaced(tmp_path: Path, small_blocks: None) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\nthr\xffee\nfour\n")
    with pytest.raises(DataError, match=r"a\.txt:3: byte 0xff is not UTF-8"):
        read(tmp_path / "a.txt")
    assert read(tmp_path / "a.txt", replace_invalid=True) == ["one\ntwo\nthr�ee\nfour\n"]
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xff"}\n{"text": "\\ud800b"}')
    assert read(tmp_path / "a.jsonl", replace_invalid=True) == ["a�", "�b"]


def test_a_packed_file_that_was_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"some text" * 100)[:-12])
    with pytest.raises(DataError, match=r"a\.txt\.gz cannot be read .*is it whole"):
        read(tmp_path / "a.txt.gz")


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo")
    source: Input = find_inputs([str(path)])[0]
    fragments = iter(Reader(Piece(source, 0, source.size_bytes, source.size_bytes), Reading(split_on="\n\n")))
    assert next(fragments).text == "one"
    path.write_text("one\n\ntwo and more")
    with pytest.raises(DataError, match="has changed since this began"):
        list(fragments)


@given(st.text(min_size=1, max_size=40).map(str.encode).filter(lambda content: len(content) > 4), st.integers(4, 40))
def test_a_cut_leaves_something_on_the_left_and_never_lies_within_a_character(content: bytes, length: int) -> None:
    place = cut_at(content[:length])
    assert 0 < place <= length
    content[:place].decode()


def test_a_cut_lies_where_a_line_begins_with_a_letter_else_at_a_line_else_at_a_space() -> None:
    assert cut_at(b"one\ntwo\n  three\n") == len(b"one\n")
    assert cut_at(b"one\n  two") == len(b"one\n")
    assert cut_at(b"one two") == len(b"one")
    assert cut_at("ööö".encode()[:5]) == 4


@pytest.mark.parametrize("kind", ["byte_level", "ranks"])
def test_the_fragments_of_a_document_have_the_tokens_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(texts, "FRAGMENT_BYTES", 300)
    path = small.byte_level(tmp_path / "t.json") if kind == "byte_level" else small.ranks(tmp_path / "t.tiktoken")
    tokenizer = open_tokenizer(str(path))
    whole = "".join(small.LINES)
    (tmp_path / "a.txt").write_text(whole)
    source = find_inputs([str(tmp_path / "a.txt")])[0]
    pieces = [fragment.text for fragment in Reader(Piece(source, 0, source.size_bytes, 0), Reading())]
    assert len(pieces) > 10 and all(re.match(r"\w", piece) for piece in pieces)
    joined = [token for tokens in tokenizer.encode(pieces) for token in tokens.tolist()]
    assert joined == tokenizer.encode([whole])[0].tolist()

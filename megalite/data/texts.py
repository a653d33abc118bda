"""Documents read out of files, in fragments, so that no file and no document need fit into memory.

A fragment is at most FRAGMENT_BYTES of one document. Tokenizers see fragments: in a longer document the cut comes just
before a letter or digit that begins a line, where every usual tokenizer cuts as well, or else at a line end, at a
space, at a character. Where it comes follows from the document alone. (A single line of JSON is read whole.)
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, NamedTuple

from megalite.data.errors import DataError
from megalite.data.inputs import JSON_LINES, PARQUET, Input, Piece, open_parquet, unchanged

FRAGMENT_BYTES = 1 << 20
BLOCK_BYTES = 1 << 20
ROWS = 256  # of parquet, read at once


class Fragment(NamedTuple):
    """A stretch of a document's text, `text_bytes` in UTF-8.

    counts: it is text to learn, not a prompt. ends: it is the document's last.
    """

    text: str
    text_bytes: int
    counts: bool = True
    ends: bool = True


@dataclass(frozen=True)
class Reading:
    """How documents lie in files.

    field: of JSON and parquet, what holds the text. prompt_field: what holds text that comes before it and does not
    count in the loss. split_on: what lies between two documents of a text file; None = the whole file is one.
    replace_invalid: what is not UTF-8 becomes U+FFFD; else it is refused.
    """

    field: str = "text"
    prompt_field: str | None = None
    split_on: str | None = None
    replace_invalid: bool = False

    @property
    def errors(self) -> str:
        return "replace" if self.replace_invalid else "strict"


class Reader:
    """The fragments of one piece, in order; `read_bytes` tells how much of the file they have taken so far.

    Raises DataError with the file and the line (of parquet, the row) for what cannot be read, and where the file has
    changed since it was found.
    """

    def __init__(self, piece: Piece, reading: Reading) -> None:
        self.piece, self.reading = piece, reading
        self.read_bytes = 0
        self._take = {JSON_LINES: self._json_lines, PARQUET: self._rows}.get(piece.source.kind, self._texts)

    def __iter__(self) -> Iterator[Fragment]:
        source = self.piece.source
        try:
            if unchanged(source):
                yield from self._take()
            if not unchanged(source):
                raise DataError(f"{source.path} has changed since this began; start over with --overwrite")
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{source.path} cannot be read ({error}); is it whole?") from None
        self.read_bytes = self.piece.size_bytes

    # ---- text

    def _texts(self) -> Iterator[Fragment]:
        separator = None if self.reading.split_on is None else self.reading.split_on.encode()
        with closing(_Opened(self.piece.source)) as opened:
            stop = self._stop()
            for offset, content, ends in _documents(opened.file, self.piece.start, stop, separator):
                content = content.removeprefix(b"\xef\xbb\xbf") if offset == 0 else content  # a byte order mark
                self.read_bytes = opened.position() - self.piece.start
                try:
                    text = content.decode(errors=self.reading.errors)
                except UnicodeDecodeError as error:
                    raise self._invalid(offset + error.start, error) from None
                yield Fragment(text, _bytes_of(text), ends=ends)

    def _stop(self) -> float:
        return float("inf") if self.piece.source.packed else self.piece.stop

    def _invalid(self, offset: int, error: UnicodeDecodeError) -> DataError:
        place = f"{self.piece.source.path}:{_line_at(self.piece.source, offset)}"
        return DataError(
            f"{place}: byte 0x{error.object[error.start]:02x} is not UTF-8 ({error.reason}); "
            "convert the file, or take --invalid-utf8 replace"
        )

    # ---- JSON

    def _json_lines(self) -> Iterator[Fragment]:
        with closing(_Opened(self.piece.source)) as opened:
            for offset, line in _lines(opened.file, self.piece.start, self._stop()):
                self.read_bytes = opened.position() - self.piece.start
                line = line.removeprefix(b"\xef\xbb\xbf") if offset == 0 else line
                if not line.strip():
                    continue
                try:
                    values = json.loads(line.decode(errors=self.reading.errors))
                except UnicodeDecodeError as error:
                    raise self._invalid(offset, error) from None
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{self._line(offset)}: this is no JSON ({error}); one object a line") from None
                if not isinstance(values, dict):
                    kind = type(values).__name__
                    raise DataError(f"{self._line(offset)}: this is a {kind}; each line must be an object")
                yield from self._document(values, partial(self._line, offset))

    def _line(self, offset: int) -> str:
        return f"{self.piece.source.path}:{_line_at(self.piece.source, offset)}"

    # ---- parquet

    def _rows(self) -> Iterator[Fragment]:
        path = self.piece.source.path
        with closing(open_parquet(path)) as file:
            fields = [name for name in (self.reading.field, self.reading.prompt_field) if name is not None]
            there = file.schema_arrow.names
            for name in fields:
                if name not in there:
                    raise DataError(f"{path} has no column {name!r}, only {', '.join(there)}; name one with --field")
            groups = range(self.piece.start, self.piece.stop)
            row = sum(file.metadata.row_group(group).num_rows for group in range(self.piece.start))
            batches = file.iter_batches(ROWS, row_groups=list(groups), columns=fields, use_threads=False)
            for batch in batches:
                for values in batch.to_pylist():
                    row += 1
                    yield from self._document(values, f"{path}: row {row}".__str__)

    # ---- objects

    def _document(self, values: dict[str, Any], place: Callable[[], str]) -> Iterator[Fragment]:
        text = self._field(values, self.reading.field, place)
        if self.reading.prompt_field is not None and text:
            for fragment in self._fragments(self._field(values, self.reading.prompt_field, place), place):
                yield fragment._replace(counts=False, ends=False)
        yield from self._fragments(text, place)

    def _field(self, values: dict[str, Any], name: str, place: Callable[[], str]) -> str:
        if name not in values:
            option = "--field" if name == self.reading.field else "--prompt-field"
            there = ", ".join(map(str, values)) or "none"
            raise DataError(f"{place()}: there is no field {name!r}, only {there}; name one with {option}")
        if not isinstance(values[name], str):
            raise DataError(f"{place()}: field {name!r} is of type {type(values[name]).__name__}, and text is needed")
        return values[name]

    def _fragments(self, text: str, place: Callable[[], str]) -> Iterator[Fragment]:
        try:
            text_bytes = _bytes_of(text)
        except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, and no text can hold one
            if not self.reading.replace_invalid:
                raise DataError(
                    f"{place()}: {error.object[error.start]!r} is half of a pair and no character; "
                    "mend the line, or take --invalid-utf8 replace"
                ) from None
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            text_bytes = _bytes_of(text)
        if text_bytes <= FRAGMENT_BYTES:
            yield Fragment(text, text_bytes)
            return
        for content, ends in _in_fragments(text.encode()):
            yield Fragment(content.decode(), len(content), ends=ends)


class _Opened:
    """A file, unpacked where it is packed, and where in the file on disk reading stands."""

    def __init__(self, source: Input) -> None:
        self._raw = open(source.path, "rb", buffering=BLOCK_BYTES)  # noqa: SIM115
        self.file: Any = gzip.GzipFile(fileobj=self._raw) if source.packed else self._raw

    def position(self) -> int:
        return self._raw.tell()

    def close(self) -> None:
        self.file.close()
        self._raw.close()


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _line_at(source: Input, offset: int) -> int:
    """The number, from 1, of the line that holds a byte."""
    with closing(_Opened(source)) as opened:
        line = 1
        while offset > 0 and (block := opened.file.read(min(offset, BLOCK_BYTES))):
            line += block.count(b"\n")
            offset -= len(block)
    return line


def _lines(file: IO[bytes], start: int, stop: float) -> Iterator[tuple[int, bytes]]:
    """(offset, line) of the lines that begin in [start, stop)."""
    offset = start
    if start:
        file.seek(start - 1)
        offset += len(file.readline()) - 1  # the rest of a line that began before, or its end alone
    while offset < stop and (line := file.readline()):
        yield offset, line
        offset += len(line)


def _documents(file: IO[bytes], start: int, stop: float, separator: bytes | None) -> Iterator[tuple[int, bytes, bool]]:
    """(offset, content, whether it is the document's last) of fragments of the documents that begin in [start, stop).

    A document begins at 0 and wherever the bytes just before are the separator, so ranges can be read apart. What
    lies between two of them is empty in a run of separators (as of blank lines) and is no document then.
    """
    overlap = 0 if separator is None else len(separator) - 1
    origin = max(0, start - overlap - 1)  # the offset of buffer[0]
    file.seek(origin)
    buffer, begin, cuts = b"", 0, 0  # `begin`: of what is not given yet; `cuts`: fragments given of this document
    searched = 0  # no separator begins in the buffer before this
    inside = start == 0
    while True:
        found = -1 if separator is None else buffer.find(separator, searched)
        known = len(buffer) - overlap if found < 0 else max(begin, found)  # where the document cannot end before
        while inside and known - begin > FRAGMENT_BYTES:
            length = cut_at(buffer[begin : begin + FRAGMENT_BYTES])
            yield origin + begin, buffer[begin : begin + length], False
            begin, cuts = begin + length, cuts + 1
        if found >= 0:
            assert separator is not None
            if inside and (known > begin or cuts):
                yield origin + begin, buffer[begin:known], True
            begin, cuts, inside = found + len(separator), 0, True
            searched = found + 1
            if origin + begin >= stop:
                return
            continue
        block = file.read(BLOCK_BYTES)
        if not block:
            if inside and (len(buffer) > begin or cuts or (start == 0 and origin + begin == 0)):
                yield origin + begin, buffer[begin:], True
            return
        searched = max(searched, len(buffer) - overlap)
        drop = min(searched, begin) if inside else searched
        buffer = buffer[drop:] + block
        origin, begin, searched = origin + drop, begin - drop, searched - drop


def _in_fragments(content: bytes) -> Iterator[tuple[bytes, bool]]:
    begin = 0
    while len(content) - begin > FRAGMENT_BYTES:
        length = cut_at(content[begin : begin + FRAGMENT_BYTES])
        yield content[begin : begin + length], False
        begin += length
    yield content[begin:], True


def cut_at(content: bytes) -> int:
    """Where to cut a stretch of a longer text: after so many bytes, at least one, never within a character."""
    end = content.rfind(b"\n", 0, -1)
    while end >= 0 and not content[end + 1 : end + 2].isalnum():
        end = content.rfind(b"\n", 0, end)
    if end >= 0:
        return end + 1
    for place in (content.rfind(b"\n") + 1, content.rfind(b" ")):
        if place > 0:
            return place
    length = len(content)
    while length > max(1, len(content) - 4) and content[length - 1] & 0xC0 == 0x80:
        length -= 1  # behind the character's continuation bytes
    if length > 1 and content[length - 1] >= 0xC0:
        return length - 1
    return len(content)

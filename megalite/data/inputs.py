"""What is to be tokenized: files found by their names, and cut into parts that workers take one at a time.

    .jsonl .ndjson .json    one JSON object a line
    .parquet                one document a row (extra parquet)
    anything else           text; from a folder only .txt, .text and .md are taken
    one of these + .gz      unpacked on the way (parquet packs itself)

A part is a run of pieces. A piece is the lines of a file that begin within a range of bytes (documents, for text that
is split), a range of row groups, or a whole file where it has no such ends: a text that is one document, or what is
packed. The parts follow from the files and `part_bytes` alone, never from the number of workers.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megalite.data.errors import DataError

TEXT, JSON_LINES, PARQUET = "text", "jsonl", "parquet"
KINDS = {
    ".jsonl": JSON_LINES, ".ndjson": JSON_LINES, ".json": JSON_LINES, ".parquet": PARQUET,
    ".txt": TEXT, ".text": TEXT, ".md": TEXT,
}  # fmt: skip
MOST_PARTS = 4096
"""A part is larger than asked for where there would be more: each is a few files until the end."""


class Input(NamedTuple):
    """A file. packed: by gzip. size_bytes, modified_ns: by which a change is noticed."""

    path: str
    kind: str
    packed: bool
    size_bytes: int
    modified_ns: int


class Piece(NamedTuple):
    """What begins in [start, stop) of an input: bytes, or row groups of parquet. size_bytes: its share of the file."""

    source: Input
    start: int
    stop: int
    size_bytes: int


Part = tuple[Piece, ...]


def find_inputs(names: Sequence[str]) -> list[Input]:
    """The files that are meant, in the order given; those of a folder (at any depth) and of a pattern, sorted.

    Raises DataError, in one line, for what is not there, cannot be read, is packed in a way that is not known, or is
    named twice.
    """
    found = [_input(path) for name in names for path in _paths(name)]
    seen: set[str] = set()
    for one in found:
        if one.path in seen:
            raise DataError(f"{one.path} is named twice, and its text would count twice; name it once")
        seen.add(one.path)
    return found


def _paths(name: str) -> list[str]:
    if os.path.isdir(name):
        paths = [str(path) for path in Path(name).rglob("*") if _kind(path)[0] is not None and path.is_file()]
        if not paths:
            raise DataError(f"{name} holds no file that ends in {' '.join(KINDS)}, or these + .gz; name files")
        return sorted(paths)
    if os.path.lexists(name):
        return [name]
    paths = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
    if not paths:
        raise DataError(f"{name} does not exist, nor any file that fits it as a pattern (looked in {Path.cwd()})")
    return paths


def _kind(path: Path) -> tuple[str | None, bool]:
    """The kind that a name tells of, if it does, and whether it is packed."""
    packed = path.suffix == ".gz"
    return KINDS.get((path.with_suffix("") if packed else path).suffix.lower()), packed


def _input(name: str) -> Input:
    kind, packed = _kind(Path(name))
    if name.endswith((".zst", ".xz", ".bz2", ".zip")) or (packed and kind == PARQUET):
        raise DataError(f"{name} is packed in a way that is not read here (.gz is); unpack it first")
    try:
        status = os.stat(name)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{name} is not a regular file, and a run that goes on reads its input again; copy it")
        with open(name, "rb"):
            pass
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror}); name files that you may read") from None
    return Input(os.path.abspath(name), kind or TEXT, packed, status.st_size, status.st_mtime_ns)


def unchanged(source: Input) -> bool:
    """Whether a file still is what was found, by its size and time."""
    try:
        status = os.stat(source.path)
    except OSError:
        return False
    return (status.st_size, status.st_mtime_ns) == (source.size_bytes, source.modified_ns)


def cut(inputs: Sequence[Input], *, part_bytes: int, split_text: bool) -> list[Part]:
    """The parts: neighbours joined until they have `part_bytes`, what is larger cut where it can be.

    split_text: a text file is many documents, so it can be cut.
    """
    assert part_bytes > 0, part_bytes
    most = max(part_bytes, sum(one.size_bytes for one in inputs) // MOST_PARTS)
    parts: list[Part] = []
    waiting: list[Piece] = []
    for source in inputs:
        for piece in _pieces(source, most=most, split_text=split_text):
            if waiting and sum(one.size_bytes for one in waiting) + piece.size_bytes > most:
                parts.append(tuple(waiting))
                waiting = []
            waiting.append(piece)
    return [*parts, tuple(waiting)] if waiting else parts


def _pieces(source: Input, *, most: int, split_text: bool) -> Iterator[Piece]:
    size = source.size_bytes
    if source.kind == PARQUET:
        for group, group_bytes in enumerate(_group_bytes(source)):
            yield Piece(source, group, group + 1, group_bytes)
    elif source.packed or (source.kind == TEXT and not split_text):
        yield Piece(source, 0, size, size)
    else:
        for start in range(0, size, most):
            stop = min(start + most, size)
            yield Piece(source, start, stop, stop - start)


def _group_bytes(source: Input) -> list[int]:
    """Bytes of each row group, on any scale that sums to the file's."""
    rows = [group.num_rows for group in _groups(open_parquet(source.path))]
    ends = [source.size_bytes * sum(rows[: n + 1]) // max(1, sum(rows)) for n in range(len(rows))]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def _groups(file: Any) -> list[Any]:
    return [file.metadata.row_group(number) for number in range(file.num_row_groups)]


def open_parquet(path: str) -> Any:
    """The file as pyarrow reads it. ValueError without pyarrow, DataError where it is no parquet."""
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ValueError(
            f"{path}: parquet needs the library pyarrow, which is not installed: pip install 'megalite[parquet]'"
        ) from None
    try:
        return parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise DataError(f"{path} is no parquet file ({str(error).splitlines()[0]}); write it anew") from None

"""What a token file holds, in lines to read; of a text, what reading it as bytes gives."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.data.errors import DataError
from megalite.data.indexed import Indexed, open_indexed
from megalite.data.inputs import find_inputs
from megalite.data.meta import Meta, fingerprint, is_indexed, read_meta
from megalite.data.tokenizers import Tokenizer, open_tokenizer

AT_ONCE = 1 << 16
"""Documents looked at together."""
SHOWN_TOKENS = 64


def inspect(path: str, *, sample: int, name: str | None = None) -> str:
    """A report on PREFIX (or one of its two files), or on a text. sample: documents whose beginnings are shown.

    name: the tokenizer that decodes them; None = the one that PREFIX.json names, and numbers where it cannot be opened.
    Raises DataError for what is neither, ValueError for a `name` that is no tokenizer.
    """
    if not is_indexed(path):
        return _of_text(path, sample=sample)
    found = open_indexed(path, key="inspect")
    meta = read_meta(found.prefix)
    tokenizer, why = _tokenizer(meta, name)
    end = meta.end_of_document if meta is not None else None if tokenizer is None else tokenizer.end_of_document
    lengths = _lengths(found)
    rows = [
        ("documents", f"{len(lengths.all):,}"),
        ("tokens", f"{len(found.tokens):,}"),
        ("bytes per token", _bytes_per_token(meta)),
        ("vocabulary", str(meta.vocab_size) if meta else f"unknown; at least {_largest(found) + 1}"),
        ("tokenizer", (meta.tokenizer if meta else None) or name or "unknown"),
        ("dtype", f"{found.tokens.dtype.name}"),
        ("fingerprint", fingerprint(path)),
        ("document lengths", f"shortest {lengths.shortest:,}, median {lengths.median:,}, longest {lengths.longest:,}"),
        ("end of document", _ends(found, lengths.all, end)),
    ]
    if found.mask is not None:
        rows.append(("counts in the loss", f"{_counted(found.mask):,} of {len(found.tokens):,} tokens"))
    return "\n".join([_table(rows), *_samples(found, sample, tokenizer, why)])


@dataclass(frozen=True)
class _Lengths:
    all: npt.NDArray[np.int64]

    @property
    def shortest(self) -> int:
        return int(self.all.min())

    @property
    def longest(self) -> int:
        return int(self.all.max())

    @property
    def median(self) -> int:
        middle = len(self.all) // 2
        return int(np.partition(self.all, middle)[middle])


def _of_text(path: str, *, sample: int) -> str:
    source = find_inputs([path])
    if len(source) != 1 or os.path.isdir(path):
        raise DataError(f"inspect {path}: give one token file or one text")
    if source[0].packed or not source[0].size_bytes:
        raise DataError(f"inspect {path}: {'packed' if source[0].packed else 'empty'}; give a token file or a text")
    with open(path, "rb") as file:
        shown = file.read(4 * SHOWN_TOKENS)
    rows = [
        ("documents", "1 (a text, read as bytes)"),
        ("tokens", f"{source[0].size_bytes:,}"),
        ("bytes per token", "1"),
        ("vocabulary", "256"),
        ("dtype", "uint8"),
        ("fingerprint", fingerprint(path)),
        ("end of document", "none"),
    ]
    return "\n".join([_table(rows), *([f"sample: {shown.decode(errors='replace')!r}"] if sample > 0 else [])])


def _tokenizer(meta: Meta | None, name: str | None) -> tuple[Tokenizer | None, str]:
    """The tokenizer, or why there is none."""
    if name is not None:
        return open_tokenizer(name), ""
    if meta is None:
        return None, "no tokenizer is known; name one with --tokenizer"
    try:
        return open_tokenizer(meta.tokenizer), ""
    except ValueError as error:
        return None, str(error)


def _lengths(found: Indexed) -> _Lengths:
    numbers = np.arange(len(found.documents), dtype=np.int64)
    ends = [found.documents.ends(numbers[start : start + AT_ONCE]) for start in range(0, len(numbers), AT_ONCE)]
    return _Lengths(np.diff(np.concatenate([np.zeros(1, dtype=np.int64), *ends])))


def _bytes_per_token(meta: Meta | None) -> str:
    return "unknown" if meta is None or not meta.tokens else f"{meta.text_bytes / meta.tokens:.3f}"


def _largest(found: Indexed) -> int:
    starts = range(0, len(found.tokens), 1 << 22)
    return max(int(found.tokens[start : start + (1 << 22)].max()) for start in starts)


def _counted(mask: npt.NDArray[np.uint8]) -> int:
    return sum(int(np.count_nonzero(mask[start : start + (1 << 22)])) for start in range(0, len(mask), 1 << 22))


def _ends(found: Indexed, lengths: npt.NDArray[np.int64], end: int | None) -> str:
    """Whether each document ends in one end-of-document token: not in none, and not in two."""
    if end is None:
        return "unknown"
    wrong, first, offset = 0, -1, 0
    for start in range(0, len(lengths), AT_ONCE):
        some = lengths[start : start + AT_ONCE]
        stops = offset + np.cumsum(some)
        last = found.tokens[np.maximum(stops - 1, 0)] == end
        two = (some > 1) & (found.tokens[np.maximum(stops - 2, 0)] == end)
        bad = np.flatnonzero((some == 0) | ~last | two)
        first = start + int(bad[0]) if len(bad) and first < 0 else first
        wrong, offset = wrong + len(bad), int(stops[-1])
    if not wrong:
        return f"{end}, exactly one at the end of each document"
    return f"{end}, but not exactly one ends {wrong:,} of {len(lengths):,} documents, the first of them {first}"


def _samples(found: Indexed, count: int, tokenizer: Tokenizer | None, why: str) -> list[str]:
    """The beginnings of some documents, evenly spread, as text or, with the reason, as numbers."""
    lines = [f"numbers are shown: {why}"] if tokenizer is None and count > 0 else []
    chosen = np.unique(np.linspace(0, len(found.documents) - 1, max(0, count)).astype(np.int64))
    for number in chosen.tolist():
        before, stop = (_end(found, one) for one in (number - 1, number))
        tokens = found.tokens[before : min(stop, before + SHOWN_TOKENS)].tolist()
        shown = repr(_decoded(tokenizer, tokens)) if tokenizer is not None else " ".join(map(str, tokens))
        lines.append(f"document {number}: {shown}{' ...' if stop - before > SHOWN_TOKENS else ''}")
    return lines


def _end(found: Indexed, document: int) -> int:
    """Where a document ends, in tokens; 0 for the one before the first."""
    return 0 if document < 0 else int(found.documents.ends(np.array([document], dtype=np.int64))[0])


def _decoded(tokenizer: Tokenizer, tokens: list[int]) -> str:
    beyond = [token for token in tokens if token >= tokenizer.vocab_size]
    if beyond:
        raise DataError(
            f"token {beyond[0]} is none of {tokenizer.name}, whose vocabulary is {tokenizer.vocab_size}; "
            "name the tokenizer that wrote the file with --tokenizer"
        )
    return tokenizer.decode(tokens)


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in rows)

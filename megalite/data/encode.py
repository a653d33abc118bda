"""One part of the input as tokens: fragments joined into documents, each with exactly one end."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.indexed import IndexedWriter, dtype_for
from megalite.data.inputs import Part
from megalite.data.texts import Fragment, Reader, Reading
from megalite.data.tokenizers import Tokenizer, Tokens, open_tokenizer

BATCH_BYTES = 1 << 20
"""Text that goes to the tokenizer at once; a library that takes one document at a time pays for each call."""


@dataclass(frozen=True)
class Job:
    """What is done with every part. tokenizer, end_of_document, special_tokens, pattern: as `open_tokenizer` says."""

    tokenizer: str
    end_of_document: str | None = None
    special_tokens: bool = False
    pattern: str | None = None
    reading: Reading = field(default_factory=Reading)

    @property
    def masked(self) -> bool:
        return self.reading.prompt_field is not None

    def open(self) -> Tokenizer:
        """The tokenizer, which has an end of document. Raises ValueError as `open_tokenizer`, and without an end."""
        opened = open_tokenizer(
            self.tokenizer,
            special_tokens=self.special_tokens,
            end_of_document=self.end_of_document,
            pattern=self.pattern,
        )
        if opened.end_of_document is None:
            raise ValueError(
                f"--tokenizer {self.tokenizer} names no token that ends a document; "
                "name one with --end-of-document, by its text or its id"
            )
        return opened


class Counts(NamedTuple):
    """Of some input: documents written, their tokens and bytes of text; documents skipped, since they were empty."""

    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    skipped: int = 0

    def plus(self, other: Counts, sign: int = 1) -> Counts:
        """The sum of both; with sign -1, the difference."""
        return Counts(*(a + sign * b for a, b in zip(self, other, strict=True)))


class Joined(NamedTuple):
    """Tokens of documents, one after another, and where those that are finished end; as `IndexedWriter.extend`."""

    tokens: Tokens
    ends: npt.NDArray[np.int64]
    mask: npt.NDArray[np.uint8]


class Joiner:
    """Fragments into documents. Each ends in exactly one end-of-document token.

    So those that a document's text ends in are taken off before one is put there; those within it stay. A document
    without any other token is skipped and counted.
    """

    def __init__(self, end_of_document: int, dtype: np.dtype[np.integer]) -> None:
        self.counts = Counts()
        self._end = np.array([end_of_document], dtype=dtype)
        self._begun = False  # the open document has a token that stays
        self._held = 0  # ends of document that the open document's text has come to: within it, if more comes
        self._text_bytes = 0

    def join(self, fragments: list[Fragment], tokens: list[Tokens]) -> Joined:
        """A batch of fragments with their tokens; a document may go on from the last batch and into the next."""
        pieces: list[Tokens] = []
        counted: list[tuple[int, bool]] = []  # runs of the mask: length, value
        ends: list[int] = []
        length = text_bytes = skipped = 0
        last = int(self._end[0])
        for fragment, row in zip(fragments, tokens, strict=True):
            self._text_bytes += fragment.text_bytes
            kept = len(row)
            while kept and row[kept - 1] == last:
                kept -= 1
            held, self._held = self._held, len(row) - kept + (0 if kept else self._held)
            if kept:
                if held:
                    pieces.append(np.repeat(self._end, held))
                pieces.append(row[:kept])
                counted.append((kept + held, fragment.counts))
                length, self._begun = length + kept + held, True
            if fragment.ends:
                if self._begun:
                    pieces.append(self._end)
                    counted.append((1, True))
                    length += 1
                    ends.append(length)
                    text_bytes += self._text_bytes
                else:
                    skipped += 1
                self._begun, self._held, self._text_bytes = False, 0, 0
        self.counts = self.counts.plus(Counts(len(ends), length, text_bytes, skipped))
        joined = np.concatenate(pieces or [self._end[:0]])  # in the widest type: the writer sees what does not fit
        runs, values = zip(*counted, strict=True) if counted else ((), ())
        mask = np.repeat(np.array(values, dtype=np.uint8), np.array(runs, dtype=np.int64))
        return Joined(joined, np.array(ends, dtype=np.int64), mask)


def batches(fragments: Iterable[Fragment]) -> Iterator[list[Fragment]]:
    """Runs of fragments of about BATCH_BYTES of text."""
    batch: list[Fragment] = []
    size = 0
    for fragment in fragments:
        batch.append(fragment)
        size += fragment.text_bytes
        if size >= BATCH_BYTES or len(batch) >= BATCH_BYTES // 16:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_part(
    part: Part, job: Job, tokenizer: Tokenizer, *, prefix: str, progress: Callable[[Counts, int], None]
) -> Counts:
    """Write the documents of a part as the pair `prefix`, or no pair if it has none; then `prefix`.done, its counts.

    progress: called after each batch with what the part has so far, and the bytes of its files that were read.
    Raises DataError as `Reader`.
    """
    assert tokenizer.end_of_document is not None
    dtype = dtype_for(tokenizer.vocab_size)
    joiner = Joiner(tokenizer.end_of_document, dtype)
    read_before = 0
    with ExitStack() as stack:
        out: IndexedWriter | None = None
        for piece in part:
            reader = Reader(piece, job.reading)
            for batch in batches(reader):
                joined = joiner.join(batch, tokenizer.encode([fragment.text for fragment in batch]))
                if len(joined.tokens):
                    out = out or stack.enter_context(IndexedWriter(prefix, dtype, masked=job.masked))
                    out.extend(joined.tokens, joined.ends, joined.mask if job.masked else None)
                progress(joiner.counts, read_before + reader.read_bytes)
            read_before += piece.size_bytes
    temporary = Path(f"{prefix}.done.{os.getpid()}")
    temporary.write_text(json.dumps(joiner.counts._asdict()), encoding="utf-8")
    os.replace(temporary, f"{prefix}.done")
    return joiner.counts


def read_counts(prefix: str) -> Counts | None:
    """What `encode_part` counted, None where the part is not finished."""
    try:
        return Counts(**json.loads(Path(f"{prefix}.done").read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None

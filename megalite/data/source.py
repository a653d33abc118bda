"""Sources: long rows of tokens on disk, mapped into memory and never copied as a whole."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from megalite.data.documents import Documents
from megalite.data.errors import DataError
from megalite.data.split import PERIOD, Part, Split, chunk_tokens, largest_seq_len

Int64s = npt.NDArray[np.int64]

BYTE_VOCABULARY = 256
IGNORED = -100  # the label that no loss counts, as in torch's cross_entropy


@dataclass(frozen=True, eq=False)
class Source:
    """A row of tokens that does not change while it is read.

    name: what messages call it (for a file, its path as the user wrote it). tokens: a one-dimensional integer array of
    any width, as a rule a read-only memory map. vocab_size: one more than the largest token it may hold, checked at
    each read; vocabulary: who says so. documents: where its documents end, None if it is one. mask: one entry a token,
    0 for those that are not to be predicted. token_bytes: how many bytes of text each token of the vocabulary stands
    for; mean_bytes: a token on average; tokenizer: its name; None where that is unknown. fingerprint: what it is
    recognised by.

    Another file format is another way to make one; nothing past this class knows where tokens come from.
    """

    name: str
    tokens: npt.NDArray[np.integer]
    vocab_size: int
    vocabulary: str = "its vocabulary"
    documents: Documents | None = None
    mask: npt.NDArray[np.uint8] | None = None
    token_bytes: npt.NDArray[np.int32] | None = None
    mean_bytes: float | None = None
    tokenizer: str | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        assert self.tokens.ndim == 1 and self.tokens.dtype.kind in "iu", (self.tokens.shape, self.tokens.dtype)
        object.__setattr__(self, "tokens", np.asarray(self.tokens))  # slices of np.memmap's own class cost more

    def __len__(self) -> int:
        """Tokens."""
        return len(self.tokens)

    def read(self, starts: Int64s, length: int) -> Int64s:
        """Tokens [start, start + length) of each start: (rows,) -> (rows, length) int64.

        Raises IndexError outside the source (a negative start would otherwise read from the end, in silence), DataError
        for a token that the vocabulary does not have.
        """
        if starts.size and not (starts.min() >= 0 and starts.max() <= len(self) - length):
            raise IndexError(f"{self.name}: {length} tokens from {starts.min()} to {starts.max()} on, of {len(self)}")
        rows = rows_at(self.tokens, starts, length).astype(np.int64)
        # As unsigned, a negative number is a large one.
        if rows.size and rows.view(np.uint64).max() >= self.vocab_size:
            row, place = np.argwhere(rows.view(np.uint64) >= self.vocab_size)[0].tolist()
            raise DataError(
                f"{self.name}: token {rows[row, place]} at place {starts[row] + place} is outside of {self.vocabulary}="
                f"{self.vocab_size}; take a vocabulary of at least {rows.max() + 1}, or write the file anew"
            )
        return rows

    def label_bytes(self, labels: Int64s) -> float | None:
        """How many bytes of text these tokens stand for, all together; None where nothing says so."""
        if self.token_bytes is not None:
            return float(self.token_bytes[labels].sum(dtype=np.int64))
        return None if self.mean_bytes is None else labels.size * self.mean_bytes

    def split(self, seq_len: int, *, longest: int | None = None, period: int = PERIOD) -> Split:
        """The training and validation parts for windows of seq_len + 1 tokens; the rest as `Split` has it.

        Raises DataError if the source is too small to hold a window in each part, with both numbers and the largest
        legal seq_len.
        """
        longest = max(seq_len, longest or 0)
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len} is not a length; take 1 or more")
        largest = largest_seq_len(len(self), period=period)
        if longest > largest:
            chunk = chunk_tokens(longest)
            needs = f"{2 * chunk}, two chunks of {chunk} (one for training, one for validation)"
            way_out = f"take seq_len of {largest} at most, or a longer text" if largest else "take a longer text"
            raise DataError(
                f"data.paths: {self.name} holds {len(self)} tokens, but seq_len={longest} needs "
                f"{needs if period else longest + 1}; {way_out}"
            )
        return Split(len(self), seq_len, longest, period)

    def windows(self, seq_len: int, part: Part, *, longest: int | None = None, period: int = PERIOD) -> Windows:
        """The windows of one part, readable in any order. Raises DataError as `split` does."""
        return Windows(self, self.split(seq_len, longest=longest, period=period), part)

    def describe(self) -> str:
        """For the run's header: name, size, fingerprint."""
        size = f"{len(self)} tokens ({self.tokens.dtype})" if self.tokens.dtype != np.uint8 else f"{len(self)} bytes"
        documents = f", {len(self.documents)} documents" if self.documents is not None else ""
        return f"{self.name}: {size}{documents}" + (f", fingerprint {self.fingerprint}" if self.fingerprint else "")


class Labelled(NamedTuple):
    """Windows as what a model reads and what it should say; (rows, seq_len) int64 each.

    labels: IGNORED where nothing is to be predicted. documents: the number of each token's document, counted from 0
    within its window; None where they were not asked for.
    """

    tokens: Int64s
    labels: Int64s
    documents: Int64s | None


@dataclass(frozen=True)
class Windows:
    """The windows of one part of a source: `len()` of them, each seq_len + 1 tokens, addressed by an index."""

    source: Source
    split: Split
    part: Part

    def __len__(self) -> int:
        return self.split.windows(self.part)

    def read(self, indices: Int64s) -> Int64s:
        """(rows,) -> (rows, seq_len + 1) int64. Raises IndexError outside [0, len()), DataError as `Source.read`."""
        return self.source.read(self._starts(indices), self.split.seq_len + 1)

    def labelled(self, indices: Int64s, *, separate: bool = False) -> Labelled:
        """(rows,) -> the windows as tokens and labels, each of its own memory. Errors as `read`.

        A label that the source's mask leaves out is IGNORED. With `separate`, documents are told and so is the label
        at a document's last token, which would be the first of the next one.
        """
        source, length = self.source, self.split.seq_len + 1
        starts = self._starts(indices)
        rows = source.read(starts, length)
        tokens, labels = rows[:, :-1].copy(), rows[:, 1:].copy()
        if source.mask is not None:
            labels[rows_at(source.mask, starts, length)[:, 1:] == 0] = IGNORED
        if not separate:
            return Labelled(tokens, labels, None)
        if source.documents is None:
            return Labelled(tokens, labels, np.zeros_like(tokens))
        documents = source.documents.along(starts, length, name=source.name)
        labels[documents[:, 1:] != documents[:, :-1]] = IGNORED
        return Labelled(tokens, labels, documents[:, :-1].copy())

    def _starts(self, indices: Int64s) -> Int64s:
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"{self.source.name}: windows {indices.min()} to {indices.max()} of {len(self)}")
        return self.split.starts(self.part, indices)


def rows_at(array: npt.NDArray[Any], starts: Int64s, length: int) -> npt.NDArray[Any]:
    """Rows [start, start + length) of an array, copied: (rows,) -> (rows, length); one pass, no array of indices."""
    return sliding_window_view(array, length)[starts]


def map_bytes(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """A file as a read-only row of bytes. Pages are read on use and shared by all processes of the machine."""
    return np.memmap(path, dtype=np.uint8, mode="r")

"""Where documents end, asked for window by window: nothing here grows with how many there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.data.errors import DataError

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Packed:
    """An array of whole numbers within a mapped file, at any byte, of which single entries are read.

    NumPy's own search and `take` copy an array whose address its type does not like, the whole of it; rows of bytes
    have no such address.
    """

    rows: npt.NDArray[np.uint8]
    dtype: str

    @classmethod
    def within(cls, content: npt.NDArray[np.uint8], start: int, dtype: str, count: int) -> Packed:
        """`count` numbers from byte `start` of the content on."""
        size = np.dtype(dtype).itemsize
        return cls(content[start : start + count * size].reshape(count, size), dtype)

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, places: Int64s) -> Int64s:
        """The numbers at these places: (count,) -> (count,) int64."""
        return self.rows[places].view(self.dtype)[:, 0].astype(np.int64)


class Documents(ABC):
    """The documents of a source: `len()` of them, one after another; their last one ends where the source does."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def ends(self, documents: Int64s) -> Int64s:
        """The offset just past each document's last token: (count,) numbers -> (count,) int64, never falling."""

    def holding(self, offsets: Int64s) -> Int64s:
        """The document that each token lies in: the first that ends past it. (count,) offsets -> (count,) numbers."""
        low, high = np.zeros_like(offsets), np.full_like(offsets, len(self) - 1)
        for _ in range((len(self) - 1).bit_length()):
            middle = (low + high) // 2
            past = self.ends(middle) > offsets
            low, high = np.where(past, low, np.minimum(middle + 1, high)), np.where(past, middle, high)
        return low

    def along(self, starts: Int64s, length: int, *, name: str = "") -> Int64s:
        """The documents along windows of `length` tokens, counted within each: (rows,) -> (rows, length) from 0 up.

        Raises DataError, with the source's name, where ends fall: a damaged index.
        """
        first, last = self.holding(starts), self.holding(starts + length - 1)
        inside = last - first  # how many documents end within each window
        rows = np.repeat(np.arange(len(starts)), np.maximum(inside, 0))
        nth = np.arange(len(rows)) - np.repeat(np.cumsum(inside) - inside, inside)
        begins = self.ends(first[rows] + nth) - starts[rows]
        falls = (np.diff(begins) < 0) & (np.diff(rows) == 0)
        if (inside < 0).any() or ((begins < 1) | (begins >= length)).any() or falls.any():
            raise DataError(
                f"{name}: its documents' ends do not rise from token {starts.min()} to {starts.max() + length}; "
                "the index is damaged: write the file anew"
            )
        steps = np.zeros((len(starts), length), dtype=np.int64)
        steps[rows, begins] = 1  # not added: an empty document begins where the next one does
        return steps.cumsum(axis=1)


@dataclass(frozen=True)
class Ends(Documents):
    """Documents whose ends are a plain array, of as many numbers."""

    offsets: Int64s

    def __len__(self) -> int:
        return len(self.offsets)

    def ends(self, documents: Int64s) -> Int64s:
        return self.offsets[documents]

"""Sources: long rows of tokens on disk, mapped into memory and never copied as a whole."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalite.data.split import CHUNK, Part, Split, chunk_tokens, largest_seq_len

BYTE_VOCABULARY = 256


class DataError(ValueError):
    """The data that the user named cannot be used; one line with the config key, the numbers and the way out."""


class Source:
    """A row of tokens that does not change while it is read.

    name is what messages call it (for a file, its path as the user wrote it); tokens is a one-dimensional integer
    array of any width, as a rule a read-only memory map; vocab_size is one more than the largest token it may hold.
    Another file format is another way to make `tokens`; nothing past this class knows where they come from.
    """

    def __init__(self, name: str, tokens: npt.NDArray[np.integer], *, vocab_size: int) -> None:
        assert tokens.ndim == 1 and tokens.dtype.kind in "iu", (tokens.shape, tokens.dtype)
        self.name = name
        self.vocab_size = vocab_size
        self._tokens = np.asarray(tokens)  # a plain view: slicing np.memmap's own class costs some microseconds a row

    def __len__(self) -> int:
        """Tokens."""
        return len(self._tokens)

    def read(self, starts: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
        """Tokens [start, start + length) of each start: (rows,) -> (rows, length) int64.

        Raises IndexError outside the source: a negative start would otherwise read from the end, a late one be
        short, in silence.
        """
        out = np.empty((len(starts), length), dtype=np.int64)
        for row, start in zip(out, starts.tolist(), strict=True):
            if not 0 <= start <= len(self) - length:
                raise IndexError(f"{self.name}: tokens [{start}, {start + length}) of {len(self)}")
            row[:] = self._tokens[start : start + length]
        return out

    def view(self, start: int, stop: int) -> npt.NDArray[np.integer]:
        """Tokens [start, stop) of the file itself, in the file's own width."""
        return self._tokens[start:stop]

    def split(self, seq_len: int) -> Split:
        """The training and validation parts for windows of seq_len + 1 tokens.

        Raises DataError if the source is too small to hold a window in each part, with both numbers and the largest
        legal seq_len.
        """
        if seq_len < 1:
            raise DataError(f"seq_len={seq_len} is not a length; take 1 or more")
        largest = largest_seq_len(len(self))
        if seq_len > largest:
            needed = 2 * chunk_tokens(seq_len)
            way_out = f"take seq_len of {largest} at most, or a longer text" if largest else "take a longer text"
            raise DataError(
                f"data.paths: {self.name} holds {len(self)} tokens, but seq_len={seq_len} needs {needed}, "
                f"two chunks of {needed // 2} (one for training, one for validation); {way_out}"
            )
        return Split(len(self), seq_len)

    def windows(self, seq_len: int, part: Part) -> Windows:
        """The windows of one part, readable in any order. Raises DataError as `split` does."""
        return Windows(self, self.split(seq_len), part)

    def describe(self, seq_len: int) -> str:
        """One line for the run's header: name, size, windows of each part."""
        split = self.split(seq_len)
        return (
            f"{self.name}: {self._tokens.nbytes} bytes, {split.windows(Part.TRAIN)} training windows, "
            f"{split.windows(Part.VALIDATION)} validation windows of {seq_len}"
        )


@dataclass(frozen=True)
class Windows:
    """The windows of one part of a source: `len()` of them, each seq_len + 1 tokens, addressed by an index."""

    source: Source
    split: Split
    part: Part

    def __len__(self) -> int:
        return self.split.windows(self.part)

    def read(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """(rows,) -> (rows, seq_len + 1) int64. Raises IndexError outside [0, len())."""
        if indices.size and not (indices.min() >= 0 and indices.max() < len(self)):
            raise IndexError(f"{self.source.name}: windows {indices.min()} to {indices.max()} of {len(self)}")
        return self.source.read(self.split.starts(self.part, indices), self.split.seq_len + 1)


def open_text(path: str | os.PathLike[str], *, key: str = "data.paths") -> Source:
    """A text file of one's own, as bytes, memory-mapped; no encoding is assumed and nothing is read yet.

    Raises DataError naming `key` and the path if it is missing, not a regular file, empty, too small for any
    seq_len, or unreadable.
    """
    name = os.fspath(path)
    try:
        status = os.stat(path)
    except FileNotFoundError:
        raise DataError(
            f"{key}: {name} does not exist (looked in {Path.cwd()}); give the path of a text file"
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{key}: {name} cannot be read ({_reason(error)}); give the path of a text file") from None
    if stat.S_ISDIR(status.st_mode):
        inside = os.path.join(name, "my.txt")
        raise DataError(f"{key}: {name} is a directory; list the files in it, as in data.paths=[{inside}]")
    if not stat.S_ISREG(status.st_mode):  # opening a named pipe would wait for its writer
        raise DataError(f"{key}: {name} is not a regular file, and only those can be memory-mapped; copy it into one")
    if status.st_size < 2 * CHUNK:  # mapping an empty file fails with a message that does not name it
        raise DataError(f"{key}: {name} holds {status.st_size} bytes, and the least is {2 * CHUNK}; give a longer text")
    try:
        tokens = map_bytes(path)
    except OSError as error:
        raise DataError(f"{key}: {name} cannot be read ({_reason(error)}); give a file that you may read") from None
    return Source(name, tokens, vocab_size=BYTE_VOCABULARY)


def open_texts(paths: Sequence[str | os.PathLike[str]], *, key: str = "data.paths") -> list[Source]:
    """One source a file, in the order given. Raises DataError as `open_text` does, with the file's place in it."""
    return [open_text(path, key=f"{key}[{place}]") for place, path in enumerate(paths)]


def map_bytes(path: str | os.PathLike[str]) -> npt.NDArray[np.uint8]:
    """A file as a read-only row of bytes. Pages are read on use and shared by all processes of the machine."""
    return np.memmap(path, dtype=np.uint8, mode="r")


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)

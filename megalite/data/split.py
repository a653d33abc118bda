"""Which tokens are for training and which for validation: arithmetic on a few integers, no list of windows anywhere.

A source of tokens is laid out in chunks. Every `validation_period`-th chunk is validation, what lies between two of
them is a training run:

    chunk   0  1  2 ... 18 | 19 | 20 21 ... 38 | 39 | ...
            training run 0 | v0 | run 1        | v1 | ...

Rules:

1. A chunk is 4096 tokens; where the longest window of the run is longer, the smallest multiple of 4096 that holds one.
   It is the same for all sequence lengths of a run, so what one of them trains on is never another's validation.
2. The period is 20 chunks, or what data.validation_period says. A source with fewer whole chunks has a period of as
   many as it has, so its last whole chunk is validation: any source of two chunks has both parts. A period of 0 makes
   the whole source one training run.
3. A window is seq_len + 1 tokens (inputs and labels overlap in all but one) and lies within one run: none crosses
   from one part into the other. Within a run windows step by seq_len, so two neighbours share one token, the last
   label of one and the first input of the next, and every token but a run's first is a label at most once. What is
   left at a run's end (less than seq_len labels) is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

CHUNK = 4096
PERIOD = 20


class Part(str, Enum):
    """One of the two parts of a source."""

    TRAIN = "train"
    VALIDATION = "validation"


def chunk_tokens(seq_len: int) -> int:
    """The chunk for windows of seq_len + 1 tokens: the smallest multiple of 4096 that holds one."""
    return CHUNK * -(-(seq_len + 1) // CHUNK)


def largest_seq_len(tokens: int, *, period: int = PERIOD) -> int:
    """The longest seq_len that this many tokens can serve; 0 if there is none.

    Two whole chunks are needed; where nothing is kept for validation (period 0), one window.
    """
    return max(0, CHUNK * (tokens // (2 * CHUNK)) - 1 if period else tokens - 1)


@dataclass(frozen=True)
class Split:
    """The two parts of a source of `tokens` tokens, for windows of `seq_len` + 1.

    longest: the longest seq_len of the run, by which chunks are made; None: this one. A pure function of these numbers.
    All offsets and counts are in tokens and int64, so a source may be as long as a disk. `Source.split` is the way to
    make one from what a user chose: it refuses with the name of the source.
    """

    tokens: int
    seq_len: int
    longest: int | None = None
    validation_period: int = PERIOD

    def __post_init__(self) -> None:
        longest = self.longest or self.seq_len
        assert 1 <= self.seq_len <= longest <= largest_seq_len(self.tokens, period=self.validation_period), self
        assert self.validation_period != 1, "nothing would be left to train on"

    @property
    def chunk(self) -> int:
        """Tokens in a chunk."""
        return chunk_tokens(self.longest or self.seq_len)

    @property
    def period(self) -> int:
        """Chunks from one validation chunk to the next; 0: there is none."""
        return min(self.validation_period, self.tokens // self.chunk)

    @property
    def _stride(self) -> int:
        """Tokens from one run of a part to the next."""
        return self.period * self.chunk or self.tokens

    def run_bounds(self, part: Part) -> tuple[int, int]:
        """Where the part's run begins and ends within a period."""
        border = (self.period - 1) * self.chunk if self.period else self.tokens
        return (0, border) if part is Part.TRAIN else (border, self._stride)

    def _windows_in(self, run_tokens: int) -> int:
        return max(0, run_tokens - 1) // self.seq_len

    def windows(self, part: Part) -> int:
        """How many windows the part holds: those of the whole runs and those of the last, which may be cut short."""
        begin, end = self.run_bounds(part)
        whole, rest = divmod(self.tokens, self._stride)
        return whole * self._windows_in(end - begin) + self._windows_in(min(rest, end) - begin)

    def starts(self, part: Part, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The offset of each window's first token. indices: int64, any shape, each in [0, windows(part))."""
        begin, end = self.run_bounds(part)
        run, window = np.divmod(indices, self._windows_in(end - begin))
        return run * self._stride + begin + window * self.seq_len

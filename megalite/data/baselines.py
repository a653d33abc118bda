"""What a model must beat: the loss of guessing by counts alone.

Two tables counted on the training part, scored on the validation part, in nats per token, as the training loss is:

- unigram: how often each token occurs. H(token) = -mean log p(next).
- bigram: how often each token follows each other one. H(next | token) = -mean log p(next | token).

Counts are smoothed by adding one (Laplace), so no validation token is impossible:

    p(b) = (count(b) + 1) / (total + V)        p(b | a) = (count(a, b) + 1) / (count(a) + V)        V the vocabulary

A loss well below the bigram's means that the model uses more than the last token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megalite.data.source import IGNORED, Windows

Int64s = npt.NDArray[np.int64]

LARGEST_TABLE_SIDE = 4096  # a table of pairs has the square of this
MOST_TOKENS = 1 << 24
PIECE_TOKENS = 1 << 16  # read at a stretch: fewer seeks than windows
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Baselines:
    """Cross-entropy on the validation part, nats per token; bigram_nats is None for a vocabulary past 4096."""

    unigram_nats: float
    bigram_nats: float | None


def baselines_of(
    training: Sequence[Windows],
    validation: Sequence[Windows],
    *,
    separate: bool = False,
    most_tokens: int = MOST_TOKENS,
) -> Baselines | None:
    """Count the labels of the training windows, score those of the validation windows; None if there is none of either.

    Only labels that count in the loss (separate: as `Windows.labelled`) are counted, once each; weights of sources play
    no role. Where there are more than `most_tokens` in all, pieces spread evenly over each source are taken, an eighth
    of them for validation, so the time does not grow with the corpus.
    """
    vocab_size = max((windows.source.vocab_size for windows in (*training, *validation)), default=1)
    seen, scored = (
        _count(windows, vocab_size=vocab_size, separate=separate, most_tokens=most)
        for windows, most in ((training, most_tokens - most_tokens // 8), (validation, most_tokens // 8))
    )
    if not seen.any() or not scored.any():
        return None
    bigram = _cross_entropy(scored, seen) if seen.ndim == 2 else None
    unigram = _cross_entropy(scored.reshape(-1, vocab_size).sum(axis=0), seen.reshape(-1, vocab_size).sum(axis=0))
    return Baselines(unigram, bigram)


def _cross_entropy(scored: Int64s, seen: Int64s) -> float:
    """-mean over the scored counts of log p, with p from the seen counts by add-one along the last dim; nats."""
    smoothed = seen + 1.0
    log_p = np.log(smoothed) - np.log(smoothed.sum(axis=-1, keepdims=True))
    return float(-(scored * log_p).sum() / scored.sum())


def _pieces(windows: Sequence[Windows], *, most_tokens: int) -> Iterator[tuple[Windows, Int64s]]:
    """Numbers of windows next to each other, and whose they are: all of them, or as many as hold most_tokens."""
    total = sum(len(one) * one.split.seq_len for one in windows)
    for one in windows:
        together = max(1, min(PIECE_TOKENS, most_tokens // len(windows)) // one.split.seq_len)
        pieces = -(-len(one) // together)
        taken = pieces if total <= most_tokens else max(1, pieces * most_tokens // total)
        for piece in range(taken):
            first = piece * pieces // taken * together
            yield one, np.arange(first, min(first + together, len(one)))


def _count(windows: Sequence[Windows], *, vocab_size: int, separate: bool, most_tokens: int) -> Int64s:
    """How often each token follows each: (V, V), or (V,), how often it follows any, for a large V."""
    shape = (vocab_size,) * (2 if vocab_size <= LARGEST_TABLE_SIDE else 1)
    counts = np.zeros(np.prod(shape), dtype=np.int64)
    stride = vocab_size if len(shape) == 2 else 0  # how far apart in `counts` two previous tokens lie
    rows = (one.labelled(piece, separate=separate) for one, piece in _pieces(windows, most_tokens=most_tokens))
    for codes in _blocks((tokens * stride + labels)[labels != IGNORED] for tokens, labels, _ in rows):
        counts += np.bincount(codes, minlength=len(counts))
    return counts.reshape(shape)


def _blocks(pieces: Iterator[Int64s]) -> Iterator[Int64s]:
    """Pieces joined into blocks of a million or so: each bincount walks a whole table, so few of them."""
    waiting: list[Int64s] = []
    for piece in pieces:
        waiting.append(piece)
        if sum(map(len, waiting)) >= BLOCK_TOKENS:
            yield np.concatenate(waiting)
            waiting = []
    if waiting:
        yield np.concatenate(waiting)

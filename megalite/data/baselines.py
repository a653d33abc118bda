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

from megalite.data.source import Source
from megalite.data.split import Part

Int64s = npt.NDArray[np.int64]

LARGEST_TABLE_SIDE = 4096  # a table of pairs has the square of this
BLOCK_TOKENS = 1 << 20


@dataclass(frozen=True)
class Baselines:
    """Cross-entropy on the validation part, nats per token; bigram_nats is None for a vocabulary past 4096."""

    unigram_nats: float
    bigram_nats: float | None


def baselines_of(sources: Sequence[Source], *, seq_len: int, most_tokens: int = 1 << 26) -> Baselines:
    """Count the training parts of all sources and score their validation parts; weights of sources play no role.

    A pair never joins two runs, and the first token of a run is never predicted. Of a source with more than
    `most_tokens` tokens only every k-th run is taken, evenly over its length, so the time does not grow with the
    corpus. Raises DataError if a source is too small for seq_len (which sets the length of runs).
    """
    vocab_size = max(source.vocab_size for source in sources)
    seen, scored = (
        _count(_runs(sources, part, seq_len=seq_len, most_tokens=most_tokens), vocab_size=vocab_size) for part in Part
    )
    bigram = _cross_entropy(scored, seen) if seen.ndim == 2 else None
    unigram = _cross_entropy(scored.reshape(-1, vocab_size).sum(axis=0), seen.reshape(-1, vocab_size).sum(axis=0))
    return Baselines(unigram, bigram)


def _cross_entropy(scored: Int64s, seen: Int64s) -> float:
    """-mean over the scored counts of log p, with p from the seen counts by add-one along the last dim; nats."""
    smoothed = seen + 1.0
    log_p = np.log(smoothed) - np.log(smoothed.sum(axis=-1, keepdims=True))
    return float(-(scored * log_p).sum() / scored.sum())


def _runs(
    sources: Sequence[Source], part: Part, *, seq_len: int, most_tokens: int
) -> Iterator[npt.NDArray[np.integer]]:
    """The runs of one part of all sources; of a long source, every k-th."""
    for source in sources:
        every = -(-len(source) // most_tokens)
        for start, stop in source.split(seq_len).runs(part, every=every):
            yield source.view(start, stop)


def _count(runs: Iterator[npt.NDArray[np.integer]], *, vocab_size: int) -> Int64s:
    """How often each token follows each, over all runs: (V, V), or (V,), how often it follows any, for a large V."""
    shape = (vocab_size,) * (2 if vocab_size <= LARGEST_TABLE_SIDE else 1)
    counts = np.zeros(np.prod(shape), dtype=np.int64)
    stride = vocab_size if len(shape) == 2 else 0  # how far apart in `counts` two previous tokens lie
    for codes in _blocks(run[:-1].astype(np.int64) * stride + run[1:] for run in runs):
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

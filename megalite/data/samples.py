"""Samples by number: the tokens of any sample of a run, and which numbers each data rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.order import Mixture, checked_weights, key_of, keys_at, permute
from megalite.data.source import Source
from megalite.data.split import Part

Int64s = npt.NDArray[np.int64]

IGNORED = -100  # the label that no loss counts, as in torch's cross_entropy
ABSENT = -1


class Batch(NamedTuple):
    """Rows of tokens and, one place further on, what each should predict.

    tokens (rows, seq_len) int64; labels (rows, seq_len) int64, -100 where nothing is to be predicted; sample_ids
    (rows,) int64, the number of each sample. An absent row (validation only) has tokens 0, labels -100 and id -1:
    it fills the shape and counts for nothing.
    """

    tokens: Int64s
    labels: Int64s
    sample_ids: Int64s


class Location(NamedTuple):
    """What samples are: source (place in data.paths), its epoch, window in its training part; (count,) int64 each."""

    source: Int64s
    epoch: Int64s
    window: Int64s


class Samples:
    """All samples of a run: an endless shuffled sequence for training, and each validation window once, in order.

    sources: what is read; seq_len: tokens a sample; weights: one a source, None for proportional to size, 0 to
    leave a source out altogether, validation too. Holds no state: reading sample i gives the same now, later,
    elsewhere, and after a restart.

    Raises DataError if a source is too small for seq_len, or for weights that make no sense.
    """

    def __init__(
        self, sources: Sequence[Source], *, seq_len: int, seed: int, weights: Sequence[float] | None = None
    ) -> None:
        asked = checked_weights(weights, sizes=[len(source) for source in sources])
        kept = [place for place, weight in enumerate(asked) if weight > 0]
        self.seq_len = seq_len
        self.sources = [sources[place] for place in kept]
        self._training = [source.windows(seq_len, Part.TRAIN) for source in self.sources]
        self._validation = [source.windows(seq_len, Part.VALIDATION) for source in self.sources]
        self._mixture = Mixture([asked[place] for place in kept], seed=seed)
        self._places = np.array(kept, dtype=np.int64)
        # By place in data.paths, not by name or by place among those kept: the order within each source survives moving
        # the files and leaving another one out.
        self._keys = [key_of(seed, "source", place) for place in kept]
        self._validation_ends = np.cumsum([len(windows) for windows in self._validation])

    @property
    def validation_count(self) -> int:
        """Validation windows of all sources together."""
        return int(self._validation_ends[-1])

    def locate(self, indices: Int64s) -> Location:
        """(count,) sample numbers, from 0 up -> source, epoch and window of each: the order that order.py states."""
        source, epoch, window = self._locate(indices)
        return Location(self._places[source], epoch, window)

    def _locate(self, indices: Int64s) -> tuple[Int64s, Int64s, Int64s]:
        if indices.size and indices.min() < 0:
            raise IndexError(f"sample {indices.min()}: samples are numbered from 0")
        source, ordinal = self._mixture.locate(indices)
        epoch, window = np.empty_like(ordinal), np.empty_like(ordinal)
        for place, windows in enumerate(self._training):
            here = source == place
            epoch[here], within = np.divmod(ordinal[here], len(windows))
            window[here] = permute(within, len(windows), keys_at(self._keys[place], epoch[here]))
        return source, epoch, window

    def read(self, indices: Int64s) -> Batch:
        """The training samples of these numbers. (rows,) int64 -> Batch of as many rows."""
        source, _, window = self._locate(indices)
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        for place, windows in enumerate(self._training):
            here = source == place
            rows[here] = windows.read(window[here])
        return _batch(rows, indices)

    def read_validation(self, indices: Int64s) -> Batch:
        """The validation windows of these numbers; a number past the last: an absent row. (rows,) -> Batch of as many.

        Every rank may therefore read equal shapes an equal number of times (`validation_steps`), and each window
        still counts once.
        """
        rows = np.empty((len(indices), self.seq_len + 1), dtype=np.int64)
        source = np.searchsorted(self._validation_ends, indices, side="right")
        for place, (windows, end) in enumerate(zip(self._validation, self._validation_ends, strict=True)):
            here = source == place
            rows[here] = windows.read(indices[here] - (end - len(windows)))
        tokens, labels, ids = _batch(rows, indices)
        absent = source == len(self._validation)
        tokens[absent], labels[absent] = 0, IGNORED
        return Batch(tokens, labels, np.where(absent, ABSENT, ids))

    def describe(self) -> str:
        """One line a source."""
        return "\n".join(source.describe(self.seq_len) for source in self.sources)


def _batch(rows: Int64s, indices: Int64s) -> Batch:
    # Not np.ascontiguousarray: of a single row it gives a view, and masking labels would write into the tokens.
    return Batch(rows[:, :-1].copy(), rows[:, 1:].copy(), indices.astype(np.int64))


def shard(
    samples_consumed: int, *, global_batch_size: int, micro_batch_size: int, dp_size: int, dp_rank: int
) -> Int64s:
    """The sample numbers that one data rank reads in one step: (microbatches, micro_batch_size) int64.

    The step takes the numbers [samples_consumed, samples_consumed + global_batch_size). Micro-batch j is the j-th
    contiguous slice of dp_size * micro_batch_size of them, over all data ranks together, and rank r reads the r-th
    part of it. Ranks are therefore disjoint, together they are the step's samples, and any two layouts with equal
    dp_size * micro_batch_size have the same micro-batches.

    Raises ValueError if micro-batches of all ranks do not divide the global batch.
    """
    across = dp_size * micro_batch_size
    if micro_batch_size < 1 or global_batch_size < 1 or global_batch_size % across:
        raise ValueError(
            f"global_batch_size={global_batch_size} is not a multiple of micro_batch_size={micro_batch_size} x "
            f"layout.dp={dp_size} = {across}; take a multiple of {max(dp_size, across)}, or another micro_batch_size"
        )
    first = np.arange(samples_consumed, samples_consumed + global_batch_size, across, dtype=np.int64)
    return first[:, None] + dp_rank * micro_batch_size + np.arange(micro_batch_size, dtype=np.int64)


def validation_steps(validation_count: int, *, global_batch_size: int) -> int:
    """How many steps of `shard` from 0 on read every validation window: the same number on every rank."""
    return -(-validation_count // global_batch_size)

"""Samples by number: the tokens of any sample of a run, and which numbers each data rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.order import Mixture, checked_weights, key_of, keys_at, permute
from megalite.data.source import Labelled, Source, Windows
from megalite.data.split import PERIOD, Part

Int64s = npt.NDArray[np.int64]

BLOCKS_KEPT = 4


class Batch(NamedTuple):
    """Rows of tokens and, one place further on, what each should predict.

    tokens, labels, documents: as `Labelled` has them, (rows, seq_len) int64. sample_ids: (rows,) int64, the number of
    each sample. An absent row (validation only) has tokens 0, labels -100 and id -1: it fills the shape and counts for
    nothing. label_bytes (validation only): bytes of text in all labels that count, None where that is unknown.
    """

    tokens: Int64s
    labels: Int64s
    sample_ids: Int64s
    documents: Int64s | None = None
    label_bytes: float | None = None


class Location(NamedTuple):
    """What samples are: source (its place), its epoch, window in its training part; (count,) int64 each."""

    source: Int64s
    epoch: Int64s
    window: Int64s


@dataclass(frozen=True)
class Stretch:
    """Samples from first_sample on that are read in one way, until the next stretch begins.

    weights: one a source, None for in proportion to size, 0 for none of it. key: what messages call them.
    """

    first_sample: int
    seq_len: int
    weights: Sequence[float] | None = None
    key: str = "data.weights"


class Samples:
    """All training samples of a run: an endless shuffled sequence, whose lengths and sources change at each stretch.

    sources: all that any stretch reads; stretches: by rising first_sample, the first 0; validation_period: as
    `Split` has it; separate: as `Windows.labelled`. Holds no state: reading sample i gives the same now, later,
    elsewhere, and after a restart. (The blocks last looked at are kept, which changes the time it takes alone.)

    The laws, beyond those of order.py:

    1. What a sample is depends on the stretches up to its own: one that is added later changes none before it.
    2. The windows of a source for one seq_len are one sequence over all stretches with that seq_len: each goes on
       where the last one stood, so within an epoch each window is read once, whatever else is read in between.
    3. A stretch like the one before it changes nothing.

    Raises DataError if a source is too small for a seq_len it is read with, or for weights that make no sense.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        stretches: Sequence[Stretch],
        *,
        seed: int,
        validation_period: int = PERIOD,
        separate: bool = False,
    ) -> None:
        assert stretches and stretches[0].first_sample == 0, stretches
        self.sources, self.stretches, self._separate = sources, stretches, separate
        self._first_samples = np.array([stretch.first_sample for stretch in stretches])
        assert (np.diff(self._first_samples) >= 0).all(), stretches
        longest = max(stretch.seq_len for stretch in stretches)
        sizes = [len(source) for source in sources]
        self._reads: list[_Reading] = []
        read_so_far: dict[int, Int64s] = {}
        for place, stretch in enumerate(stretches):
            weights = checked_weights(stretch.weights, sizes=sizes, key=stretch.key)
            kept = [source for source, weight in enumerate(weights) if weight > 0]
            mixture = Mixture([weights[source] for source in kept], seed=seed, key=stretch.key)
            windows = [
                sources[source].windows(stretch.seq_len, Part.TRAIN, longest=longest, period=validation_period)
                for source in kept
            ]
            # By place, not by name or by place among those kept: the order within each source survives moving the
            # files and leaving another one out.
            keys = [key_of(seed, "source", source) for source in kept]
            before = read_so_far.setdefault(stretch.seq_len, np.zeros(len(sources), dtype=np.int64))
            offsets = before[kept] - mixture.before(stretch.first_sample)
            self._reads.append(_Reading(mixture, kept, windows, keys, offsets))
            if place + 1 < len(stretches):
                before[kept] = offsets + mixture.before(stretches[place + 1].first_sample)
        self._located = lru_cache(maxsize=BLOCKS_KEPT)(self._locate_block)

    def locate(self, indices: Int64s) -> Location:
        """(count,) sample numbers, from 0 up -> source, epoch and window of each."""
        if indices.size and indices.min() < 0:
            raise IndexError(f"sample {indices.min()}: samples are numbered from 0")
        out = np.empty((3, len(indices)), dtype=np.int64)
        stretches = self._stretches_of(indices)
        for stretch in np.unique(stretches).tolist():
            mine = np.flatnonzero(stretches == stretch)
            blocks, places = np.divmod(indices[mine], self._reads[stretch].mixture.block)
            for block in np.unique(blocks).tolist():
                here = blocks == block
                out[:, mine[here]] = self._located(stretch, block)[:, places[here]]
        return Location(*out)

    def read(self, indices: Int64s) -> Batch:
        """The training samples of these numbers, at least one and all of one seq_len: (rows,) -> Batch of as many."""
        place = self.locate(indices)
        stretches = np.unique(self._stretches_of(indices)).tolist()
        assert len({self.stretches[stretch].seq_len for stretch in stretches}) == 1, "rows of one length"
        windows: dict[int, Windows] = {}
        for stretch in stretches:
            reading = self._reads[stretch]
            windows |= dict(zip(reading.kept, reading.windows, strict=True))
        rows = read_windows(windows, place.source, place.window, separate=self._separate)
        return Batch(rows.tokens, rows.labels, indices.astype(np.int64), rows.documents)

    def windows(self, seq_len: int) -> dict[int, Windows]:
        """The training windows of each source that is read with this seq_len, by the source's place."""
        return {
            source: windows
            for stretch, reading in zip(self.stretches, self._reads, strict=True)
            if stretch.seq_len == seq_len
            for source, windows in zip(reading.kept, reading.windows, strict=True)
        }

    @property
    def used(self) -> list[int]:
        """The places of the sources that any stretch reads."""
        return sorted({source for reading in self._reads for source in reading.kept})

    def _stretches_of(self, indices: Int64s) -> Int64s:
        return np.searchsorted(self._first_samples, indices, side="right") - 1

    def _locate_block(self, stretch: int, block: int) -> Int64s:
        """Source, epoch and window of each place of a block, as if all of it lay in the stretch: (3, block)."""
        reading = self._reads[stretch]
        chosen, ordinal = reading.mixture.lay_out(block)
        out = np.empty((3, len(chosen)), dtype=np.int64)
        for place, windows in enumerate(reading.windows):
            here = chosen == place
            epoch, within = np.divmod(ordinal[here] + reading.offsets[place], len(windows))
            window = permute(within, len(windows), keys_at(reading.keys[place], epoch))
            out[:, here] = np.broadcast_to(reading.kept[place], epoch.shape), epoch, window
        return out


class _Reading(NamedTuple):
    """How a stretch is read. kept: places of its sources; the rest is one for each of these.

    offsets: what is added to a place in the mixture's own count of a source to give its place in what has been read.
    """

    mixture: Mixture
    kept: list[int]
    windows: list[Windows]
    keys: list[int]
    offsets: Int64s


def read_windows(windows: dict[int, Windows], source: Int64s, window: Int64s, *, separate: bool) -> Labelled:
    """Rows out of several sources: which source, by its place, and which of its windows; (rows,) each."""
    places = np.unique(source).tolist()
    if len(places) == 1:
        return windows[places[0]].labelled(window, separate=separate)
    parts = {place: windows[place].labelled(window[source == place], separate=separate) for place in places}
    shape = (len(source), parts[places[0]].tokens.shape[1])
    tokens, labels, documents = (np.empty(shape, dtype=np.int64) for _ in range(3))
    for place, part in parts.items():
        here = source == place
        tokens[here], labels[here] = part.tokens, part.labels
        if part.documents is not None:
            documents[here] = part.documents
    return Labelled(tokens, labels, documents if separate else None)


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

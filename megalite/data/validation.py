"""The windows that the loss is evaluated on: each once, in order, in equal shapes on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megalite.data.samples import Batch, read_windows
from megalite.data.source import IGNORED, Windows

Int64s = npt.NDArray[np.int64]

ABSENT = -1


class Validation:
    """The windows of one or more sources, one after another. len(): how many, all together.

    windows: of one seq_len; separate: as `Windows.labelled`.
    """

    def __init__(self, windows: Sequence[Windows], *, separate: bool = False) -> None:
        self.windows, self._separate = windows, separate
        self._ends = np.cumsum([len(one) for one in windows], dtype=np.int64)
        self._knows_bytes = all(one.source.label_bytes(np.empty(0, dtype=np.int64)) is not None for one in windows)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, indices: Int64s) -> Batch:
        """The windows of these numbers; a number past the last: an absent row. (rows,) -> Batch of as many.

        Every rank may therefore read equal shapes an equal number of times (`validation_steps`), and each window
        still counts once. label_bytes is None if any of the sources does not know, so all ranks have it or none has.
        """
        absent = indices >= len(self)
        present = np.where(absent, 0, indices)
        source = np.searchsorted(self._ends, present, side="right")
        window = present - np.concatenate([[0], self._ends])[source]
        rows = read_windows(dict(enumerate(self.windows)), source, window, separate=self._separate)
        rows.tokens[absent], rows.labels[absent] = 0, IGNORED
        if rows.documents is not None:
            rows.documents[absent] = 0
        ids = np.where(absent, ABSENT, indices).astype(np.int64)
        return Batch(rows.tokens, rows.labels, ids, rows.documents, self._label_bytes(rows.labels, source))

    def _label_bytes(self, labels: Int64s, source: Int64s) -> float | None:
        if not self._knows_bytes:
            return None
        total = 0.0
        for place in np.unique(source).tolist():
            mine = labels[source == place]
            total += self.windows[place].source.label_bytes(mine[mine != IGNORED]) or 0.0
        return total


def validation_steps(validation_count: int, *, global_batch_size: int) -> int:
    """How many steps of `shard` from 0 on read every validation window: the same number on every rank."""
    return -(-validation_count // global_batch_size)

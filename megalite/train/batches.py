"""From sample numbers to micro-batches on this rank's device: what megalite.data gives, as the tensors a model takes.

One class for each kind of data, with the same three questions: the micro-batches of a step, those of the validation
part, and what a model must beat. All are pure functions of (seed, sample number): no state, no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.comm import Pending, start_all_reduce
from megalite.data import Baselines, DataError, Samples, baselines_of, gaussian, open_sources, shard, targets
from megalite.data import Batch as Rows
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig
from megalite.models.microbatch import Microbatch, VectorMicrobatch
from megalite.train.config import Config
from megalite.train.spans import Span, span_at, spans_of

Int64s = npt.NDArray[np.int64]
Batch = list[Microbatch] | list[VectorMicrobatch]
FIRST_VALIDATION_VECTOR = 1 << 62  # vectors are endless: those that training never comes to serve as the other part


@dataclass(frozen=True)
class Share:
    """Which sample numbers this data rank reads, and where its tensors go."""

    spans: Sequence[Span]
    micro_batch_size: int | None
    dp: Axis
    device: str

    def numbers(self, samples_consumed: int, batch: int) -> Int64s:
        """This rank's part of a global batch of `batch` after so many samples: (microbatches, micro_batch_size)."""
        return shard(
            samples_consumed,
            global_batch_size=batch,
            micro_batch_size=self.micro_batch_size or batch // self.dp.size,
            dp_size=self.dp.size,
            dp_rank=self.dp.rank,
        )

    def training(self, step: int) -> Int64s:
        """Those of a step, from 1."""
        span = span_at(self.spans, step)
        return self.numbers(span.samples_consumed(step), span.global_batch_size)

    def validation(self, count: int) -> Iterator[Int64s]:
        """Places 0, 1, ... of a validation set of `count`, batch by batch; -1 in those past its end.

        Every rank gets equally many batches of equal shape, so that none waits for another in a collective.
        """
        batch = self.spans[-1].global_batch_size
        for start in range(0, count, batch):
            numbers = self.numbers(start, batch)
            yield np.where(numbers < count, numbers, -1)

    def place(self, array: npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.from_numpy(array).to(self.device, dtype)


class TokenBatches:
    """Text as tokens: the files of data.paths, or the default corpus.

    Raises DataError if they cannot be read, are too short for seq_len, or hold tokens outside of model.vocab_size.
    """

    def __init__(self, config: Config, share: Share, cache_dir: Path) -> None:
        assert isinstance(config.model, GPTConfig)
        data = config.data
        self.share, self.seq_len = share, config.seq_len
        sources = open_sources(data.paths, cache_dir=cache_dir)
        self.samples = Samples(sources, seq_len=config.seq_len, seed=config.seed, weights=data.weights)
        vocab_size = max(source.vocab_size for source in self.samples.sources)
        if vocab_size > config.model.vocab_size:
            raise DataError(
                f"model.vocab_size={config.model.vocab_size} is too small for data.paths, whose tokens go up to "
                f"{vocab_size - 1}; take at least {vocab_size}"
            )
        # Spread over the whole part, so that a small sample of it is a fair one.
        windows = self.samples.validation_count
        count = min(config.eval.sequences, windows)
        self.validation_windows = np.arange(count, dtype=np.int64) * windows // count

    def training(self, step: int) -> list[Microbatch]:
        """The micro-batches of a step, from 1: samples [(step - 1) x global_batch_size, step x global_batch_size)."""
        return [self._microbatch(self.samples.read(numbers), step) for numbers in self.share.training(step)]

    def validation(self) -> Iterator[list[Microbatch]]:
        """eval.sequences validation windows, or all if there are fewer; each once, whatever the layout."""
        outside = self.samples.validation_count
        for places in self.share.validation(len(self.validation_windows)):
            windows = np.where(places < 0, outside, self.validation_windows[places])
            yield [self._microbatch(self.samples.read_validation(row), 0) for row in windows]

    def baselines(self) -> Baselines | None:
        """The loss of guessing by counts."""
        return baselines_of(self.samples.sources, seq_len=self.seq_len)

    def describe(self) -> str:
        return self.samples.describe()

    def _microbatch(self, rows: Rows, step: int) -> Microbatch:
        place = self.share.place
        positions = torch.arange(self.seq_len, device=self.share.device)
        return Microbatch(place(rows.tokens), place(rows.labels), positions, place(rows.sample_ids), step)


class VectorBatches:
    """Random vectors and what the deep MLP should make of them. A batch's last micro-batches may fall short."""

    def __init__(self, config: Config, share: Share) -> None:
        self.config, self.share = config, share

    def training(self, step: int) -> list[VectorMicrobatch]:
        """The micro-batches of a step, from 1."""
        return [self._microbatch(numbers, step) for numbers in self.share.training(step)]

    def validation(self) -> Iterator[list[VectorMicrobatch]]:
        """eval.sequences vectors that training does not come to."""
        for places in self.share.validation(self.config.eval.sequences):
            yield [self._microbatch(FIRST_VALIDATION_VECTOR + row[row >= 0], 0) for row in places]

    def baselines(self) -> Baselines | None:
        """None: there is nothing to count."""
        return None

    def describe(self) -> str:
        return f"endless random vectors of {self.config.model.hidden_size}"

    def _microbatch(self, numbers: Int64s, step: int) -> VectorMicrobatch:
        inputs = gaussian(self.config.seed, numbers, self.config.model.hidden_size)
        dtype = getattr(torch, self.config.dtype)
        place = self.share.place
        return VectorMicrobatch(place(inputs, dtype), place(targets(inputs), dtype), place(numbers), step)


def start_count(batch: Batch, *, mesh: Mesh, device: str) -> Pending[Tensor]:
    """How many summands the loss of the whole global batch has, at least 1; int64, 0-d, on its way over the data ranks.

    The loss is their sum divided by this, so short sequences, micro-batches and ranks weigh as much as their tokens.
    """
    mine = torch.tensor(sum(microbatch.valid() for microbatch in batch), device=device)
    started = start_all_reduce(mine, mesh.data())
    return Pending(lambda: started.wait().clamp(min=1))


def open_batches(config: Config, *, dp: Axis, device: str, cache_dir: Path) -> TokenBatches | VectorBatches:
    """The data that the model of this configuration learns from. Raises DataError as `TokenBatches` does."""
    share = Share(spans_of(config), config.micro_batch_size, dp, device)
    if isinstance(config.model, GPTConfig):
        return TokenBatches(config, share, cache_dir)
    return VectorBatches(config, share)

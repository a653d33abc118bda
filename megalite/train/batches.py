"""From sample numbers to micro-batches on this rank's device: what megalite.data gives, as the tensors a model takes.

One class for each kind of data, with the same three questions: the micro-batches of a step, those of the validation
part, and what a model must beat. All are pure functions of (configuration, sample number): no state, no communication.

    with open_batches(config, dp=mesh.dp, device=device, cache_dir=cache_dir) as batches:
        for step in range(1, config.last_step + 1):
            batch = batches.training(step)

Training never runs out of samples: when a source has been read through, its next epoch begins, in another order, in the
middle of a batch if it falls there. So every step has a whole global batch on every data rank, there is no partial last
one, and each step's loss is divided by the number of its own labels that count (`start_count`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megalite.comm import Pending, start_all_reduce
from megalite.data import IGNORED, Baselines, baselines_of, gaussian, shard, targets
from megalite.data import Batch as Rows
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig
from megalite.models.microbatch import Microbatch, VectorMicrobatch
from megalite.train.config import Config
from megalite.train.prefetch import Prefetch
from megalite.train.sources import open_data
from megalite.train.spans import Span, micro_batch, span_at, spans_of

if TYPE_CHECKING:
    from typing_extensions import Self

M = TypeVar("M", Microbatch, VectorMicrobatch)
Int64s = npt.NDArray[np.int64]
Batch = list[Microbatch] | list[VectorMicrobatch]
FIRST_VALIDATION_VECTOR = 1 << 62  # vectors are endless: those that training never comes to serve as the other part


@dataclass(frozen=True)
class Share:
    """Which sample numbers this data rank reads, and where its tensors go. micro_batch: global batch -> of one pass."""

    spans: Sequence[Span]
    micro_batch: Callable[[int], int]
    dp: Axis
    device: str

    def numbers(self, samples_consumed: int, batch: int) -> Int64s:
        """This rank's part of a global batch of `batch` after so many samples: (microbatches, micro_batch_size)."""
        return shard(
            samples_consumed,
            global_batch_size=batch,
            micro_batch_size=self.micro_batch(batch),
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

    @property
    def on_gpu(self) -> bool:
        return torch.device(self.device).type == "cuda"

    def hold(self, array: npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """An array as a tensor in the host's memory; for a GPU, in pages that it can copy from by itself."""
        tensor = torch.from_numpy(array).to(dtype)
        return tensor.pin_memory() if self.on_gpu else tensor

    def send(self, microbatch: M) -> M:
        """A micro-batch on this rank's device; the copy is under way, before all that is asked of the device next."""
        if not self.on_gpu:
            return microbatch
        values = {field.name: getattr(microbatch, field.name) for field in fields(microbatch)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        sent: dict[str, Any] = {name: tensor.to(self.device, non_blocking=True) for name, tensor in tensors.items()}
        return replace(microbatch, **sent)

    def device_of_thread(self) -> AbstractContextManager[object]:
        """Each thread has a current GPU of its own, at first that of another rank."""
        return torch.cuda.device(self.device) if self.on_gpu else nullcontext()


class Batches(ABC, Generic[M]):
    """A context manager; leaving it ends the thread that reads ahead. See `TokenBatches` and `VectorBatches`.

    fingerprints: of the sources, in the order in which the configuration names them.
    """

    fingerprints: Sequence[str] = ()

    def __init__(self, config: Config, share: Share) -> None:
        self.config, self.share = config, share
        self._ahead: Prefetch[list[M]] = Prefetch(self._on_host, ahead=config.data.prefetch, last=config.last_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._ahead.close()

    def training(self, step: int) -> list[M]:
        """The micro-batches of a step, from 1: those of its samples that this data rank reads."""
        return [self.share.send(microbatch) for microbatch in self._ahead.take(step)]

    def pinned(self, config: Config) -> Config:
        """The configuration with data.fingerprints filled in: a run from it reads this data or none."""
        return replace(config, data=replace(config.data, fingerprints=list(self.fingerprints) or None))

    @property
    def waited_seconds(self) -> float:
        """How long the last `training` waited for its data."""
        return self._ahead.waited_seconds

    def _on_host(self, step: int) -> list[M]:
        with self.share.device_of_thread():
            return self._read(step)

    @abstractmethod
    def _read(self, step: int) -> list[M]:
        """The micro-batches of a step, in the host's memory."""

    @abstractmethod
    def validation(self) -> Iterator[list[M]]:
        """eval.sequences samples that training does not read, or all if there are fewer; each once in any layout."""

    @abstractmethod
    def baselines(self) -> Baselines | None:
        """The loss of guessing by counts; None where there is nothing to count."""

    @abstractmethod
    def describe(self) -> str:
        """For the header: one line a source."""


class TokenBatches(Batches[Microbatch]):
    """Text as tokens: what the configuration's data group names.

    Raises DataError as `open_data`; in `training` and `validation` for a token that the model does not know.
    """

    def __init__(self, config: Config, share: Share, cache_dir: Path) -> None:
        super().__init__(config, share)
        self._data = open_data(config, share.spans, cache_dir=cache_dir)
        self.samples = self._data.samples
        self.fingerprints = [source.fingerprint for source in self._data.sources]
        # Spread over the whole part, so that a small sample of it is a fair one.
        windows = len(self._data.validation)
        count = min(config.eval.sequences, windows)
        self.validation_windows = np.arange(count, dtype=np.int64) * windows // max(count, 1)

    def validation(self) -> Iterator[list[Microbatch]]:
        """As `Batches.validation`; of the last span's sequence length, with label_bytes."""
        outside = len(self._data.validation)
        for places in self.share.validation(len(self.validation_windows)):
            windows = np.where(places < 0, outside, self.validation_windows[places])
            read = [self._data.validation.read(row) for row in windows]
            yield [self.share.send(one) for rows in read for one in self._microbatches(rows, 1, step=0)]

    def baselines(self) -> Baselines | None:
        """As `Batches.baselines`: counted on what is trained on with the last span's sequence length."""
        training = self.samples.windows(self.share.spans[-1].seq_len).values()
        separate = self.config.data.documents == "separate"
        return baselines_of(list(training), self._data.validation.windows, separate=separate)

    def describe(self) -> str:
        validation = f"{len(self._data.validation)} validation windows of {self.share.spans[-1].seq_len}"
        return "\n".join([*(source.describe() for source in self._data.sources), validation])

    def _read(self, step: int) -> list[Microbatch]:
        numbers = self.share.training(step)
        return self._microbatches(self.samples.read(numbers.ravel()), len(numbers), step=step)

    def _microbatches(self, rows: Rows, count: int, *, step: int) -> list[Microbatch]:
        """Rows cut into `count` micro-batches."""
        arrays = (rows.tokens, rows.labels, rows.sample_ids, rows.documents)
        pieces = [None if array is None else self.share.hold(array).chunk(count) for array in arrays]
        tokens, labels, ids, documents = pieces
        assert tokens is not None and labels is not None and ids is not None
        counted = (rows.labels != IGNORED).reshape(count, -1).sum(axis=1).tolist()
        positions = self.share.hold(np.arange(rows.tokens.shape[1]))
        return [
            Microbatch(
                tokens[j],
                labels[j],
                positions,
                ids[j],
                step,
                None if documents is None else documents[j],
                counted[j],
                rows.label_bytes,
            )
            for j in range(count)
        ]


class VectorBatches(Batches[VectorMicrobatch]):
    """Random vectors and what the deep MLP should make of them. A batch's last micro-batches may fall short."""

    def validation(self) -> Iterator[list[VectorMicrobatch]]:
        """eval.sequences vectors that training does not come to."""
        for places in self.share.validation(self.config.eval.sequences):
            rows = [FIRST_VALIDATION_VECTOR + row[row >= 0] for row in places]
            yield [self.share.send(self._microbatch(row, 0)) for row in rows]

    def baselines(self) -> None:
        """None: there is nothing to count."""

    def describe(self) -> str:
        return f"endless random vectors of {self.config.model.hidden_size}"

    def _read(self, step: int) -> list[VectorMicrobatch]:
        return [self._microbatch(numbers, step) for numbers in self.share.training(step)]

    def _microbatch(self, numbers: Int64s, step: int) -> VectorMicrobatch:
        inputs = gaussian(self.config.seed, numbers, self.config.model.hidden_size)
        dtype = getattr(torch, self.config.dtype)
        hold = self.share.hold
        return VectorMicrobatch(hold(inputs, dtype), hold(targets(inputs), dtype), hold(numbers), step)


def start_count(batch: Batch, *, mesh: Mesh, device: str) -> Pending[Tensor]:
    """How many summands the loss of the whole global batch has, at least 1; int64, 0-d, on its way over the data ranks.

    The loss is their sum divided by this, so short sequences, micro-batches and ranks weigh as much as their tokens.
    """
    mine = torch.tensor(sum(microbatch.valid() for microbatch in batch), device=device)
    started = start_all_reduce(mine, mesh.data())
    return Pending(lambda: started.wait().clamp(min=1))


def open_batches(config: Config, *, dp: Axis, device: str, cache_dir: Path) -> TokenBatches | VectorBatches:
    """The data that the model of this configuration learns from, to be left at its end. DataError as `TokenBatches`."""
    share = Share(spans_of(config), partial(micro_batch, config), dp, device)
    if isinstance(config.model, GPTConfig):
        return TokenBatches(config, share, cache_dir)
    return VectorBatches(config, share)

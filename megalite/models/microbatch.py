"""What one forward and backward pass works on: a piece of the global batch, with the names of its samples and its step.

Every stage of a pipeline gets the whole micro-batch (the order of the data is a pure function, so each rank reads it);
positions, sample ids and labels never travel between ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

IGNORED = -100
"""A label that takes no part in the loss: PyTorch's ignore_index."""


@dataclass(frozen=True)
class Microbatch:
    """Sequences of tokens and, for each token, the one that comes next.

    tokens: (batch, seq) int64. labels: (batch, seq) int64, tokens shifted by one before any cut, IGNORED where there is
    nothing to predict. positions: (seq,) int64, global. sample_ids: (batch,) int64, the place of each sequence in the
    order of all samples, which dropout is drawn from. step: from 1. documents: (batch, seq) int64, the number of the
    document that each token belongs to, where tokens are to see their own document only; None where they see all that
    come before. counted: how many labels count, where that is known without a look at the device. label_bytes: how many
    bytes of text those stand for, for the evaluation in bits per byte; None where it is unknown. Raises ValueError
    where the shapes disagree.
    """

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    sample_ids: Tensor
    step: int
    documents: Tensor | None = None
    counted: int | None = None
    label_bytes: float | None = None

    def __post_init__(self) -> None:
        batch, seq = self.tokens.shape
        expected = {"labels": (batch, seq), "positions": (seq,), "sample_ids": (batch,)}
        expected |= {} if self.documents is None else {"documents": (batch, seq)}
        for name, shape in expected.items():
            found = tuple(getattr(self, name).shape)
            if found != shape:
                raise ValueError(f"{name} of shape {found} do not go with tokens of {(batch, seq)}; take {shape}")

    def valid(self) -> int:
        """How many summands this micro-batch adds to the loss: its labels that count."""
        return int((self.labels != IGNORED).sum()) if self.counted is None else self.counted


@dataclass(frozen=True)
class VectorMicrobatch:
    """Vectors to be mapped onto vectors: what the deep MLP trains on.

    inputs, targets: (batch, hidden). sample_ids: (batch,) int64. step: from 1. label_bytes: None, for want of text.
    """

    inputs: Tensor
    targets: Tensor
    sample_ids: Tensor
    step: int
    label_bytes: None = None

    def valid(self) -> int:
        """How many summands this micro-batch adds to the loss: one squared error for each target entry."""
        return self.targets.numel()

"""Activations as rows: a (..., seq, features) tensor seen as a matrix in the order of its memory, without a copy.

Under sequence parallelism activations are kept sequence-first in memory, (seq, batch, hidden), and shown as
(batch, seq, hidden), so that gathering and scattering along seq moves whole blocks. A matrix product or a norm must
take its rows in that order, or it would copy on the way in and lose the order on the way out.
"""

from __future__ import annotations

from torch import Tensor

SEQUENCE_DIM = -2


def sequence_first(x: Tensor) -> bool:
    """Whether x (..., seq, features) lies in memory as (seq, ..., features)."""
    return x.ndim > 2 and not x.is_contiguous() and x.movedim(SEQUENCE_DIM, 0).is_contiguous()


def in_memory_order(x: Tensor, *, sequence_first: bool) -> Tensor:
    """(..., seq, features) -> the same or (seq, ..., features), contiguous: no copy if x lies in memory so.

    Then torch's own linear is one product over all rows; of a strided tensor it may take one for each sequence.
    """
    return (x.movedim(SEQUENCE_DIM, 0) if sequence_first else x).contiguous()


def from_memory_order(x: Tensor, *, sequence_first: bool) -> Tensor:
    """The inverse of `in_memory_order`."""
    return x.movedim(0, SEQUENCE_DIM) if sequence_first else x


def to_rows(x: Tensor, *, sequence_first: bool) -> Tensor:
    """(..., seq, features) -> (rows, features): no copy if x lies in memory in the order asked for."""
    return (x.movedim(SEQUENCE_DIM, 0) if sequence_first else x).reshape(-1, x.shape[-1])


def from_rows(rows: Tensor, shape: tuple[int, ...], *, sequence_first: bool) -> Tensor:
    """(rows, features) -> (*shape, features), the inverse of `to_rows`. shape: (..., seq), without the features."""
    if not sequence_first:
        return rows.view(*shape, rows.shape[-1])
    *batch, seq = shape
    return from_memory_order(rows.view(seq, *batch, rows.shape[-1]), sequence_first=True)

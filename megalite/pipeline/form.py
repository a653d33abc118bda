"""`Form`: what a tensor that crosses between two stages looks like, and the header that announces it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
)
"""What travels between stages; a header names one by its place here."""
MOST_DIMS = 8


@dataclass(frozen=True)
class Form:
    """Dtype and shape, and in which order the dims lie in memory, outermost first, in which it travels uncopied.

    Two are equal whatever that order: under sequence parallelism activations are (seq, batch, hidden) in memory, and
    are to arrive so.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] = field(compare=False)

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"

    @classmethod
    def of(cls, x: Tensor) -> Form:
        """That of a tensor; one that no order of its dims makes contiguous travels in their natural order, copied."""
        order = tuple(range(x.ndim))
        if x.layout == torch.strided and not x.is_contiguous():
            by_stride = tuple(sorted(order, key=lambda dim: (-x.stride()[dim], dim)))
            order = by_stride if x.permute(by_stride).is_contiguous() else order
        return cls(x.dtype, tuple(x.shape), order)

    @property
    def _is_natural(self) -> bool:
        return self.order == tuple(range(len(self.order)))

    def packed(self, x: Tensor) -> Tensor:
        """x as it travels, contiguous; a copy only where it lies in another order, or is conjugated lazily."""
        x = x.resolve_conj().resolve_neg() if x.is_complex() else x
        return (x if self._is_natural else x.permute(self.order)).contiguous()

    def unpacked(self, packed: Tensor) -> Tensor:
        """Of what came, the tensor of this shape; a view."""
        return packed if self._is_natural else packed.permute([self.order.index(dim) for dim in range(len(self.order))])

    def empty(self, device: torch.device) -> Tensor:
        """Memory for one, packed."""
        return torch.empty([self.shape[dim] for dim in self.order], dtype=self.dtype, device=device)

    def header(self, device: torch.device) -> Tensor:
        """(2 + 2 MOST_DIMS,) int64."""
        padding = [0] * (MOST_DIMS - len(self.shape))
        numbers = [DTYPES.index(self.dtype), len(self.shape), *self.shape, *padding, *self.order, *padding]
        return torch.tensor(numbers, device=device)

    @classmethod
    def read(cls, header: Tensor) -> Form:
        """What `header` wrote."""
        code, count, *dims = header.tolist()
        return cls(DTYPES[code], tuple(dims[:count]), tuple(dims[MOST_DIMS : MOST_DIMS + count]))


HEADER = Form(torch.int64, (2 + 2 * MOST_DIMS,), (0,))

Forms = dict[tuple[int, Any], Form]
"""(the stage that reads, form of the micro-batch) -> of the activation, for all boundaries that a rank is an end of."""


def form_of(microbatch: Any) -> tuple[Form, ...]:
    """What of a micro-batch shapes depend on: dtypes and shapes of the tensors in it, also in nested containers and
    dataclasses."""
    return tuple(map(Form.of, _tensors(microbatch)))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(values):
        for field in dataclasses.fields(values):
            yield from _tensors(getattr(values, field.name))

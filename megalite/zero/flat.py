"""A flat buffer whose memory comes and goes, while views of it stay valid."""

from __future__ import annotations

import torch
from torch import Tensor


class Flat:
    """`tensor`, one-dimensional and contiguous. `free` gives its memory back, `allocate` takes new memory, not filled.

    Views share the storage, so they (and what autograd saved of them) are good again once it is filled; between the
    two nothing may read them, for torch would crash the process, nor make new ones.
    """

    def __init__(self, numel: int, *, dtype: torch.dtype, device: torch.device | str) -> None:
        self.tensor: Tensor = torch.empty(numel, dtype=dtype, device=device)
        self._bytes = self.tensor.untyped_storage().nbytes()

    @property
    def is_allocated(self) -> bool:
        return self.tensor.untyped_storage().nbytes() == self._bytes

    def allocate(self) -> None:
        if not self.is_allocated:
            self.tensor.untyped_storage().resize_(self._bytes)

    def free(self) -> None:
        self.tensor.untyped_storage().resize_(0)

"""`VocabParallelEmbedding`: the token table cut along the vocabulary; and `LearnedPositions`.

Each rank looks up the ids whose rows it holds, gives zero rows for the others, and the ranks' rows are summed
(Megatron-LM, arXiv:1909.08053, section 3). The table may be the output layer's weight as well (a tied embedding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.layers.autograd import once_differentiable
from megalite.layers.rows import SEQUENCE_DIM
from megalite.mesh import Axis
from megalite.spec import Init, ParallelModule, ParamSpec, normal
from megalite.weight_grad import open_store

NO_ROW = -1  # stands for an id whose row is on another rank


def padded_size(size: int, parts: int) -> int:
    """The smallest multiple of `parts` that is at least `size`: 101 over 4 is 104."""
    return -(-size // parts) * parts


def require_in_range(ids: Tensor, size: int, *, what: str) -> None:
    """Raises ValueError, with both numbers, if an id lies outside [0, size).

    That is on the CPU. Elsewhere reading the ids would make the host wait for the device, so the device checks: an id
    out of range fails there, and as a RuntimeError at the next synchronisation. On meta there is nothing to check.
    """
    if ids.is_meta or ids.numel() == 0:
        return
    if ids.device.type != "cpu":
        torch._assert_async(((ids >= 0) & (ids < size)).all(), f"{what} outside [0, {size})")
        return
    low, high = (int(bound) for bound in torch.aminmax(ids))
    if low < 0 or high >= size:
        raise ValueError(f"{what}: {low if low < 0 else high} lies outside [0, {size})")


class VocabParallelEmbedding(ParallelModule):
    """y = weight[ids] with the rows of weight, (num_embeddings, embedding_dim), cut over tp.

    ids: (batch, seq) int64, equal on all ranks -> (batch, seq, embedding_dim), equal on all ranks; with
    sequence_parallel (batch, seq/tp, embedding_dim), sequence-first in memory. Positional arguments are nn.Embedding's.
    A size that tp does not divide is padded with rows of zeros, which get zero gradient. init: default nn.Embedding's.
    Raises ValueError for an id outside [0, num_embeddings), see `require_in_range`, and where tp does not divide seq.
    """

    reads_weight_in_backward = False  # so that ZeRO does not gather it there; only shape and dtype are looked at

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim, self.tp = num_embeddings, embedding_dim, tp
        self.sequence_parallel = sequence_parallel
        pad = {0: padded_size(num_embeddings, tp.size)}
        spec = ParamSpec((num_embeddings, embedding_dim), init or normal(1.0), cut={tp: 0}, pad=pad, matrices=None)
        self.weight = self.declare("weight", spec, device=device, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        require_in_range(ids, self.num_embeddings, what="token ids (model.vocab_size is the bound)")
        return _Embedding.apply(ids, self.weight, self.tp, self.sequence_parallel)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, {self.tp.name}={self.tp.size}, "
            f"sequence_parallel={self.sequence_parallel}"
        )


class _Embedding(torch.autograd.Function):
    """The look-up with its leaving collective as one function, so that its backward can defer like a linear's.

    A weight tied to the output layer then gets its whole gradient at once: from autograd, which sums the two uses, or,
    while a store is open, from the store.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: nn.Parameter, tp: Axis, sequence_parallel: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight, ctx.tp, ctx.sequence_parallel = weight, tp, sequence_parallel
        rows = _local_rows(_in_memory_order(ids, sequence_parallel), weight, tp)
        y = F.embedding(rows.clamp(min=0), weight).masked_fill_((rows == NO_ROW).unsqueeze(-1), 0)
        if sequence_parallel:
            return start_reduce_scatter(y.movedim(0, SEQUENCE_DIM), tp, dim=SEQUENCE_DIM).wait()
        return start_all_reduce(y, tp).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor | None, None, None]:
        (ids,) = ctx.saved_tensors
        if not ctx.needs_input_grad[1]:
            return None, None, None, None
        start = _product(ctx, ids, gradient)
        store = open_store(ctx.weight)
        if store is None:
            return None, start()(), None, None
        store.put(ctx.weight, start, reads=(gradient,))
        return None, None, None, None


def _in_memory_order(ids: Tensor, sequence_parallel: bool) -> Tensor:
    """(batch, seq), or (seq, batch) where the activations are sequence-first."""
    return ids.movedim(-1, 0) if sequence_parallel else ids


def _local_rows(ids: Tensor, weight: Tensor, tp: Axis) -> Tensor:
    """The row of this rank's weight that each id has, NO_ROW if another rank has it."""
    rows = ids - tp.rank * weight.shape[0]
    return rows.masked_fill_((rows < 0) | (rows >= weight.shape[0]), NO_ROW)


def _product(ctx: Any, ids: Tensor, gradient: Tensor) -> Callable[[], Callable[[], Tensor]]:
    """The weight gradient, to be started and then finished: row i sums the gradients of the tokens whose id is i.

    Holds the gradient as it came, cut under sequence parallelism, and gathers when it is started.
    """
    weight, tp, sequence_parallel = ctx.weight, ctx.tp, ctx.sequence_parallel

    def start() -> Callable[[], Tensor]:
        pending = start_all_gather(gradient, tp, dim=SEQUENCE_DIM) if sequence_parallel else None

        def finish() -> Tensor:
            whole = gradient if pending is None else pending.wait().movedim(SEQUENCE_DIM, 0)
            rows = _local_rows(_in_memory_order(ids, sequence_parallel), weight, tp)
            # A common token has thousands of terms, and a half-precision sum stops growing long before.
            wide = torch.promote_types(whole.dtype, torch.float32)
            # Sums in a fixed order on every device, and skips the rows that are equal to its padding index.
            summed = torch.ops.aten.embedding_dense_backward(whole.to(wide), rows, weight.shape[0], NO_ROW, False)
            return summed.to(weight.dtype)

        return finish

    return start


class LearnedPositions(ParallelModule):
    """x + weight[positions]: a learned vector for each position, (max_positions, hidden), whole on every rank.

    x: (batch, seq, hidden) and positions (seq,) int64; with sequence_parallel both are this rank's tokens,
    (batch, seq/tp, hidden) and (seq/tp,), and each rank has the gradient of its own positions only. Raises ValueError
    if a position lies beyond the table, or positions and x differ in length.
    """

    reads_weight_in_backward = False

    def __init__(
        self,
        max_positions: int,
        hidden: int,
        *,
        tp: Axis,
        sequence_parallel: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.max_positions = max_positions
        partial = (tp,) if sequence_parallel else ()
        spec = ParamSpec((max_positions, hidden), init or normal(1.0), partial=partial, matrices=None)
        self.weight = self.declare("weight", spec, device=device, dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        if positions.shape != (x.shape[SEQUENCE_DIM],):
            raise ValueError(
                f"positions of shape {tuple(positions.shape)} must be ({x.shape[SEQUENCE_DIM]},): those of the tokens "
                "of x that this rank holds"
            )
        require_in_range(
            positions,
            self.max_positions,
            what="positions (model.max_position_embeddings is the bound; seq_len fits it)",
        )
        return x + F.embedding(positions, self.weight)

    def extra_repr(self) -> str:
        return f"{self.max_positions}, {self.weight.shape[1]}"

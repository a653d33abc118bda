"""Cross entropy over a vocabulary that is cut over tp; the logits are never gathered.

With s_v the logits of a token, y its label, V the vocabulary, m the largest logit and lse = m + log(sum over v of
exp(s_v - m)):

    loss = lse - (1 - e) s_y - e/V (sum over v of s_v) + z lse^2          e: label smoothing, z: z-loss
    d loss / d s_v = (1 + 2 z lse) exp(s_v - lse) - (1 - e) [v = y] - e/V

A rank contributes three numbers a token, of its own columns: m, the sum of exp(s_v - m) and the label's logit; and, if
labels are smoothed, the sum of the logits. One all-gather exchanges them and every rank combines them in rank order, so
all hold the same loss to the bit. Backward needs m and the sum alone, and no communication. z-loss is PaLM's
(arXiv:2204.02311, section 5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.comm import start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.layers.autograd import once_differentiable
from megalite.layers.embedding import padded_size, require_in_range
from megalite.layers.linear import in_precision_of, parallel_linear
from megalite.layers.rows import SEQUENCE_DIM, from_rows, sequence_first, to_rows
from megalite.mesh import Axis
from megalite.weight_grad import open_store

Reduction = Literal["sum", "none"]


def vocab_parallel_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    tp: Axis,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
) -> Tensor:
    """The cross entropy of each token, or its sum over the tokens whose label is not ignore_index.

    logits: (..., padded vocab/tp), this rank's columns, the padded vocab being the next multiple of tp; labels: (...)
    int64, equal on all ranks -> a scalar, or with reduction="none" (...), in float32, in float64 for float64 logits.
    An ignored token has loss 0 and gradient 0. Padded columns belong to no class: they are left out of the softmax and
    get gradient 0. Computed in float32 at least, a block of rows at a time.
    Raises ValueError if the logits are not cut over tp, and for a label outside [0, vocab_size).
    """
    objective = _Objective(tp, vocab_size, ignore_index, label_smoothing, z_loss)
    objective.check(logits.shape, labels)
    return _reduced(_CrossEntropy.apply(logits, labels, objective, False), reduction)


def linear_cross_entropy(
    x: Tensor,
    weight: nn.Parameter,
    labels: Tensor,
    *,
    tp: Axis,
    sequence_parallel: bool,
    vocab_size: int,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "sum",
) -> Tensor:
    """The output layer's product and the cross entropy together: the loss of logits = x @ weight.T.

    x: (batch, seq, hidden), with sequence_parallel (batch, seq/tp, hidden); weight: (padded vocab/tp, hidden); labels:
    (batch, seq), the whole sequence on every rank. The rest as for `vocab_parallel_cross_entropy`.
    Nobody else sees the logits, so in backward they become their gradient, in place; a second backward through the same
    graph is refused by autograd.
    chunk_tokens: the logits of so many tokens at a time exist, made again in backward: (chunk_tokens, vocab/tp) is held
    in place of (batch * seq, vocab/tp), for one more product. The weight gradient is then computed in the backward
    itself, even while a `WeightGradStore` is open, which gets it finished: put off, it would hold all the logits'
    gradients.
    """
    objective = _Objective(tp, vocab_size, ignore_index, label_smoothing, z_loss)
    if chunk_tokens is None:
        logits = parallel_linear(x, weight, tp=tp, enter="all_gather" if sequence_parallel else "copy", leave="cut")
        objective.check(logits.shape, labels)
        return _reduced(_CrossEntropy.apply(logits, labels, objective, True), reduction)
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens={chunk_tokens} must be at least 1, or None for all tokens at once")
    seq = x.shape[SEQUENCE_DIM] * (tp.size if sequence_parallel else 1)
    objective.check((*x.shape[:SEQUENCE_DIM], seq, weight.shape[0]), labels)
    x = in_precision_of(x, weight)
    losses = _LinearCrossEntropy.apply(x, weight, labels, objective, sequence_parallel, chunk_tokens)
    return _reduced(losses, reduction)


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction not in ("sum", "none"):
        raise ValueError(
            f"reduction={reduction!r} is neither 'sum' nor 'none'; divide the sum by your count for a mean"
        )
    return losses.sum() if reduction == "sum" else losses


@dataclass(frozen=True)
class _Objective:
    """What is minimised, and this rank's part in it. Rows are logits (tokens, columns) with labels (tokens,)."""

    tp: Axis
    vocab_size: int
    ignore_index: int
    label_smoothing: float
    z_loss: float

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing={self.label_smoothing} must lie in [0, 1)")

    @property
    def columns(self) -> int:
        """Columns of each rank, padding included."""
        return padded_size(self.vocab_size, self.tp.size) // self.tp.size

    @property
    def classes(self) -> int:
        """Columns of this rank that are no padding; 0 on a rank that the vocabulary does not reach."""
        return min(max(self.vocab_size - self.tp.rank * self.columns, 0), self.columns)

    def check(self, shape: tuple[int, ...], labels: Tensor) -> None:
        *tokens, columns = shape
        if columns != self.columns:
            raise ValueError(
                f"logits of {columns} columns: a vocabulary of {self.vocab_size} over {self.tp.name}={self.tp.size} "
                f"has {self.columns} on each rank; pass this rank's logits, cut and not gathered"
            )
        if tuple(tokens) != tuple(labels.shape):
            raise ValueError(f"labels of shape {tuple(labels.shape)} for logits of {tuple(tokens)} tokens")
        valid = labels.masked_fill(labels == self.ignore_index, 0)
        require_in_range(valid, self.vocab_size, what=f"labels (but for ignore_index={self.ignore_index})")

    def place(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Each label's column here, as an index that is always legal, and whether it is really here."""
        column = labels - self.tp.rank * self.columns
        return column.clamp(0, self.columns - 1), (column >= 0) & (column < self.columns) & self.counted(labels)

    def counted(self, labels: Tensor) -> Tensor:
        return labels != self.ignore_index

    def statistics(self, rows: Tensor, labels: Tensor) -> Tensor:
        """(3, tokens) of this rank's columns: the largest logit, the sum of exp(logit - largest), and the label's logit
        or 0; if labels are smoothed a fourth row, the sum of the logits."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        out = torch.zeros(4 if self.label_smoothing else 3, len(rows), dtype=wide, device=rows.device)
        out[0] = lowest = torch.finfo(wide).min  # not -inf, since -inf - -inf is not a number
        column, here = self.place(labels)
        out[2] = torch.where(here, rows.gather(1, column.unsqueeze(1)).squeeze(1), 0)
        for block in _blocks(rows) if self.classes else ():
            logits = rows[block, : self.classes].to(wide)
            largest = out[0, block] = logits.amax(1).clamp(min=lowest)
            out[1, block] = (logits - largest.unsqueeze(1)).exp_().sum(1)
            if self.label_smoothing:
                out[3, block] = logits.sum(1)
        return out

    def combine(self, statistics: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Over all ranks' columns: the loss (tokens,), and (2, tokens), the largest logit and the sum beside it."""
        gathered = start_all_gather(statistics, self.tp, dim=0).wait().view(self.tp.size, *statistics.shape)
        largest = gathered[:, 0].amax(0)
        total = (gathered[:, 1] * (gathered[:, 0] - largest).exp()).sum(0)
        target = gathered[:, 2].sum(0)
        loss = (largest - target) + total.log()  # in this order, since a small loss is not to drown in large logits
        if self.label_smoothing:
            loss += self.label_smoothing * (target - gathered[:, 3].sum(0) / self.vocab_size)
        if self.z_loss:
            loss += self.z_loss * (largest + total.log()).square()
        return torch.where(self.counted(labels), loss, 0), torch.stack((largest, total))

    def gradient(self, rows: Tensor, labels: Tensor, softmax: Tensor, upstream: Tensor, out: Tensor) -> None:
        """Writes the gradient of the rows into `out`, which may be the rows themselves. softmax: as `combine` gives."""
        largest, total = softmax
        weight = torch.where(self.counted(labels), upstream, 0)
        of_softmax = (weight * (1 + 2 * self.z_loss * (largest + total.log())) / total).unsqueeze(1)
        of_all = (weight * (self.label_smoothing / self.vocab_size)).unsqueeze(1)
        column, here = self.place(labels)
        of_target = torch.where(here, (self.label_smoothing - 1) * weight, 0).unsqueeze(1)
        column, largest = column.unsqueeze(1), largest.unsqueeze(1)
        for block in _blocks(rows):
            target = out[block]
            # Half-precision logits become float32 here; rounding before the target is subtracted would lose all of
            # the gradient where the softmax is close to 1.
            gradient = target if out.dtype == largest.dtype else torch.empty_like(target, dtype=largest.dtype)
            torch.sub(rows[block], largest[block], out=gradient).exp_().mul_(of_softmax[block])
            if self.label_smoothing:
                gradient -= of_all[block]
            gradient[:, self.classes :] = 0
            gradient.scatter_add_(1, column[block], of_target[block])
            if gradient is not target:
                target.copy_(gradient)


def _blocks(rows: Tensor) -> Iterator[slice]:
    """Blocks of rows, so that what is made on the way is small: on the CPU it stays in the cache from pass to pass."""
    elements = 2**17 if rows.device.type == "cpu" else 2**26
    size = max(1, elements // rows.shape[1])
    for start in range(0, len(rows), size):
        yield slice(start, start + size)


class _CrossEntropy(torch.autograd.Function):
    """Per token. Keeps the logits it was given, and two numbers a token; backward may `consume` the logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, objective: _Objective, consume: bool) -> Tensor:
        order = sequence_first(logits)
        flat = _in_order(labels, order)
        rows = to_rows(logits, sequence_first=order)
        loss, softmax = objective.combine(objective.statistics(rows, flat), flat)
        ctx.save_for_backward(logits, labels, softmax)
        ctx.objective, ctx.consume = objective, consume
        return _from_order(loss, labels.shape, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, softmax = ctx.saved_tensors
        order = sequence_first(logits)
        rows = to_rows(logits, sequence_first=order)
        out = rows if ctx.consume else torch.empty_like(rows, memory_format=torch.contiguous_format)
        ctx.objective.gradient(rows, _in_order(labels, order), softmax, _in_order(upstream, order), out)
        return from_rows(out, labels.shape, sequence_first=order), None, None, None


class _LinearCrossEntropy(torch.autograd.Function):
    """Per token, with the logits of chunk_tokens tokens at a time. Keeps x as it came, and two numbers a token."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: nn.Parameter,
        labels: Tensor,
        objective: _Objective,
        sequence_parallel: bool,
        chunk_tokens: int,
    ) -> Tensor:
        ctx.weight, ctx.objective = weight, objective
        ctx.sequence_parallel, ctx.chunk_tokens = sequence_parallel, chunk_tokens
        rows, order = _enter(x, objective.tp, sequence_parallel)
        flat, matrix = _in_order(labels, order), weight.to(x.dtype)
        chunks = zip(rows.split(chunk_tokens), flat.split(chunk_tokens), strict=True)
        statistics = [objective.statistics(F.linear(chunk, matrix), chunk_labels) for chunk, chunk_labels in chunks]
        loss, softmax = objective.combine(torch.cat(statistics, 1), flat)
        ctx.save_for_backward(x, labels, softmax)
        return _from_order(loss, labels.shape, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        x, labels, softmax = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight, tp = ctx.weight, ctx.objective.tp
        rows, order = _enter(x, tp, ctx.sequence_parallel)
        matrix = weight.to(x.dtype)
        dx = torch.empty_like(rows)
        dw = torch.zeros(weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        flat, upstream = _in_order(labels, order), _in_order(upstream, order)
        for start in range(0, len(rows), ctx.chunk_tokens):
            chunk = slice(start, start + ctx.chunk_tokens)
            logits = F.linear(rows[chunk], matrix)
            ctx.objective.gradient(logits, flat[chunk], softmax[:, chunk], upstream[chunk], logits)
            if needs_x:
                torch.mm(logits, matrix, out=dx[chunk])
            if needs_weight:
                dw += logits.t() @ rows[chunk]
            del logits  # before the next chunk's are made
        whole_dx = _leave(dx, labels.shape, order, tp, ctx.sequence_parallel) if needs_x else None
        whole_dw = _given(weight, dw.to(weight.dtype)) if needs_weight else None
        return whole_dx, whole_dw, None, None, None, None


def _given(weight: nn.Parameter, dw: Tensor) -> Tensor | None:
    """Gives a finished weight gradient to the open store, or back to autograd if there is none."""
    store = open_store(weight)
    if store is None:
        return dw
    store.put(weight, lambda: lambda: dw)
    return None


def _enter(x: Tensor, tp: Axis, sequence_parallel: bool) -> tuple[Tensor, bool]:
    """The whole x as rows, and whether they are in the order of a sequence-first memory."""
    whole = start_all_gather(x, tp, dim=SEQUENCE_DIM).wait() if sequence_parallel else x
    order = sequence_first(whole)
    return to_rows(whole, sequence_first=order), order


def _leave(rows: Tensor, shape: tuple[int, ...], order: bool, tp: Axis, sequence_parallel: bool) -> Tensor:
    """The conjugate of `_enter`: the ranks' summands of dX, summed, as x was."""
    dx = from_rows(rows, shape, sequence_first=order)
    if sequence_parallel:
        return start_reduce_scatter(dx, tp, dim=SEQUENCE_DIM).wait()
    return start_all_reduce(dx, tp).wait()


def _in_order(tokens: Tensor, order: bool) -> Tensor:
    """One number a token, (..., seq) -> (tokens,), in the order that `to_rows` gives the activations."""
    return (tokens.movedim(-1, 0) if order else tokens).reshape(-1)


def _from_order(tokens: Tensor, shape: tuple[int, ...], order: bool) -> Tensor:
    """The inverse of `_in_order`."""
    return tokens.view(shape[-1], *shape[:-1]).movedim(0, -1) if order else tokens.view(shape)

"""Collectives on an `Axis` and their conjugate pairs.

A tensor that n ranks of an axis hold together is in one of three states: *whole* (every rank has all of it), *cut*
(each has a slice) or *summand* (each has a term of a sum). A layer is right where the states meet: what one function
leaves is what the next expects, forward and backward.

| function            | x before -> after    | dx after <- before   | forward        | backward       |
|---------------------|----------------------|----------------------|----------------|----------------|
| `copy` (f)          | whole -> whole       | whole <- summand     | identity       | all-reduce     |
| `reduce` (g)        | summand -> whole     | whole <- whole       | all-reduce     | identity       |
| `split`             | whole -> cut         | whole <- cut         | slice          | all-gather     |
| `gather`            | cut -> whole         | cut <- whole         | all-gather     | slice          |
| `all_gather`        | cut -> whole         | cut <- summand       | all-gather     | reduce-scatter |
| `reduce_scatter`    | summand -> cut       | whole <- cut         | reduce-scatter | all-gather     |
| `all_to_all`        | cut -> cut           | cut <- cut           | all-to-all     | all-to-all     |

f and g are named after Megatron-LM (arXiv:1909.08053, section 3), their sequence-parallel siblings after
Korthikanti et al. (arXiv:2205.05198, section 4.2). Each pair is its own transpose in the inner product that counts a
whole tensor once and adds cuts and summands over the ranks. `gather` is for what all ranks then compute alike,
`all_gather` for what each continues differently (so that their gradients are summands).

The functions here are seen by autograd; `start_*` and `ring_shift` are the collectives under them. On an axis of size 1
all are the identity. Messages between two ranks go on lanes (`open_lanes`, `start_send`, `start_receive`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.comm.collectives import (
    Pending,
    ring_shift,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from megalite.comm.lanes import LaneKey, open_lanes, start_receive, start_send
from megalite.comm.observe import Call, Observer, observe
from megalite.mesh import Axis

__all__ = [
    "Call",
    "LaneKey",
    "Observer",
    "Pending",
    "all_gather",
    "all_to_all",
    "copy",
    "gather",
    "observe",
    "open_lanes",
    "reduce",
    "reduce_scatter",
    "ring_shift",
    "split",
    "start_all_gather",
    "start_all_reduce",
    "start_all_to_all",
    "start_broadcast",
    "start_receive",
    "start_reduce_scatter",
    "start_send",
]

Transform = Callable[[Tensor], Tensor]


class _Pair(torch.autograd.Function):
    """Forward is one collective, backward its conjugate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Transform, back: Transform) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


def _pair(x: Tensor, axis: Axis, there: Transform, back: Transform) -> Tensor:
    return x if axis.size == 1 else _Pair.apply(x, there, back)


def _identity(x: Tensor) -> Tensor:
    return x.view_as(x)


def _sum(axis: Axis) -> Transform:
    # A copy, since the tensor given belongs to somebody else: an upstream gradient is often shared by two branches.
    return lambda x: start_all_reduce(x.clone(memory_format=torch.contiguous_format), axis).wait()


def _slice(axis: Axis, dim: int) -> Transform:
    def cut(x: Tensor) -> Tensor:
        part = axis.part(x.shape[dim])
        return x.narrow(dim, part.start, part.stop - part.start).clone()  # a view would keep the whole alive

    return cut


def _join(axis: Axis, dim: int) -> Transform:
    return lambda x: start_all_gather(x, axis, dim=dim).wait()


def _sum_and_slice(axis: Axis, dim: int) -> Transform:
    return lambda x: start_reduce_scatter(x, axis, dim=dim).wait()


def copy(x: Tensor, axis: Axis) -> Tensor:
    """f: x goes unchanged to ranks that each use it differently; backward sums their gradients."""
    return _pair(x, axis, _identity, _sum(axis))


def reduce(x: Tensor, axis: Axis) -> Tensor:
    """g: sums the ranks' x; what follows is computed alike on all ranks, so backward is the identity."""
    return _pair(x, axis, _sum(axis), _identity)


def split(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Each rank keeps its slice along `dim`; backward gathers. ValueError if the axis does not divide the dim."""
    return _pair(x, axis, _slice(axis, dim), _join(axis, dim))


def gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Joins the ranks' slices along `dim` for what is then computed alike on all ranks; backward slices."""
    return _pair(x, axis, _join(axis, dim), _slice(axis, dim))


def all_gather(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Joins the ranks' slices along `dim` for what each continues differently; backward reduce-scatters."""
    return _pair(x, axis, _join(axis, dim), _sum_and_slice(axis, dim))


def reduce_scatter(x: Tensor, axis: Axis, dim: int) -> Tensor:
    """Sums the ranks' x and leaves each its slice along `dim`; backward gathers."""
    return _pair(x, axis, _sum_and_slice(axis, dim), _join(axis, dim))


def all_to_all(
    x: Tensor, axis: Axis, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None
) -> Tensor:
    """Exchanges rows (dim 0) between all ranks, see `start_all_to_all`; its own transpose with the counts swapped."""

    def exchange(x: Tensor, send: Sequence[int] | None, receive: Sequence[int] | None) -> Tensor:
        return start_all_to_all(x, axis, send_counts=send, receive_counts=receive).wait()

    return _pair(
        x, axis, lambda x: exchange(x, send_counts, receive_counts), lambda g: exchange(g, receive_counts, send_counts)
    )

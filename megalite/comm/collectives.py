"""Collectives on an `Axis`, started now and waited for later: the only place that calls torch.distributed's.

Each `start_*` returns a `Pending`; its `wait()` gives the result. Work between the two runs while the bytes travel.
None of them is seen by autograd: `megalite.comm` has the differentiable pairs. Inputs may have any strides. On an axis
of size 1 each is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.observe import Call, seen
from megalite.mesh import Axis

T = TypeVar("T")
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

_TAGS = 2**31  # torch's tags are positive numbers of 32 bits

# torch 2.13 renames the flat collectives and warns on the old names, which are the only ones in 2.11.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Flight(NamedTuple):
    """One collective that has been handed to the backend, and what is to be waited for."""

    call: Call
    works: Sequence[Any]


def issue(operation: str, axis: Axis, tensors: Sequence[Tensor], start: Callable[[], Any]) -> Flight:
    """Hands one collective to the backend, seen by the observers. start: gives torch's work, or a list of them."""
    call = Call(operation, axis, sum(tensor.nbytes for tensor in tensors))
    with seen(call, "issuing", "issued"):
        works = start()
    return Flight(call, works if isinstance(works, list) else [works])


class Pending(Generic[T]):
    """A result under way. `wait()` blocks until it is there (on CUDA: makes the current stream wait) and returns it."""

    def __init__(self, finish: Callable[[], T] | None, flight: Flight | None = None, result: T | None = None) -> None:
        self._finish, self._flight, self._result = finish, flight, result

    @classmethod
    def done(cls, result: T) -> Pending[T]:
        return cls(None, None, result)

    def wait(self) -> T:
        if self._finish is not None:
            if self._flight is not None:
                with seen(self._flight.call, "waiting", "waited"):
                    for work in self._flight.works:
                        work.wait()
            self._result, self._finish, self._flight = self._finish(), None, None
        return self._result  # type: ignore[return-value]


def start_all_reduce(x: Tensor, axis: Axis, *, op: str = "sum") -> Pending[Tensor]:
    """Every rank gets the sum (or max, min) of all ranks' x, the same bits on each. x: any shape.

    x is given away: where it is contiguous the result overwrites it. Ring: each rank sends 2 (n-1)/n of x.
    """
    if axis.size == 1:
        return Pending.done(x)
    x = x.contiguous()  # collectives refuse strides; the copy, not the caller's tensor, then holds the result
    start = partial(dist.all_reduce, x, op=OPS[op], group=axis.group, async_op=True)
    return Pending(lambda: x, issue("all_reduce", axis, [x], start))


def start_all_gather(x: Tensor, axis: Axis, *, dim: int = 0, into: Tensor | None = None) -> Pending[Tensor]:
    """Every rank gets all ranks' x, joined along `dim` in rank order. x: the same shape on every rank.

    into: where the result goes, contiguous and joined along dim 0; x may be this rank's part of it. None: new memory.
    Ring: each rank sends (n-1)/n of the result. A dim that is outermost in memory is gathered without a copy.
    """
    assert into is None or dim == 0, dim
    if axis.size == 1:
        return Pending.done(x if into is None or into.data_ptr() == x.data_ptr() else into.copy_(x))
    part = x.movedim(dim, 0).contiguous()
    shape = (axis.size * part.shape[0], *part.shape[1:])
    whole = part.new_empty(shape) if into is None else into.view(shape)
    if _meets_peers(whole, axis):
        shares = list(whole.view(axis.size, *part.shape).unbind())
        mine = shares[axis.rank]
        if mine.data_ptr() != part.data_ptr():
            mine.copy_(part)
        start = partial(_exchange, [mine] * axis.size, shares, axis, tag=0)
    else:
        start = partial(_all_gather_flat, whole, part, group=axis.group, async_op=True)
    return Pending(lambda: whole.movedim(0, dim), issue("all_gather", axis, [part], start))


def start_reduce_scatter(x: Tensor, axis: Axis, *, dim: int = 0, into: Tensor | None = None) -> Pending[Tensor]:
    """Rank r gets the r-th part along `dim` of the sum of all ranks' x. Ring: each rank sends (n-1)/n of x.

    into: where the result goes, along dim 0; it may be this rank's part of x. None: new memory.
    Gloo's own reduce-scatter is an all-reduce and a slice, twice the bytes; there the parts are exchanged and summed
    here, in rank order, in float32 if x is of half precision. Raises ValueError if the axis does not divide the dim.
    """
    assert into is None or dim == 0, dim
    if axis.size == 1:
        return Pending.done(x if into is None or into.data_ptr() == x.data_ptr() else into.copy_(x))
    axis.part(x.shape[dim])
    whole = x.movedim(dim, 0).contiguous()
    shares = list(whole.view(axis.size, whole.shape[0] // axis.size, *whole.shape[1:]).unbind())
    mine = shares[axis.rank]
    start: Callable[[], Any]
    if dist.get_backend(axis.group) != "gloo":
        part = torch.empty_like(mine) if into is None else into
        start = partial(_reduce_scatter_flat, part, whole, group=axis.group, async_op=True)
        return Pending(lambda: part.movedim(0, dim), issue("reduce_scatter", axis, [whole], start))
    if _meets_peers(whole, axis):
        parts = [mine if share is mine else torch.empty_like(share) for share in shares]
        start = partial(_exchange, shares, parts, axis, tag=1)
    else:
        received = torch.empty_like(whole)
        parts = list(received.view(axis.size, *mine.shape).unbind())
        start = partial(dist.all_to_all_single, received, whole, group=axis.group, async_op=True)
    flight = issue("reduce_scatter", axis, [whole], start)
    return Pending(lambda: _sum_in_order(parts, mine, into).movedim(0, dim), flight)


def _sum_in_order(parts: Sequence[Tensor], mine: Tensor, into: Tensor | None) -> Tensor:
    """parts[0] + parts[1] + ..., left to right: the same bits however many threads or vector lanes there are.

    The sum is made in a part that was received, or in `into`; `mine`, if it is among the parts, is the caller's.
    """
    total, *others = parts
    if total.dtype in (torch.bfloat16, torch.float16):
        wide = total.float()
        for part in others:
            wide += part
        return wide.to(total.dtype) if into is None else into.copy_(wide)
    for part in others:
        kept = part if total is mine else total
        total = torch.add(total, part, out=into if into is not None and part is others[-1] else kept)
    return total


def _meets_peers(x: Tensor, axis: Axis) -> bool:
    """Whether shares go straight from rank to rank: on the CPU, where Gloo's collectives copy them on the way."""
    return x.device.type == "cpu" and dist.get_backend(axis.group) == "gloo"


def _exchange(sent: Sequence[Tensor], received: Sequence[Tensor], axis: Axis, *, tag: int) -> list[Any]:
    """sent[r] goes to rank r of the axis, and received[r] comes from it, for all ranks but this one.

    Gloo matches by tag, and dies of a message that is longer than its place. So the size is in the tag: ranks that
    disagree in it miss one another until the timeout, which is an error that can be caught and named.
    """
    others = [(axis.rank + step) % axis.size for step in range(1, axis.size)]
    tag = (2 * sent[axis.rank].nbytes + tag) % _TAGS
    # torch's profiler would note the end of each message when it is waited for, and crash if it has stopped before.
    torch._C._autograd._enable_record_function(False)
    try:
        works = [dist.irecv(received[rank], group=axis.group, group_src=rank, tag=tag) for rank in others[::-1]]
        return works + [dist.isend(sent[rank], group=axis.group, group_dst=rank, tag=tag) for rank in others]
    finally:
        torch._C._autograd._enable_record_function(True)


def start_all_to_all(
    x: Tensor, axis: Axis, *, send_counts: Sequence[int] | None = None, receive_counts: Sequence[int] | None = None
) -> Pending[Tensor]:
    """Rows of x, along dim 0, go to the ranks: the first send_counts[0] to rank 0 and so on; None means equal parts.

    Returns the rows received, in rank order: (sum(receive_counts), ...). Counts may be 0.
    """
    if axis.size == 1:
        return Pending.done(x)
    x = x.contiguous()
    receive, send = (None if counts is None else list(counts) for counts in (receive_counts, send_counts))
    if receive is None or send is None:
        axis.part(x.shape[0])
    received = x.new_empty((x.shape[0] if receive is None else sum(receive), *x.shape[1:]))
    start = partial(dist.all_to_all_single, received, x, receive, send, group=axis.group, async_op=True)
    return Pending(lambda: received, issue("all_to_all", axis, [x], start))


def ring_shift(tensors: Sequence[Tensor], axis: Axis) -> Pending[list[Tensor]]:
    """Each tensor goes to the next rank of the axis (the last sends to the first); gives what the one before sent.

    All ranks pass the same shapes and dtypes. The next block travels while this one is computed with.
    """
    if axis.size == 1 or not tensors:
        return Pending.done(list(tensors))
    following, before = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
    sent = [tensor.contiguous() for tensor in tensors]
    received = [torch.empty_like(tensor) for tensor in sent]
    ops = [dist.P2POp(dist.isend, x, following, axis.group, tag=i) for i, x in enumerate(sent)]
    ops += [dist.P2POp(dist.irecv, x, before, axis.group, tag=i) for i, x in enumerate(received)]
    flight = issue("ring_shift", axis, sent, partial(dist.batch_isend_irecv, ops))

    def finish(sent: list[Tensor] = sent) -> list[Tensor]:  # held here, since `sent` must outlive the transfer
        return received

    return Pending(finish, flight)


def start_broadcast(x: Tensor, axis: Axis, *, source: int = 0) -> Pending[Tensor]:
    """Every rank gets the x of rank `source` of the axis. x must be contiguous: it is overwritten elsewhere."""
    if axis.size == 1:
        return Pending.done(x)
    start = partial(dist.broadcast, x, axis.ranks[source], group=axis.group, async_op=True)
    return Pending(lambda: x, issue("broadcast", axis, [x], start))

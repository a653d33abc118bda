"""Each pair of collectives against the table in `megalite.comm`: values, transposes, bytes, strides."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite import comm
from megalite.mesh import Axis
from tests.counting import count
from tests.law import assert_equal, draw, tp_axis, transposed
from tests.ranks import run


class Pair(NamedTuple):
    """A row of the table. States are of x before and after and of dx before and after; forward and backward give what
    rank r holds from what all ranks held; bytes are sent, of the full tensor, forward and backward."""

    call: Callable[[Tensor, Axis, int], Tensor]
    x: str
    y: str
    dy: str
    dx: str
    forward: Callable[[list[Tensor], int, int], Tensor]
    backward: Callable[[list[Tensor], int, int], Tensor]
    shares_sent: tuple[int, int]


def _mine(held: list[Tensor], rank: int, dim: int) -> Tensor:
    return held[rank]


def _total(held: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.stack(held).sum(0)


def _part(held: list[Tensor], rank: int, dim: int) -> Tensor:
    return held[rank].chunk(len(held), dim)[rank]


def _joined(held: list[Tensor], rank: int, dim: int) -> Tensor:
    return torch.cat(held, dim)


def _part_of_total(held: list[Tensor], rank: int, dim: int) -> Tensor:
    return _total(held, rank, dim).chunk(len(held), dim)[rank]


PAIRS = {
    "copy": Pair(lambda x, a, d: comm.copy(x, a), "whole", "whole", "summand", "whole", _mine, _total, (0, 2)),
    "reduce": Pair(lambda x, a, d: comm.reduce(x, a), "summand", "whole", "whole", "whole", _total, _mine, (2, 0)),
    "split": Pair(comm.split, "whole", "cut", "cut", "whole", _part, _joined, (0, 1)),
    "gather": Pair(comm.gather, "cut", "whole", "whole", "cut", _joined, _part, (1, 0)),
    "all_gather": Pair(comm.all_gather, "cut", "whole", "summand", "cut", _joined, _part_of_total, (1, 1)),
    "reduce_scatter": Pair(comm.reduce_scatter, "summand", "cut", "cut", "whole", _part_of_total, _joined, (1, 1)),
}
SHAPE = (4, 8, 12)


def _expanded(x: Tensor) -> Tensor:
    return x[:1].expand_as(x)


LAYOUTS_IN_MEMORY: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (torch.clone, torch.clone),
    (transposed, torch.clone),
    (torch.clone, transposed),
    (transposed, _expanded),
    (_expanded, transposed),
]


def _held(state: str, axis: Axis, dim: int, *, seed: int) -> list[Tensor]:
    """What each rank of the axis holds of a tensor of SHAPE in that state; computed alike on all ranks."""
    if state == "whole":
        return [draw(*SHAPE, seed=seed)] * axis.size
    if state == "cut":
        return list(draw(*SHAPE, seed=seed).chunk(axis.size, dim))
    return [draw(*SHAPE, seed=seed + 1 + rank) for rank in range(axis.size)]


def _check_values() -> None:
    axis = tp_axis()
    for (name, pair), dim, (of_x, of_dy) in itertools.product(PAIRS.items(), (0, 1, -1), LAYOUTS_IN_MEMORY):
        xs = [of_x(x) for x in _held(pair.x, axis, dim, seed=0)]
        dys = [of_dy(dy) for dy in _held(pair.dy, axis, dim, seed=100)]
        x, dy = xs[axis.rank].detach().requires_grad_(), dys[axis.rank]
        x_before, dy_before = x.detach().clone(), dy.clone()
        y = pair.call(x, axis, dim)
        (dx,) = torch.autograd.grad(y, x, dy)
        what = f"{name} along {dim}, {of_x.__name__}, {of_dy.__name__}"
        assert_equal(y.detach(), pair.forward(xs, axis.rank, dim), what + ", y")
        assert_equal(dx, pair.backward(dys, axis.rank, dim), what + ", dx")
        assert torch.equal(x, x_before), what + ": x was written to"
        assert torch.equal(dy, dy_before), what + ": the upstream gradient was written to"


@pytest.mark.parametrize("n", [2, 4])
def test_each_pair_gives_the_values_of_its_row_whatever_the_strides(n):
    """A collective on a copy that is then dropped (x.contiguous()) would give back what was there before."""
    run(_check_values, n)


def _inner(a: Tensor, b: Tensor, axis: Axis, *, once: bool) -> Tensor:
    """A tensor that is whole on both sides counts once; cuts and summands are added over the ranks."""
    product = (a * b).sum()
    if once:
        return product
    dist.all_reduce(product, group=axis.group)
    return product


def _check_transposes() -> None:
    axis = tp_axis()
    for name, pair in PAIRS.items():
        for dim in (0, 1, -1):
            x = _held(pair.x, axis, dim, seed=0)[axis.rank].clone().requires_grad_()
            dy = _held(pair.dy, axis, dim, seed=100)[axis.rank]
            y = pair.call(x, axis, dim)
            (dx,) = torch.autograd.grad(y, x, dy)
            there = _inner(y.detach(), dy, axis, once=pair.y == pair.dy == "whole")
            back = _inner(x.detach(), dx, axis, once=pair.x == pair.dx == "whole")
            assert_equal(there, back, f"{name} along {dim}")
            for state, tensor in ((pair.y, y.detach()), (pair.dx, dx)):
                if state == "whole":
                    answers = [torch.empty_like(tensor.contiguous()) for _ in range(axis.size)]
                    dist.all_gather(answers, tensor.contiguous(), group=axis.group)
                    assert all(torch.equal(answer, tensor) for answer in answers), f"{name}: not the same bits"


@pytest.mark.parametrize("n", [2, 4])
def test_each_pair_is_its_own_transpose(n):
    """<A x, dy> = <x, A^T dy>, and what is whole has the same bits on all ranks."""
    run(_check_transposes, n)


def _sent() -> dict[str, list[tuple[int, float]]]:
    axis, sent = tp_axis(), {}
    for name, pair in PAIRS.items():
        x = _held(pair.x, axis, 0, seed=0)[axis.rank].clone().requires_grad_()
        with count() as forward:
            y = pair.call(x, axis, 0)
        with count() as backward:
            y.backward(torch.ones_like(y))
        sent[name] = [(c.calls(), c.bytes_sent()) for c in (forward, backward)]
    return sent


def test_a_pair_is_at_most_one_collective_each_way_and_sends_no_more_than_the_ring_formula():
    """All-reduce sends 2 (n-1)/n of the full tensor, gather and scatter half of that; Gloo's own reduce-scatter would
    send as much as an all-reduce."""
    n, full_bytes = 4, 4 * 8 * 12 * 8
    formula = {
        name: [(int(share > 0), share * (n - 1) / n * full_bytes) for share in pair.shares_sent]
        for name, pair in PAIRS.items()
    }
    assert run(_sent, n) == [formula] * n


def test_on_an_axis_of_size_one_all_are_the_identity_without_a_process_group():
    axis, x = Axis("tp"), draw(3, 4)
    assert not dist.is_initialized()
    for pair in PAIRS.values():
        assert pair.call(x, axis, 1) is x
    assert comm.all_to_all(x, axis, [3], [3]) is x
    assert comm.start_all_reduce(x, axis).wait() is x
    assert comm.start_broadcast(x, axis).wait() is x
    assert comm.start_all_gather(x, axis, dim=1).wait() is x
    assert comm.start_reduce_scatter(x, axis, dim=1).wait() is x
    assert comm.ring_shift([x], axis).wait()[0] is x


COUNTS = [[2, 0, 1, 3], [0, 0, 0, 0], [4, 1, 0, 1], [1, 2, 0, 0]]  # rows that rank i sends to rank j


def _uneven_all_to_all() -> None:
    axis = tp_axis()
    send, receive = COUNTS[axis.rank], [row[axis.rank] for row in COUNTS]
    rows = [draw(sum(row), 5, seed=rank) for rank, row in enumerate(COUNTS)]
    x = transposed(rows[axis.rank]).requires_grad_() if sum(send) else rows[axis.rank].requires_grad_()
    y = comm.all_to_all(x, axis, send, receive)
    sent = [held.split(row) for held, row in zip(rows, COUNTS, strict=True)]
    assert_equal(y.detach(), torch.cat([parts[axis.rank] for parts in sent]), "y")
    dy = transposed(draw(sum(receive), 5, seed=10 + axis.rank))
    (dx,) = torch.autograd.grad(y, x, dy)
    there = _inner(y.detach(), dy, axis, once=False)
    assert_equal(there, _inner(x.detach(), dx, axis, once=False), "uneven all-to-all is its own transpose")
    everyone = [draw(sum(row[rank] for row in COUNTS), 5, seed=10 + rank) for rank in range(4)]
    parts = [dy.split([row[rank] for row in COUNTS])[axis.rank] for rank, dy in enumerate(everyone)]
    assert_equal(dx, torch.cat(parts), "dx")


def test_an_uneven_all_to_all_delivers_every_row_and_empty_parts_are_no_special_case():
    run(_uneven_all_to_all, 4)


def _even_all_to_all() -> None:
    axis = tp_axis()
    x = draw(4, 3, seed=axis.rank).requires_grad_()
    y = comm.all_to_all(x, axis)
    assert_equal(y.detach(), torch.cat([draw(4, 3, seed=rank).chunk(2)[axis.rank] for rank in range(2)]), "y")
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert_equal(dx, x.detach(), "there and back again")
    with pytest.raises(ValueError, match="5 entries cannot be cut over axis tp of size 2"):
        comm.all_to_all(draw(5, 3), axis)


def test_an_all_to_all_without_counts_sends_equal_parts():
    run(_even_all_to_all, 2)


def _shifted() -> None:
    axis = tp_axis()

    def block(rank: int) -> list[Tensor]:
        return [transposed(draw(3, 5, seed=rank)), torch.full((2, 2), rank), draw(7, seed=50 + rank).float()]

    assert comm.ring_shift([], axis).wait() == []
    pending = comm.ring_shift(block(axis.rank), axis)
    received = pending.wait()
    assert pending.wait() is received, "waiting again gives the same"
    for got, sent in zip(received, block((axis.rank - 1) % axis.size), strict=True):
        assert torch.equal(got, sent)
    once_around = block(axis.rank)
    for _ in range(axis.size):
        once_around = comm.ring_shift(once_around, axis).wait()
    assert all(torch.equal(a, b) for a, b in zip(once_around, block(axis.rank), strict=True))


@pytest.mark.parametrize("n", [2, 3])
def test_a_ring_shift_gives_what_the_rank_before_sent_and_comes_back_after_a_round(n):
    run(_shifted, n)


def _half_precision_sum(dtype: torch.dtype, large: float) -> Tensor:
    axis = tp_axis()
    x = torch.full((4, 2), large if axis.rank == 0 else 1.0, dtype=dtype)
    return comm.start_reduce_scatter(x, axis, dim=0).wait()


@pytest.mark.parametrize(("dtype", "large"), [(torch.bfloat16, 256.0), (torch.float16, 2048.0)])
def test_a_reduce_scatter_of_half_precision_sums_in_float32(dtype, large):
    """large + 1 rounds to large in this type, so a sum in it would stay there; the sum of all four does not."""
    assert torch.tensor(large, dtype=dtype) + 1 == large
    for part in run(_half_precision_sum, 4, dtype, large):
        assert part.dtype == dtype
        assert torch.equal(part, torch.full((1, 2), large + 3).to(dtype))
        assert (part > large).all()


def _sum_bits() -> None:
    axis = tp_axis()
    x = draw(8, 33, seed=axis.rank).float()
    parts = [draw(8, 33, seed=rank).float().chunk(4)[axis.rank] for rank in range(4)]
    in_rank_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    before = x.clone()
    assert torch.equal(comm.start_reduce_scatter(x, axis, dim=0).wait(), in_rank_order)
    assert torch.equal(x, before), "x is the caller's"
    elsewhere, mine = torch.empty(2, 33), x[axis.part(8)]
    assert comm.start_reduce_scatter(x, axis, into=elsewhere).wait().data_ptr() == elsewhere.data_ptr()
    comm.start_reduce_scatter(x, axis, into=mine).wait()
    assert torch.equal(elsewhere, in_rank_order) and torch.equal(mine, in_rank_order)
    others = [row for row in range(8) if row // 2 != axis.rank]
    assert torch.equal(x[others], before[others]), "only this rank's part was given away"


def _several_in_flight() -> None:
    """Of one size, in one group, waited for in another order than they were issued."""
    axis = tp_axis()
    blocks = [draw(4 * axis.size, 3, seed=10 * number + axis.rank) for number in range(3)]
    sums = [sum(draw(4 * axis.size, 3, seed=10 * number + rank) for rank in range(axis.size)) for number in range(3)]
    reductions = [comm.start_reduce_scatter(block, axis) for block in blocks]
    gathers = [comm.start_all_gather(total[axis.part(len(total))], axis) for total in sums]
    empty = comm.start_all_gather(torch.ones(0, 2), axis)
    for pending, total in reversed(list(zip(gathers, sums, strict=True))):
        assert torch.equal(pending.wait(), total)
    for pending, total in reversed(list(zip(reductions, sums, strict=True))):
        assert_equal(pending.wait(), total[axis.part(len(total))], "a sum among several")
    assert empty.wait().shape == (0, 2)


@pytest.mark.parametrize("n", [2, 3])
def test_gathers_and_reductions_in_flight_at_once_are_not_taken_for_each_other(n):
    run(_several_in_flight, n)


def test_a_reduce_scatter_on_gloo_sums_in_rank_order():
    run(_sum_bits, 4)


def _others() -> None:
    axis = tp_axis()
    rank = torch.tensor([axis.rank + 1.0])
    assert comm.start_all_reduce(rank.clone(), axis, op="max").wait() == 3
    assert comm.start_all_reduce(rank.clone(), axis, op="min").wait() == 1
    assert comm.start_broadcast(rank.clone(), axis, source=1).wait() == 2
    strided = transposed(draw(3, 5, seed=axis.rank))
    every = [draw(3, 5, seed=rank) for rank in range(axis.size)]
    assert_equal(comm.start_all_reduce(strided, axis).wait(), sum(every), "the sum of strided tensors")
    for refused in (
        lambda: comm.split(draw(2, 4), axis, 1),
        lambda: comm.reduce_scatter(draw(2, 4), axis, -1),
    ):
        with pytest.raises(ValueError, match="4 entries cannot be cut over axis tp of size 3"):
            refused()


def test_max_min_and_broadcast_and_a_dim_that_the_axis_does_not_divide():
    run(_others, 3)

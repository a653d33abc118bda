"""The counter sees every collective of a rank, in autograd's backward too, with the bytes that the formulas give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.counting import count
from tests.ranks import run


def _issue(name: str) -> None:
    """A collective on a full tensor of 24 float32 elements, 96 bytes."""
    n, rank = dist.get_world_size(), dist.get_rank()
    full, share = torch.ones(24), torch.ones(24 // n)
    if name == "all_reduce":
        dist.all_reduce(full)
    elif name == "all_gather":
        dist.all_gather([torch.empty(24 // n) for _ in range(n)], share)
    elif name == "all_gather_flat":
        all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # 2.11: the latter
        all_gather_flat(full, share)
    elif name == "reduce_scatter":
        dist.reduce_scatter(share, list(full.chunk(n)))
    elif name == "all_to_all":
        dist.all_to_all_single(torch.empty(24), full)
    elif name == "broadcast":
        dist.broadcast(full, src=0)
    elif name == "reduce":
        dist.reduce(full, dst=0)
    elif name == "scatter":
        dist.scatter(share, list(full.chunk(n)) if rank == 0 else None, src=0)
    elif name == "gather":
        dist.gather(share, [torch.empty(24 // n) for _ in range(n)] if rank == 0 else None, dst=0)
    elif name == "send":
        dist.send(full, dst=1) if rank == 0 else (dist.recv(full, src=0) if rank == 1 else None)
    elif name == "barrier":
        dist.barrier()


def _sent(name: str) -> tuple[int, float]:
    with count() as c:
        _issue(name)
    return c.calls(), c.bytes_sent()


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("all_reduce", [144, 144, 144, 144]),
        ("all_gather", [72, 72, 72, 72]),
        ("all_gather_flat", [72, 72, 72, 72]),
        ("reduce_scatter", [72, 72, 72, 72]),
        ("all_to_all", [72, 72, 72, 72]),
        ("broadcast", [96, 96, 96, 0]),
        ("reduce", [0, 96, 96, 96]),
        ("scatter", [72, 0, 0, 0]),
        ("gather", [0, 24, 24, 24]),
        ("send", [96, 0, 0, 0]),
        ("barrier", [0, 0, 0, 0]),
    ],
)
def test_each_primitive_is_seen_once_with_the_bytes_of_its_formula(name, sent):
    results = run(_sent, 4, name)
    assert [r[1] for r in results] == sent
    assert [r[0] for r in results] == ([1, 1, 0, 0] if name == "send" else [1, 1, 1, 1])


class _SumsItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        dist.all_reduce(gradient := gradient.clone())
        return gradient


def _backward() -> list[tuple[Any, ...]]:
    x = torch.ones(3, 5, dtype=torch.float64, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad[:1]))
    with count() as c:
        y = _SumsItsGradient.apply(x).sum()
        before = c.calls()
        y.backward()
    assert before == 0
    return [(call.op, call.numel, call.bytes, call.ranks, call.dtype) for call in c.record]


def test_collectives_in_a_backward_and_in_its_hooks_are_seen_in_order():
    for record in run(_backward, 2):
        assert record == [
            ("allreduce_", 15, 120, 2, torch.float64),
            ("allreduce_", 5, 40, 2, torch.float64),
        ]


def _uneven_and_grouped() -> tuple[float, float, float]:
    rank = dist.get_rank()
    group = dist.new_group([0, 1], group_desc="tp")
    with count() as c:
        send = [1, 3] if rank == 0 else [2, 0]
        receive = [1, 2] if rank == 0 else [3, 0]
        x = torch.ones(sum(send), 2)
        dist.all_to_all_single(torch.empty(sum(receive), 2), x, receive, send, group=group)
        dist.all_reduce(torch.ones(1))
    return c.bytes_sent("all_to_all"), c.bytes_sent(group="tp"), c.bytes_sent()


def test_an_uneven_all_to_all_counts_what_leaves_the_rank_and_groups_are_told_apart():
    assert run(_uneven_and_grouped, 2) == [(24, 24, 28), (16, 16, 20)]


def _functional() -> list[tuple[str, int, float]]:
    from torch.distributed import _functional_collectives as functional

    group = dist.group.WORLD
    with count() as c:
        functional.all_reduce(torch.ones(4), "sum", group).sum()
        functional.all_gather_tensor(torch.ones(2), 0, group).sum()
        functional.reduce_scatter_tensor(torch.ones(4), "sum", 0, group).sum()
        functional.all_to_all_single(torch.ones(4), None, None, group).sum()
    return [(call.kind, call.numel, call.sent) for call in c.record]


def test_the_functional_collectives_that_torchs_own_parallel_layers_issue_are_seen_too():
    for record in run(_functional, 2):
        assert record == [("all_reduce", 4, 16), ("all_gather", 4, 8), ("reduce_scatter", 4, 8), ("all_to_all", 4, 8)]

"""Shows every collective on small numbers: each rank's tensor before and after, and the bytes that the rank sends.

    python -m megalite.comm --ranks 4                                    starts four ranks here
    torchrun --standalone --nproc-per-node=4 -m megalite.comm            shows the ranks that torchrun has started

Rank r begins with n numbers, one for each part that a tensor can be cut into: 10 (r + 1) + part (over more than ten
ranks, 100 (r + 1) + part). So the tens say whose a number was and the ones which part, and a sum over four ranks reads
100 104 108 112.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import (
    ring_shift,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from megalite.comm.start import Started, start
from megalite.mesh import Axis

ROOT = 0


class Before(NamedTuple):
    """What a rank begins with: `whole`, its tensor of n numbers, the axis, and a store that counts for the barrier."""

    whole: Tensor
    axis: Axis
    store: dist.Store

    @property
    def part(self) -> Tensor:
        """Its own part alone, for primitives that begin with one part a rank."""
        return self.whole[self.axis.part(len(self.whole))]


class Primitive(NamedTuple):
    """One collective: what it does, what it sends by a ring or a chain, and how to run it.

    sends: bytes, given those of the full tensor, the ranks n and the steps from the root along the chain. run: gives
    this rank's tensor before and after, None where it has none.
    """

    name: str
    law: str
    cost: str
    sends: Callable[[int, int, int], float]
    run: Callable[[Before], tuple[Tensor | None, Tensor | None]]


class Shown(NamedTuple):
    """One primitive as it went on one rank, with plain numbers."""

    name: str
    before: list[float] | None
    after: list[float] | None
    sends_bytes: float


def _broadcast(x: Before) -> tuple[Tensor, Tensor]:
    return x.whole, start_broadcast(x.whole.clone(), x.axis, source=ROOT).wait()


def _scatter(x: Before) -> tuple[Tensor | None, Tensor]:
    mine = torch.empty_like(x.part)
    is_root = x.axis.rank == ROOT
    dist.scatter(mine, list(x.whole.chunk(x.axis.size)) if is_root else None, src=ROOT)
    return (x.whole if is_root else None), mine


def _gather(x: Before) -> tuple[Tensor, Tensor | None]:
    parts = [torch.empty_like(x.part) for _ in range(x.axis.size)] if x.axis.rank == ROOT else None
    dist.gather(x.part, parts, dst=ROOT)
    return x.part, torch.cat(parts) if parts else None


def _reduce(x: Before) -> tuple[Tensor, Tensor | None]:
    total = x.whole.clone()
    dist.reduce(total, dst=ROOT)
    return x.whole, total if x.axis.rank == ROOT else None  # elsewhere a half-made sum is left


def _all_gather(x: Before) -> tuple[Tensor, Tensor]:
    return x.part, start_all_gather(x.part, x.axis).wait()


def _reduce_scatter(x: Before) -> tuple[Tensor, Tensor]:
    return x.whole, start_reduce_scatter(x.whole, x.axis).wait()


def _all_reduce(x: Before) -> tuple[Tensor, Tensor]:
    return x.whole, start_all_reduce(x.whole.clone(), x.axis).wait()


def _all_to_all(x: Before) -> tuple[Tensor, Tensor]:
    return x.whole, start_all_to_all(x.whole, x.axis).wait()


def _send_receive(x: Before) -> tuple[Tensor, Tensor]:
    return x.whole, ring_shift([x.whole], x.axis).wait()[0]


def _barrier(x: Before) -> tuple[Tensor, Tensor]:
    before = x.store.add("ranks that have come", 1)
    dist.barrier()
    return torch.tensor([before]), torch.tensor([x.store.add("ranks that have come", 0)])


PRIMITIVES = (
    Primitive(
        "broadcast",
        f"every rank gets rank {ROOT}'s tensor",
        "all of it, by every rank but the last of the chain",
        lambda b, n, d: b if d < n - 1 else 0,
        _broadcast,
    ),
    Primitive(
        "scatter",
        f"rank r gets part r of rank {ROOT}'s tensor",
        f"(n-1)/n of its tensor by rank {ROOT}",
        lambda b, n, d: b * (n - 1) / n if d == 0 else 0,
        _scatter,
    ),
    Primitive(
        "gather",
        f"rank {ROOT} gets every rank's part, joined in rank order",
        f"its part, 1/n of the result, by every rank but rank {ROOT}",
        lambda b, n, d: b / n if d > 0 else 0,
        _gather,
    ),
    Primitive(
        "reduce",
        f"rank {ROOT} gets the sum of all ranks' tensors; what is left on the others is undefined",
        f"all of it, by every rank but rank {ROOT}: the chain adds on the way",
        lambda b, n, d: b if d > 0 else 0,
        _reduce,
    ),
    Primitive(
        "all-gather",
        "every rank gets every rank's part, joined in rank order",
        "(n-1)/n of the result: in n-1 steps each passes on the part that it got last",
        lambda b, n, d: b * (n - 1) / n,
        _all_gather,
    ),
    Primitive(
        "reduce-scatter",
        "rank r gets part r of the sum of all ranks' tensors",
        "(n-1)/n of its tensor: in n-1 steps each adds its own to the partial sum it got and passes that on",
        lambda b, n, d: b * (n - 1) / n,
        _reduce_scatter,
    ),
    Primitive(
        "all-reduce",
        "every rank gets the sum of all ranks' tensors",
        "2 (n-1)/n of its tensor: a reduce-scatter, then an all-gather",
        lambda b, n, d: 2 * b * (n - 1) / n,
        _all_reduce,
    ),
    Primitive(
        "all-to-all",
        "part s of rank r's tensor becomes part r of rank s's: a transpose over ranks",
        "(n-1)/n of its tensor: all but the part that stays",
        lambda b, n, d: b * (n - 1) / n,
        _all_to_all,
    ),
    Primitive(
        "send / receive",
        "each rank sends its tensor to the next and receives the one of the rank before (a ring shift)",
        "all of it",
        lambda b, n, d: b if n > 1 else 0,
        _send_receive,
    ),
    Primitive(
        "barrier",
        "no rank goes on before all have come; the numbers are how many had come",
        "no data",
        lambda b, n, d: 0,
        _barrier,
    ),
)


def show(started: Started) -> list[Shown]:
    """Runs every primitive over all ranks; how each went on this one."""
    axis, store, device = started
    n = axis.size
    scale = 10 ** len(str(n - 1))
    whole = scale * (axis.rank + 1) + torch.arange(n, dtype=torch.float32, device=device)
    shown = []
    for primitive in PRIMITIVES:
        before, after = primitive.run(Before(whole, axis, store))
        sends = primitive.sends(whole.numel() * whole.element_size(), n, (axis.rank - ROOT) % n)
        shown.append(Shown(primitive.name, _list(before), _list(after), sends))
    return shown


def _list(x: Tensor | None) -> list[float] | None:
    return None if x is None else x.tolist()


def all_reduce_is_reduce_scatter_then_all_gather(started: Started) -> tuple[list[float], list[float]]:
    """The sum of 3 numbers a part, both ways. They are drawn from whole numbers, so any order of adding is exact."""
    axis = started.world
    generator = torch.Generator().manual_seed(axis.rank)
    x = torch.randint(-99, 100, (3 * axis.size,), generator=generator).to(started.device, torch.float32)
    both = start_all_gather(start_reduce_scatter(x, axis).wait(), axis).wait()
    return start_all_reduce(x.clone(), axis).wait().tolist(), both.tolist()


def table(rows: Sequence[Shown]) -> str:
    """One primitive over all ranks as aligned text; `rows` in rank order."""
    primitive = next(p for p in PRIMITIVES if p.name == rows[0].name)
    cells = [
        (f"rank {r}", _numbers(row.before), _numbers(row.after), f"{row.sends_bytes:g} bytes")
        for r, row in enumerate(rows)
    ]
    columns = list(zip(("", "before", "after", "sends"), *cells, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in zip(*columns, strict=True)
    ]
    head = [f"{primitive.name}: {primitive.law}", f"    sends: {primitive.cost}"]
    return "\n".join([*head, *(f"    {line.rstrip()}" for line in lines)])


def _numbers(values: list[float] | None) -> str:
    return "   -" if values is None else " ".join(f"{value:4g}" for value in values)


def report(started: Started) -> str:
    """All primitives over all ranks and the law that joins three of them, as one text, equal on every rank."""
    n = started.world.size
    mine = show(started), all_reduce_is_reduce_scatter_then_all_gather(started)
    everywhere: list[Any] = [None] * n
    dist.all_gather_object(everywhere, mine)
    shown, both_ways = zip(*everywhere, strict=True)
    lines = [
        f"{n} rank{'s' * (n > 1)} on {dist.get_backend()}. Each begins with {n} float32, {4 * n} bytes:",
        "the tens of a number say whose it was, the ones which part of a tensor it is.",
        '"sends" is what a ring, or a chain to or from one rank, has each rank send;',
        "a library may do otherwise where bytes are few.",
    ]
    if n == 1:
        lines.append("On one rank every primitive is the identity; `python -m megalite.comm --ranks 4` shows four.")
    lines += ["", *(table(rows) + "\n" for rows in zip(*shown, strict=True))]
    one, two = both_ways[0]
    verdict = "equal on every rank" if all(a == b == one for a, b in both_ways) else "DIFFERENT"
    lines += [
        "all-reduce = reduce-scatter + all-gather, on whole numbers drawn on each rank:",
        f"    all-reduce                   {_numbers(one)}",
        f"    reduce-scatter, all-gather   {_numbers(two)}",
        f"    {verdict}; of the tensor each rank sends 2 (n-1)/n = (n-1)/n + (n-1)/n",
    ]
    return "\n".join(lines)


def _print(started: Started) -> None:
    text = report(started)
    if started.world.rank == 0:  # once for all
        print(text, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line: shows torchrun's ranks if it has started this process, else `--ranks` started here."""
    parser = argparse.ArgumentParser(prog="python -m megalite.comm", description="Each collective on small numbers.")
    parser.add_argument("--ranks", type=int, default=None, help="start this many ranks here (default 1)")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="nccl needs a GPU for each rank")
    options = parser.parse_args(arguments)
    try:
        start(_print, ranks=options.ranks, backend=options.backend)
    except ValueError as error:
        parser.error(str(error))

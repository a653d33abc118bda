"""The gradient after the data axis: sums over `partial` axes, and the norm in which each parameter counts once.

There is no list of exceptions: how many ranks hold an entry follows from how its parameter is cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.comm import start_all_reduce
from megalite.mesh import Axis
from megalite.spec import ParamSpec

if TYPE_CHECKING:
    from megalite.zero.unit import Unit

# A float32 sum of squares along a row this short loses nothing that counts (3e-10 over 2e7 entries; along rows of
# 4096 it is 2e-4), and it costs one pass, where a float64 reduction of float32 costs seventeen.
_ROW = 256


def partial_axes(spec: ParamSpec) -> tuple[Axis, ...]:
    """A parameter's `partial` axes in an order that is the same on all of their ranks."""
    return tuple(sorted(spec.partial, key=lambda axis: (axis.name, axis.ranks)))


def sort_key(axes: tuple[Axis, ...]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((axis.name, axis.ranks) for axis in axes)


def sum_partial(units: Iterable[Unit]) -> None:
    """Sums gradients over their `partial` axes: all units' slices gathered in one buffer per set of axes.

    Here and not in backward: sums commute, and a collective on an axis that layers use must not race with theirs.
    """
    slices: dict[tuple[tuple[Axis, ...], torch.dtype], list[Tensor]] = defaultdict(list)
    for unit in units:
        for axes, part in unit.runs(lambda slot: partial_axes(slot.spec)):
            if axes:
                slices[axes, unit.gradient_shard.dtype].append(unit.gradient_shard[part])
    for axes, dtype in sorted(slices, key=lambda kind: (sort_key(kind[0]), str(kind[1]))):
        targets = slices[axes, dtype]
        total = torch.cat(targets)
        for axis in axes:
            total = start_all_reduce(total, axis).wait()
        for target, source in zip(targets, total.split([target.numel() for target in targets]), strict=True):
            target.copy_(source)


def sum_of_squares(x: Tensor) -> Tensor:
    """sum x^2 of a flat tensor, float64 and 0-d; NaN or inf if any entry is."""
    whole = x.numel() // _ROW * _ROW
    rows = torch.linalg.vector_norm(x[:whole].view(-1, _ROW), dim=1)
    return rows.double().square().sum() + torch.linalg.vector_norm(x[whole:]).double().square()


def squared_norm_share(units: Iterable[Unit], device: torch.device) -> Tensor:
    """This rank's summand of |g|^2, float64 and 0-d: summed over the world, each element counts once."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for unit in units:
        for count, part in unit.runs(lambda slot: slot.copies):
            total += sum_of_squares(unit.gradient_shard[part]) * (unit.shards.size / count)
    return total

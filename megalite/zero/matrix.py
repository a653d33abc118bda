"""Matrices in flat buffers: which there are, where their entries lie, and which rank has which of them whole.

A matrix is one weight as a checkpoint of Hugging Face has it: q, k and v are three though they are one parameter here,
and so is each expert. Its *local region* is what the cut over tp (or ep, etp) leaves on a rank; a *piece* is the part
of that region in one shard: contiguous in the region's own order, for a shard is one range of the flat buffer.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from megalite.comm import start_all_gather
from megalite.mesh import Axis
from megalite.spec import ParamSpec
from megalite.zero.unit import Slot, Unit


class Run(NamedTuple):
    """A contiguous range of a unit's flat buffers."""

    start: int
    stop: int

    def within(self, start: int, stop: int) -> Run:
        return Run(max(self.start, start), max(min(self.stop, stop), max(self.start, start)))

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(eq=False)
class Matrix:
    """One logical matrix and this rank's region of it.

    shape: logical, its last dim the inputs and the others the outputs. local: the region's shape, padding included.
    cut: (axis, dim), outermost first. runs: the region in the unit's flat buffers, in its own order.
    """

    name: str
    slot: Slot
    shape: tuple[int, ...]
    local: tuple[int, ...]
    cut: tuple[tuple[Axis, int], ...]
    runs: list[Run]

    @property
    def unit(self) -> Unit:
        return self.slot.unit

    @property
    def rows_columns(self) -> tuple[int, int]:
        return math.prod(self.shape[:-1]), self.shape[-1]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def piece(self, shard: int) -> list[Run]:
        """What of the region lies in the shard of that number, in the unit's flat coordinates; empty runs left out."""
        share = self.unit.part.stop - self.unit.part.start
        found = (run.within(shard * share, (shard + 1) * share) for run in self.runs)
        return [run for run in found if run.numel]

    def piece_numel(self, shard: int) -> int:
        return sum(run.numel for run in self.piece(shard))

    def whole(self, region: Tensor) -> Tensor:
        """This rank's region, in its own order -> the matrix (rows, columns), without padding.

        Every rank of the axes that cut it calls this, and all of them have it then.
        """
        x = region.view(self.local)
        for axis, dim in reversed(self.cut):
            x = start_all_gather(x, axis, dim=dim).wait()
        for dim, size in enumerate(self.shape):
            x = x.narrow(dim, 0, size)
        return x.reshape(self.rows_columns)

    def region(self, whole: Tensor) -> Tensor:
        """The mirror of `whole`, without communication: this rank's region, one-dimensional; padding is zero."""
        x = whole.view(self.shape)
        padding: list[int] = []
        for dim in reversed(range(x.ndim)):
            ways = math.prod(axis.size for axis, cut_dim in self.cut if cut_dim == dim)
            padding += [0, self.local[dim] * ways - self.shape[dim]]
        x = F.pad(x, padding) if any(padding) else x
        for axis, dim in self.cut:
            part = axis.part(x.shape[dim])
            x = x.narrow(dim, part.start, part.stop - part.start)
        return x.reshape(-1)


def matrices_of(slot: Slot) -> Iterator[Matrix]:
    """The matrices that this rank has a region of, in the order of the flat buffer. An empty tensor has none."""
    spec = slot.spec
    if spec.matrices is None or len(spec.shape) < 2 or not spec.numel:
        return
    choices = [list(_parts(spec, dim)) for dim in sorted(spec.matrices)]
    for number, chosen in enumerate(itertools.product(*choices)):
        ranges = [range(size) for size in spec.local_shape]
        shape = list(spec.shape)
        for dim, part in zip(sorted(spec.matrices), chosen, strict=True):
            ranges[dim], shape[dim] = part, len(part)
        local = tuple(len(part) for part in ranges)
        cut = tuple((axis, dim) for axis, dim in spec.cut.items() if dim not in spec.matrices)
        name = slot.name if math.prod(map(len, choices)) == 1 else f"{slot.name}[{number}]"
        yield Matrix(name, slot, tuple(shape), local, cut, _runs(slot, ranges))


def _parts(spec: ParamSpec, dim: int) -> Iterator[range]:
    """The parts of a dim that lie on this rank, in its indices. An axis may cut between parts, not through one."""
    assert spec.matrices is not None and dim not in spec.pad
    sizes, box = spec.matrices[dim], spec.box()[dim]
    assert sum(sizes) == spec.shape[dim], f"parts {sizes} of dim {dim} of {spec.shape}"
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        if box.start <= start and start + size <= box.stop:
            yield range(start - box.start, start - box.start + size)
        else:
            assert start + size <= box.start or box.stop <= start, f"{spec.cut} cuts a part of {sizes} in two"


def _runs(slot: Slot, ranges: Sequence[range]) -> list[Run]:
    """Where a box of the slot's local tensor lies in the flat buffer: contiguous from the last dim taken in part on."""
    shape = slot.spec.local_shape
    partial = [dim for dim, part in enumerate(ranges) if len(part) < shape[dim]]
    last = partial[-1] if partial else 0
    inner = math.prod(shape[last + 1 :])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(last)]
    runs = []
    for index in itertools.product(*ranges[:last]):
        at = slot.part.start + sum(i * stride for i, stride in zip(index, strides, strict=True))
        runs.append(Run(at + ranges[last].start * inner, at + ranges[last].stop * inner))
    return runs


class Deal(NamedTuple):
    """owner: the rank of the axis that has a matrix whole; round: when."""

    owner: int
    round: int


def deal(sizes: Sequence[int], ranks: int, *, round_numel: int) -> list[Deal]:
    """Matrices of these sizes dealt to ranks, the largest first, each to the rank that has least so far.

    The same on all ranks that give the same sizes. A rank may get none. A round takes from each rank's matrices, in the
    order dealt, about as much as the largest matrix, at least round_numel: what is whole at a time is bounded, and
    ranks with few large and many small ones work through equal amounts in each round.
    """
    loads = [0] * ranks
    budget = max([round_numel, *sizes])
    dealt: dict[int, Deal] = {}
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        dealt[number] = Deal(owner, loads[owner] // budget)
        loads[owner] += sizes[number]
    return [dealt[number] for number in range(len(sizes))]

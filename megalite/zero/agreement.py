"""Before the first step: ranks that will sum gradients must hold the same parameters, in the same units and order.

Two ranks that reduce different units against each other get wrong sums without an error, and replicas that start from
different weights never meet, nor do the copies of a weight that is tied between pipeline stages. All of it is seen
here, by one small collective, and a second one where weights are tied.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.comm import start_all_gather
from megalite.mesh import Axis, Mesh
from megalite.zero.partition import Held, ties
from megalite.zero.unit import Slot, Unit

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksums:
    """Of weights' bits: sums of integers, so exact. Parameters are added one by one, while they are whole.

    of: each one's. totals: of dense and of expert ones, each with a factor of its own, so that their order counts.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self._factor = {one.name: 2 * number + 1 for number, one in enumerate(held)}
        self.of: dict[str, Tensor] = {}
        self.totals: dict[bool, Tensor] = {}

    @torch.no_grad()
    def add(self, one: Held) -> None:
        weight = one.parameter.detach()
        bits = weight.reshape(-1).contiguous().view(_BITS[min(weight.element_size(), 8)])
        self.of[one.name] = bits.sum(dtype=torch.int64).cpu()
        total = self.of[one.name] * self._factor[one.name]
        self.totals[one.spec.expert] = total + self.totals.get(one.spec.expert, 0)


def require_agreement(units: Sequence[Unit], checksums: Checksums, *, mesh: Mesh, device: torch.device) -> None:
    """Raises ValueError on every rank if the ranks of a pipeline stage differ in their units, or replicas in weights,
    or stages in those that are tied between them. units: in the order in which they are launched."""
    rows = [[mesh.pp.rank, _structure(units)]]
    for expert, replicas in ((False, mesh.data()), (True, mesh.edp)):
        rows.append([min(replicas.ranks), int(checksums.totals.get(expert, 0))])
    tied = [(slot, axis) for unit in units for slot in unit.slots for axis in ties(slot.spec, mesh)]
    rows.append([0, len(tied)])
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    table = start_all_gather(mine[None], mesh.world).wait().tolist()
    if (pair := _first_difference([row[0] for row in table])) is not None:
        raise ValueError(
            f"ranks {pair[0]} and {pair[1]} share a pipeline stage and differ in their parameters (names, shapes, "
            "dtypes, which are trainable, how they are cut) or in the order of their units; this rank launches: "
            + ", ".join(unit.name for unit in units)
        )
    for column in (1, 2):
        if (pair := _first_difference([row[column] for row in table])) is not None:
            raise ValueError(
                f"ranks {pair[0]} and {pair[1]} are replicas and hold different weights: pass seed=, or call "
                "torch.manual_seed alike on all ranks before building the model, or load the same weights"
            )
    _require_ties(tied, checksums, most=max(row[3][1] for row in table), mesh=mesh, device=device)


def _require_ties(
    tied: Sequence[tuple[Slot, Axis]], checksums: Checksums, *, most: int, mesh: Mesh, device: torch.device
) -> None:
    """Every rank along a tied weight's axis must have it, of one structure and value. most: how many any rank has."""
    if not most:
        return
    mine = [[axis.size, _hash((axis.ranks, _described(slot), int(checksums.of[slot.name])))] for slot, axis in tied]
    padded = torch.tensor(mine + [[0, 0]] * (most - len(mine)), dtype=torch.int64, device=device)
    table = start_all_gather(padded[None], mesh.world).wait().tolist()
    found = Counter((size, key) for rows in table for size, key in rows)
    alone = [rank for rank, rows in enumerate(table) if any(size and found[size, key] != size for size, key in rows)]
    if alone:
        raise ValueError(
            f"ranks {alone} hold weights tied between pipeline stages that not all of their ranks have alike (name, "
            "shape, dtype, how it is cut, value): declare each in both stages under one name, partial over the axis "
            "of mesh.joins, and pass seed= or load the same weights; tied on this rank: "
            + (", ".join(f"{slot.name} over ranks {axis.ranks}" for slot, axis in tied) or "none")
        )


def _first_difference(rows: list[list[int]]) -> tuple[int, int] | None:
    """The first two ranks, if any, that are in one group and differ; rows: (group, value) by rank."""
    first: dict[int, int] = {}
    for rank, (group, value) in enumerate(rows):
        other = first.setdefault(group, rank)
        if rows[other][1] != value:
            return other, rank
    return None


def _structure(units: Sequence[Unit]) -> int:
    """63 bits of everything that must be alike where gradients are summed or compared."""
    return _hash([(unit.name, unit.stage, _described(slot)) for unit in units for slot in unit.slots])


def _described(slot: Slot) -> tuple[Any, ...]:
    return (
        slot.name,
        slot.unit.axis.name,
        str(slot.unit.weights.tensor.dtype),
        slot.unit.shards.size,
        tuple(slot.gradient.shape),
        [axis.name for axis in slot.spec.partial],
        [(axis.name, dim) for axis, dim in slot.spec.cut.items()],
        slot.spec.decay,
        None if slot.spec.matrices is None else sorted(slot.spec.matrices.items()),
    )


def _hash(value: Any) -> int:
    """63 bits of what it prints as."""
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=8).digest(), "little") >> 1

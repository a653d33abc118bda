"""Before the first step: ranks that will sum gradients must hold the same parameters, in the same units and order.

Two ranks that reduce different units against each other get wrong sums without an error, and replicas that start from
different weights never meet. Both are seen here, by one small collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megalite.comm import start_all_gather
from megalite.mesh import Mesh
from megalite.zero.partition import Held
from megalite.zero.unit import Unit

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Checksums:
    """Of weights' bits, dense and expert ones apart: sums of integers, so exact; a factor for each parameter, so that
    their order counts. Parameters are added one by one, while they are whole."""

    def __init__(self, held: Sequence[Held]) -> None:
        self._factor = {one.name: 2 * number + 1 for number, one in enumerate(held)}
        self.totals: dict[bool, Tensor] = {}

    @torch.no_grad()
    def add(self, one: Held) -> None:
        weight = one.parameter.detach()
        bits = weight.reshape(-1).contiguous().view(_BITS[min(weight.element_size(), 8)])
        total = bits.sum(dtype=torch.int64) * self._factor[one.name]
        self.totals[one.spec.expert] = total.cpu() + self.totals.get(one.spec.expert, 0)


def require_agreement(
    units: Sequence[Unit], checksums: Mapping[bool, Tensor], *, mesh: Mesh, device: torch.device
) -> None:
    """Raises ValueError on every rank if the ranks of a pipeline stage differ in their units, or replicas in weights.

    units: in the order in which they are launched. checksums: of dense (False) and expert (True) weights.
    """
    rows = [[mesh.pp.rank, _structure(units)]]
    for expert, replicas in ((False, mesh.data()), (True, mesh.edp)):
        rows.append([min(replicas.ranks), int(checksums.get(expert, 0))])
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
    lines = [
        (
            unit.name,
            unit.axis.name,
            str(unit.weights.tensor.dtype),
            unit.stage,
            unit.shards.size,
            slot.name,
            tuple(slot.gradient.shape),
            [axis.name for axis in slot.spec.partial],
            [(axis.name, dim) for axis, dim in slot.spec.cut.items()],
            slot.spec.decay,
            None if slot.spec.matrices is None else sorted(slot.spec.matrices.items()),
        )
        for unit in units
        for slot in unit.slots
    ]
    return int.from_bytes(hashlib.blake2b(repr(lines).encode(), digest_size=8).digest(), "little") >> 1

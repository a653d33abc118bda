"""Before the first step: ranks that will sum gradients must hold the same parameters, in the same units and order.

Two ranks that reduce different units against each other get wrong sums without an error, and replicas that start from
different weights never meet. Both are seen here, by one small collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.comm import start_all_gather
from megalite.mesh import Mesh
from megalite.zero.partition import Held
from megalite.zero.unit import Unit

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_agreement(units: Sequence[Unit], held: Sequence[Held], *, mesh: Mesh, device: torch.device) -> None:
    """Raises ValueError on every rank if the ranks of a pipeline stage differ in their units, or replicas in weights.

    units: in the order in which they are launched.
    """
    rows = [[mesh.pp.rank, _structure(units)]]
    for expert, replicas in ((False, mesh.data()), (True, mesh.edp)):
        weights = [one.parameter for one in held if one.spec.expert == expert]
        rows.append([min(replicas.ranks), _checksum(weights, device)])
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
            str(unit.weights.dtype),
            slot.name,
            tuple(slot.gradient.shape),
            [axis.name for axis in slot.spec.partial],
            [(axis.name, dim) for axis, dim in slot.spec.cut.items()],
            slot.spec.decay,
        )
        for unit in units
        for slot in unit.slots
    ]
    return int.from_bytes(hashlib.blake2b(repr(lines).encode(), digest_size=8).digest(), "little") >> 1


def _checksum(weights: Sequence[Tensor], device: torch.device) -> int:
    """Of the weights' bits: a sum of integers, so exact; a factor for each tensor, so that their order counts."""
    total = torch.zeros((), dtype=torch.int64, device=device)
    for number, weight in enumerate(weights):
        bits = weight.detach().reshape(-1).contiguous().view(_BITS[min(weight.element_size(), 8)])
        total += bits.sum(dtype=torch.int64).to(device) * (2 * number + 1)
    return int(total)

"""From modules to units that hold their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from megalite.mesh import Mesh
from megalite.zero.agreement import Checksums
from megalite.zero.partition import Held, partition, ties
from megalite.zero.unit import Sharding, Unit, begin_frozen

TRAINED_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def require_real(held: Sequence[Held]) -> None:
    """Raises ValueError, by name, for a parameter to be trained that is not of a real dtype."""
    for one in held:
        if one.parameter.requires_grad and one.parameter.dtype not in TRAINED_DTYPES:
            raise ValueError(
                f"parameter {one.name} is {one.parameter.dtype}, which is not trained here; legal dtypes: "
                f"{', '.join(map(str, TRAINED_DTYPES))} (a complex weight: two real ones and torch.view_as_complex)"
            )


def make_units(
    modules: Sequence[nn.Module],
    held: Sequence[Held],
    kinds: tuple[type, ...],
    *,
    sharding: Sharding,
    mesh: Mesh,
    seed: int | None,
    device: torch.device | str,
) -> tuple[list[tuple[Unit, tuple[nn.Module, ...]]], Checksums]:
    """The units in the order of launch, each with its modules, and checksums of all weights.

    Parameters that are not trained get their first values and stay outside. A unit without modules of its own may be
    used at any time: at stage 3 its weights stay whole. Weights are drawn, summed up and spread one unit after another.
    """
    uses: list[tuple[Unit, tuple[nn.Module, ...]]] = []
    checksums = Checksums(held)
    alone = {one.name for one in held if ties(one.spec, mesh)}
    for part in partition(modules, held, kinds, alone=alone):
        alike: dict[tuple, list[Held]] = {}
        for one in part.held:
            if one.parameter.requires_grad:
                key = (one.spec.expert, one.parameter.dtype, one.parameter.device)
                alike.setdefault(key, []).append(one)
            else:
                begin_frozen(one, seed=seed, device=device)
                checksums.add(one)
        stage = min(sharding.stage, 2) if not part.modules else sharding.stage
        for group in alike.values():
            how = replace(sharding, stage=stage)
            unit = Unit(part.name, group, mesh=mesh, sharding=how, seed=seed, device=device)
            for one in group:
                checksums.add(one)
            unit.release()
            uses.append((unit, part.modules))
    return uses[::-1], checksums


def holders(units: Sequence[Unit], modules: Sequence[nn.Module]) -> dict[Unit, tuple[int, ...]]:
    """Each unit -> the numbers of the modules that have parameters of it; several where a weight is tied."""
    inside = [{id(parameter) for parameter in module.parameters()} for module in modules]
    return {
        unit: tuple(n for n, keys in enumerate(inside) if any(id(parameter) in keys for parameter in unit.parameters))
        for unit in units
    }

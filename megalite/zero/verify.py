"""Is every gradient what its ParamSpec says: whole, cut, or a summand? Asked of the first step, by random projections.

A module that forgot `partial`, or a `copy` in front of a cut layer, trains on wrong numbers without an error: ranks
that should hold one parameter drift apart. Its raw gradients tell: over an axis that neither cuts a parameter nor is
`partial`, they must be equal; over a `partial` axis they should differ, each rank having seen its own tokens. Nothing
is asked of what is tied between pipeline stages: each has another use of it, and any summand is right.

Compared are sketches of some numbers a parameter, so that no gradient is kept whole and none travels: entry i of the
gradient is added, with a random sign keyed by the parameter's name, to sum i mod SUMS. The squared distance of two
sketches is, in the mean, that of the gradients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.comm import start_all_gather
from megalite.mesh import Axis, Mesh
from megalite.zero.norm import sort_key
from megalite.zero.partition import ties
from megalite.zero.unit import Slot

SUMS = 8
_CHUNK = 1 << 16  # entries handled at once: a sketch never takes memory that counts

# Of the gradient's norm: two ranks that compute alike differ by far less, two summands by about the norm itself.
_AGREE = {torch.float64: 1e-7, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# Equal beyond chance: gradients of the same tokens are so, summands that happen to be near each other are not.
_EQUAL = 1e-5
# A gradient below this part of all gradients' norm may be nothing but rounding (a bias in front of a softmax).
_NEGLIGIBLE = 1e-3


class _Question(NamedTuple):
    """Slots whose gradients over an axis should be alike on all of its ranks, or should all be different."""

    axis: Axis
    alike: bool
    slots: list[int]


class Findings(NamedTuple):
    """Parameter's name -> what is wrong. faults end the run; suspects are a warning, and a fault if they repeat."""

    faults: Mapping[str, str] = MappingProxyType({})
    suspects: Mapping[str, str] = MappingProxyType({})


def summary(findings: Mapping[str, str]) -> str:
    """The first finding in full and the names of the others; empty if there is none."""
    first, *others = findings or {"": ""}
    return findings.get(first, "") + (f". Likewise: {', '.join(others)}" if others else "")


class Verifier:
    """Collects sketches of the arriving gradients of a step (`observe`) and compares them (`compare`)."""

    def __init__(self, slots: Sequence[Slot], *, mesh: Mesh, device: torch.device) -> None:
        self.slots = list(slots)
        self._index = {id(slot): number for number, slot in enumerate(self.slots)}
        self._questions = _questions(self.slots, mesh)
        self._asked = {number for question in self._questions for number in question.slots}
        self._sketches = torch.zeros(len(self.slots), SUMS + 1, dtype=torch.float64, device=device)

        self._suspected: set[str] | None = None  # in the step before, if that was verified

    def open(self) -> None:
        self._sketches.zero_()

    def observe(self, slot: Slot, gradient: Tensor) -> None:
        """One arrival, as the backward gave it: before any sum over ranks."""
        number = self._index[id(slot)]
        if number in self._asked:
            self._sketches[number] += sketch(gradient, slot.name)

    def compare(self) -> Findings:
        """What is wrong with this step's gradients. Collective over every axis that is asked about.

        A fault is a gradient that should be alike and is not; a suspect one that should be a summand and is equal on
        all ranks, which a batch of equal tokens explains once. A gradient that is not finite is neither.
        """
        faults: dict[str, str] = {}
        suspects: dict[str, str] = {}
        for axis, alike, slots in self._questions:
            norms, distances, negligible = self._gathered(axis, slots)
            for number, norm, distance in zip(slots, norms, distances, strict=True):
                slot = self.slots[number]
                if alike and distance > _AGREE[slot.unit.weights.tensor.dtype] * max(norm, negligible):
                    faults[slot.name] = _differs(slot.name, axis, distance / norm)
                if not alike and 0 < norm < math.inf and distance <= _EQUAL * norm:
                    repeated = slot.name in (self._suspected or ())
                    (faults if repeated else suspects)[slot.name] = _equal(slot.name, axis)
        return Findings(faults, suspects)

    def remember(self, suspects: Mapping[str, str]) -> bool:
        """Whether one more step must be seen, in which a suspect of this one is a fault; asked of a first step only."""
        first = self._suspected is None
        self._suspected = set(suspects)
        return first

    def _gathered(self, axis: Axis, slots: list[int]) -> tuple[list[float], list[float], float]:
        """Over the ranks of the axis: norms, largest distance from rank 0's gradient, and a norm that is negligible."""
        total = torch.zeros_like(self._sketches[:1])
        total[0, SUMS] = self._sketches[:, SUMS].norm()
        every = start_all_gather(torch.cat([self._sketches[slots], total])[None], axis).wait()
        norms = every[..., SUMS].amax(0).tolist()
        distances = (every[..., :SUMS] - every[:1, :, :SUMS]).norm(dim=-1).amax(0).tolist()
        return norms[:-1], distances[:-1], _NEGLIGIBLE * norms[-1]


def sketch(gradient: Tensor, name: str) -> Tensor:
    """(SUMS + 1,) float64: the signed sums of a gradient, and its norm. The same signs on all ranks for one name."""
    seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
    signs = torch.Generator(gradient.device).manual_seed(seed)
    sums = torch.zeros(SUMS + 1, dtype=torch.float64, device=gradient.device)
    for part in gradient.reshape(-1).split(_CHUNK):
        sign = torch.randint(0, 2, part.shape, generator=signs, device=part.device, dtype=torch.int8)
        values = F.pad(part.double(), (0, -part.numel() % SUMS)).view(-1, SUMS)
        odd = F.pad(sign, (0, -part.numel() % SUMS)).view(-1, SUMS)
        sums[:SUMS] += values.sum(0) - 2 * (values * odd).sum(0)
        sums[SUMS] += values.square().sum()
    sums[SUMS].sqrt_()
    return sums


def _questions(slots: Sequence[Slot], mesh: Mesh) -> list[_Question]:
    """By axis, in one order on all ranks. An axis of one rank has nobody to compare with."""
    found: dict[tuple[Axis, bool], list[int]] = {}
    for number, slot in enumerate(slots):
        told = (*slot.spec.cut, *slot.spec.partial)
        data = set(mesh.data(slot.spec).ranks)
        for axis in mesh.view(slot.spec):
            # An axis that the spec speaks of in part (a sub-axis) is not one of replicas as a whole.
            if not data.issuperset(axis.ranks) and not any(_overlap(axis, other) for other in told):
                found.setdefault((axis, True), []).append(number)
        between_stages = ties(slot.spec, mesh)
        for axis in slot.spec.partial:
            if axis.size > 1 and axis not in between_stages:
                found.setdefault((axis, False), []).append(number)
    ordered = sorted(found, key=lambda question: (sort_key(question[:1]), question[1]))
    return [_Question(axis, alike, found[axis, alike]) for axis, alike in ordered]


def _overlap(one: Axis, other: Axis) -> bool:
    return len(set(one.ranks) & set(other.ranks)) > 1


def _differs(name: str, axis: Axis, relative: float) -> str:
    return (
        f"the raw gradient of {name} differs over axis {axis.name} (ranks {axis.ranks}) by {relative:.2g} of its norm, "
        f"yet its ParamSpec neither cuts it over {axis.name} nor says partial=({axis.name},): declare it partial if "
        "each rank saw only its own tokens or heads; else megalite.comm.copy is missing before what is cut"
    )


def _equal(name: str, axis: Axis) -> str:
    return (
        f"the raw gradient of {name} is equal on all ranks {axis.ranks} of axis {axis.name}, which its ParamSpec says "
        "is partial: if these are not summands, their sum is too large; leave the axis out of partial"
    )

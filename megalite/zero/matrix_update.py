"""The step of an optimizer that sees whole matrices, on flat shards: pieces to their owners, directions back.

1. What is elementwise (momentum) is done on this rank's slices of the shards, and its state lies there.
2. Each matrix is dealt to one rank of the shards' axis, over all units. One uneven all-to-all brings the owners the
   pieces of their matrices; over the axes that cut them (tp) regions are gathered, so all ranks along these have the
   same matrix, and compute the same.
3. The owner makes the direction of the whole matrix.
4. The mirrored all-to-all brings each rank the direction of its own pieces, which is added to the masters.

In rounds, so that little is whole at a time; the next round's pieces and the last one's directions travel under the
arithmetic. With a matrix element of w bytes, a rank sends (n-1)/n of its shards' matrices x w each way on average, and
what it owns x (tp-1)/tp x w in gathers. At stage 0 a shard is everything: each rank computes every matrix, nothing
travels, and replicas stay equal since they do the same; sharing the work out is what stage 1 is for.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from megalite.comm import Pending, start_all_reduce, start_all_to_all
from megalite.mesh import Axis
from megalite.zero.matrix import Matrix, Run, deal, matrices_of
from megalite.zero.norm import sort_key, sum_of_squares
from megalite.zero.unit import Slot, Unit

Key = tuple[bool, float]  # whether it decays, multiplier of the learning rate


class MatrixRule(Protocol):
    """The arithmetic of an optimizer of matrices; `Muon` and `Adafactor` are such."""

    state_of: ClassVar[str]  # what its optimizer's parameters are: "slices" of flat shards, or "matrices" owned
    needs_rms: ClassVar[bool]  # whether `factor` asks for the root mean square of the weights

    @property
    def lr(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def exclude(self) -> tuple[str, ...]: ...
    @property
    def round_numel(self) -> int: ...
    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer: ...
    def elementwise(self, gradient: Tensor, state: dict[str, Any]) -> Tensor: ...
    def dtype(self, unit: Unit) -> torch.dtype: ...
    def directions(
        self, wholes: Sequence[Tensor], owned: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> list[Tensor]: ...
    def factor(self, shape: tuple[int, int], *, lr: float, rms: float) -> float: ...


@dataclass(eq=False)
class Slice:
    """A contiguous part of a unit's masters, `part` of its shard, in which all is updated alike."""

    master: nn.Parameter
    unit: Unit
    part: slice

    @property
    def name(self) -> str:
        """Of the first parameter that has entries here."""
        start = self.unit.part.start + self.part.start
        return next(slot.name for slot in self.unit.slots if slot.part.stop > start)

    def take(self, run: Run, values: Tensor) -> Tensor:
        """Of this slice's values those of a run of the unit."""
        start = run.start - self.unit.part.start - self.part.start
        return values[start : start + run.numel]


def is_matrix(slot: Slot, rule: MatrixRule | None) -> bool:
    """Whether a parameter is updated by the rule."""
    if rule is None or any(fnmatch.fnmatchcase(slot.name, pattern) for pattern in rule.exclude):
        return False
    return next(matrices_of(slot), None) is not None


class MatrixUpdate:
    """slices: those of matrices, with their keys. key: of a slot. See the top of this file."""

    def __init__(
        self,
        units: Sequence[Unit],
        rule: MatrixRule,
        slices: Sequence[tuple[Key, Slice]],
        *,
        key: Callable[[Slot], Key],
    ) -> None:
        self.rule, self.slices = rule, [one for _, one in slices]
        slots = [slot for unit in units for slot in unit.slots if is_matrix(slot, rule)]
        self.matrices = [matrix for slot in slots for matrix in matrices_of(slot)]
        self.owned: dict[Matrix, nn.Parameter] = {}
        self.rounds = [one for alike in self._alike() for one in self._deal(alike)]
        self._groups: dict[Key, dict[str, Any]] = {}
        for slot in slots:
            self._groups.setdefault(key(slot), {"params": []})
        self._key_of = {matrix: key(matrix.slot) for matrix in self.matrices}
        self._keys = [of for of, _ in slices]
        self._place = self._places()
        self.optimizer = self._make()

    def _alike(self) -> list[list[Matrix]]:
        """Those that may travel in one message."""
        groups: dict[tuple[Axis, torch.dtype, torch.device], list[Matrix]] = {}
        for matrix in self.matrices:
            unit = matrix.unit
            key = (unit.shards, self.rule.dtype(unit), unit.weights.tensor.device)
            groups.setdefault(key, []).append(matrix)
        return list(groups.values())

    def _deal(self, matrices: list[Matrix]) -> list[Round]:
        axis, dtype = matrices[0].unit.shards, self.rule.dtype(matrices[0].unit)
        dealt = deal([matrix.numel for matrix in matrices], axis.size, round_numel=self.rule.round_numel)
        rounds = []
        for number in range(max(one.round for one in dealt) + 1):
            here = [(matrix, one.owner) for matrix, one in zip(matrices, dealt, strict=True) if one.round == number]
            rounds.append(Round(here, axis=axis, dtype=dtype))
            for matrix in rounds[-1].owned:
                nothing = matrix.unit.masters.new_zeros((), device=matrix.unit.weights.tensor.device)
                self.owned[matrix] = nn.Parameter(nothing.expand(matrix.rows_columns))  # its shape, and no memory
        return rounds

    def _places(self) -> dict[Matrix, list[tuple[int, Run]]]:
        """Each of this rank's pieces: number of the slice, run."""
        places: dict[Matrix, list[tuple[int, Run]]] = {}
        by_unit: dict[Unit, list[int]] = {}
        for number, one in enumerate(self.slices):
            by_unit.setdefault(one.unit, []).append(number)
        for matrix in self.matrices:
            unit = matrix.unit
            places[matrix] = [
                (number, run)
                for run in matrix.piece(unit.shards.rank)
                for number in by_unit[unit]
                if self.slices[number].part.start <= run.start - unit.part.start < self.slices[number].part.stop
            ]
        return places

    def _make(self) -> torch.optim.Optimizer:
        for (decay, by), group in self._groups.items():
            group |= {"decay": decay, "lr_multiplier": by, "lr": self.rule.lr * by}
        if self.rule.state_of == "slices":
            for key, one in zip(self._keys, self.slices, strict=True):
                self._groups[key]["params"].append(one.master)
        else:
            for matrix, stand_in in self.owned.items():
                self._groups[self._key_of[matrix]]["params"].append(stand_in)
        return self.rule.optimizer(list(self._groups.values()))

    @torch.no_grad()
    def step(self, values: Sequence[Tensor]) -> None:
        """values: of each slice, what `elementwise` gave, in any dtype, where the masters are."""
        lr = {key: group["lr"] for key, group in zip(self._groups, self.optimizer.param_groups, strict=True)}
        rms = self._root_mean_squares() if self.rule.needs_rms else dict.fromkeys(self.matrices, 0.0)
        factors = {
            matrix: self.rule.factor(matrix.rows_columns, lr=lr[key], rms=rms[matrix])
            for matrix, key in self._key_of.items()
        }
        for key, one in zip(self._keys, self.slices, strict=True):
            if key[0] and self.rule.weight_decay:
                one.master.mul_(1 - lr[key] * self.rule.weight_decay)
        coming = self._send(0, values)
        returning: Pending[list[Tensor]] | None = None
        for number, now in enumerate(self.rounds):
            regions, coming = coming.wait(), self._send(number + 1, values)
            wholes = [matrix.whole(region) for matrix, region in zip(now.owned, regions, strict=True)]
            directions = self.rule.directions(wholes, [self.owned[matrix] for matrix in now.owned], self.optimizer)
            following = now.send_back([m.region(x) for m, x in zip(now.owned, directions, strict=True)])
            if returning is not None:
                self._add(number - 1, returning.wait(), factors)
            returning = following
        if returning is not None:
            self._add(len(self.rounds) - 1, returning.wait(), factors)

    def _send(self, number: int, values: Sequence[Tensor]) -> Pending[list[Tensor]]:
        if number >= len(self.rounds):
            return Pending.done([])
        one = self.rounds[number]
        return one.send(
            [[self.slices[at].take(run, values[at]) for at, run in self._place[matrix]] for matrix in one.matrices]
        )

    def _add(self, number: int, pieces: Sequence[Tensor], factors: dict[Matrix, float]) -> None:
        """Directions of this rank's pieces, times their factors, to the masters."""
        masters, steps = [], []
        for matrix, piece in zip(self.rounds[number].matrices, pieces, strict=True):
            places = self._place[matrix]
            for (at, run), step in zip(places, piece.split([run.numel for _, run in places]), strict=True):
                target = self.slices[at].take(run, self.slices[at].master)
                masters.append(target)
                steps.append(step.to(target.device, target.dtype) * factors[matrix])
        if masters:
            torch._foreach_add_(masters, steps)

    def _root_mean_squares(self) -> dict[Matrix, float]:
        """Of each whole matrix of weights."""
        if not self.matrices:
            return {}
        device = self.matrices[0].unit.weights.tensor.device
        groups: dict[tuple[Axis, tuple[Axis, ...]], list[Matrix]] = {}
        for matrix in self.matrices:
            groups.setdefault((matrix.unit.shards, tuple(axis for axis, _ in matrix.cut)), []).append(matrix)
        found: dict[Matrix, float] = {}
        for shards, cut in sorted(groups, key=lambda group: (sort_key((group[0],)), sort_key(group[1]))):
            alike = groups[shards, cut]
            total = torch.stack([self._sum_of_squares(matrix).to(device) for matrix in alike])
            for axis in (shards, *cut):
                total = start_all_reduce(total, axis).wait()
            for matrix, squares in zip(alike, total.tolist(), strict=True):
                found[matrix] = math.sqrt(squares / matrix.numel)
        return found

    def _sum_of_squares(self, matrix: Matrix) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for at, run in self._place[matrix]:
            total = total + sum_of_squares(self.slices[at].take(run, self.slices[at].master)).to(total.device)
        return total


class Round:
    """The matrices that are whole at one time, at their owners, and the two messages around that."""

    def __init__(self, dealt: Sequence[tuple[Matrix, int]], *, axis: Axis, dtype: torch.dtype) -> None:
        dealt = sorted(dealt, key=lambda pair: pair[1])  # in the order of a message; one owner's stay in theirs
        self.axis, self.dtype = axis, dtype
        self.matrices = [matrix for matrix, _ in dealt]
        self.owned = [matrix for matrix, owner in dealt if owner == axis.rank]
        self._mine = [matrix.piece_numel(axis.rank) for matrix in self.matrices]
        ends = [0, *accumulate(self._mine)]
        at = [sum(owner < rank for _, owner in dealt) for rank in range(axis.size + 1)]
        self._to_owners = [ends[at[rank + 1]] - ends[at[rank]] for rank in range(axis.size)]
        self._owned = [[matrix.piece_numel(rank) for matrix in self.owned] for rank in range(axis.size)]
        self._from_all = [sum(counts) for counts in self._owned]

    def send(self, pieces: Sequence[Sequence[Tensor]]) -> Pending[list[Tensor]]:
        """The runs of each matrix's piece on this rank -> the regions of the matrices that it owns."""
        device = self.matrices[0].unit.weights.tensor.device
        runs = [run.to(self.dtype) for piece in pieces for run in piece]
        message = torch.cat(runs).to(device) if runs else torch.empty(0, dtype=self.dtype, device=device)
        pending = start_all_to_all(message, self.axis, send_counts=self._to_owners, receive_counts=self._from_all)

        def regions() -> list[Tensor]:
            counts = [count for counts in self._owned for count in counts]
            parts = pending.wait().split(counts)
            return [torch.cat(parts[number :: len(self.owned)]) for number in range(len(self.owned))]

        return Pending(regions)

    def send_back(self, regions: Sequence[Tensor]) -> Pending[list[Tensor]]:
        """Directions of the regions owned -> those of each matrix's piece on this rank."""
        device = self.matrices[0].unit.weights.tensor.device
        split = [region.split([counts[number] for counts in self._owned]) for number, region in enumerate(regions)]
        parts = [of_region[rank] for rank in range(self.axis.size) for of_region in split]
        message = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=device)
        pending = start_all_to_all(message, self.axis, send_counts=self._from_all, receive_counts=self._to_owners)
        return Pending(lambda: list(pending.wait().split(self._mine)))


class Together(torch.optim.Optimizer):
    """Several optimizers as one: all their groups and all their state, to be looked at, saved, loaded, or given another
    learning rate. They make their steps themselves."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = list(parts)
        self._share()

    def _share(self) -> None:
        groups = iter(self.param_groups)
        for part in self.parts:
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # as by load_state_dict, which makes groups and state anew
        self._share()

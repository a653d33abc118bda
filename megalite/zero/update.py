"""The optimizer's step on this rank's shards of the masters: which tensors it sees, in which groups and dtypes.

torch's optimizers want parameter, gradient and state of one dtype. Where gradients or moments are kept in half
precision they are widened for one slice at a time, so that no more than a slice is ever wide; moments are rounded again
afterwards.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.zero.matrix_update import MatrixRule, MatrixUpdate, Slice, Together, is_matrix
from megalite.zero.unit import Slot, Unit

Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Moments:
    """How the optimizer keeps what it remembers of past gradients.

    dtype: None is the masters'; else bfloat16, as DeepSeek-V3 (arXiv:2412.19437, section 3.3.1). stochastic: rounded
    up or down with the odds that keep the mean, drawn from (seed, step). Rounded to the nearest, a second moment whose
    beta is 0.999 never comes down: a bfloat16 has 8 bits, and a thousandth of it is less than half of the last one.
    """

    dtype: torch.dtype | None = None
    stochastic: bool = False
    seed: int = 0


class Update:
    """torch's optimizer over slices of units' masters, which it updates and the units then `publish`.

    make: gives the optimizer for groups [{"params", "decay", "lr_multiplier"}, ...]. lr_multipliers: pattern of logical
    names (as in fnmatch) -> factor of the learning rate; the first that matches counts. matrices: how matrices are
    updated; None = elementwise like the rest, by what `make` gives.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        make: Optimizer,
        *,
        lr_multipliers: Mapping[str, float] | None = None,
        moments: Moments | None = None,
        matrices: MatrixRule | None = None,
    ) -> None:
        self.units, self.moments = list(units), moments or Moments()
        self._multipliers = dict(lr_multipliers or {})
        self._slices: list[Slice] = []
        of_matrices: list[tuple[tuple[bool, float], Slice]] = []
        groups: dict[tuple[bool, float], list[nn.Parameter]] = {(True, 1.0): [], (False, 1.0): []}
        for unit in units:
            for (key, whole), part in unit.runs(lambda slot: (self._group(slot), is_matrix(slot, matrices))):
                one = Slice(nn.Parameter(unit.masters[part]), unit, part)
                if whole:
                    of_matrices.append((key, one))
                else:
                    groups.setdefault(key, []).append(one.master)
                    self._slices.append(one)
        self.optimizer = self._elementwise = make(
            [{"params": masters, "decay": decay, "lr_multiplier": by} for (decay, by), masters in groups.items()]
        )
        self._matrices: MatrixUpdate | None = None
        if matrices is not None:
            self._matrices = MatrixUpdate(units, matrices, of_matrices, key=self._group)
            self.optimizer = Together([self.optimizer, self._matrices.optimizer])
        self._steps = 0

    def _group(self, slot: Slot) -> tuple[bool, float]:
        matching = (by for pattern, by in self._multipliers.items() if fnmatch.fnmatchcase(slot.name, pattern))
        return slot.spec.decay, next(matching, 1.0)

    @property
    def lr(self) -> float:
        """The learning rate of a group whose multiplier is 1; assign to change that of every group."""
        group = self.optimizer.param_groups[0]
        return group["lr"] / group["lr_multiplier"]

    @lr.setter
    def lr(self, value: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = value * group["lr_multiplier"]

    @torch.no_grad()
    def step(self, scale: float) -> None:
        """One update from the units' gradient shards, each multiplied by `scale` first."""
        self._steps += 1
        if scale != 1.0:
            for unit in self.units:
                unit.gradient_shard.mul_(scale)
        slices = [(one.master, one.unit.gradient_shard[one.part]) for one in self._slices]
        if self.moments.dtype is None and all(g.dtype == m.dtype and g.device == m.device for m, g in slices):
            self._step(slices)
        else:
            for one, (master, gradient) in zip(self._slices, slices, strict=True):
                self._widen(master)
                self._step([(master, gradient.to(master.device, master.dtype))])
                self._narrow(one)
        if self._matrices is not None:
            self._matrices.step(self._values(self._matrices))

    def _values(self, matrices: MatrixUpdate) -> list[Tensor]:
        """What the rule makes of the gradients of each of its slices before they are seen as matrices."""
        values = []
        for one in matrices.slices:
            self._widen(one.master)
            gradient = one.unit.gradient_shard[one.part].to(one.master.device, one.master.dtype)
            state = self.optimizer.state[one.master] if matrices.rule.state_of == "slices" else {}
            values.append(matrices.rule.elementwise(gradient, state))
            self._narrow(one)
        return values

    def _step(self, slices: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
        """Of these slices alone: torch leaves out what has no gradient."""
        for master, gradient in slices:
            master.grad = gradient
        self._elementwise.step()
        for master, _ in slices:
            master.grad = None

    def _widen(self, master: nn.Parameter) -> None:
        state = self.optimizer.state.get(master, {})
        for name, value in state.items():
            if _is_moment(value):
                state[name] = value.to(master.dtype)

    def _narrow(self, one: Slice) -> None:
        if self.moments.dtype is None:
            return
        state = self.optimizer.state.get(one.master, {})
        for name, value in state.items():
            if _is_moment(value):
                state[name] = self._round(value, one.name, name)

    def _round(self, value: Tensor, *words: str) -> Tensor:
        """By names, not by numbers: of a weight tied between stages each rank must round its moments alike."""
        assert self.moments.dtype is not None
        if not self.moments.stochastic:
            return value.to(self.moments.dtype)
        words = (str(self.moments.seed), str(self._steps), *words)
        seed = int.from_bytes(hashlib.blake2b("/".join(words).encode(), digest_size=7).digest(), "little")
        return round_stochastically(value, torch.Generator(value.device).manual_seed(seed))


def round_stochastically(x: Tensor, generator: torch.Generator) -> Tensor:
    """float32 -> bfloat16, up or down with the odds that make the mean exact. Not finite stays what it is."""
    bits = x.float().view(torch.int32)
    noise = torch.randint(0, 1 << 16, x.shape, dtype=torch.int32, device=x.device, generator=generator)
    raised = ((bits + noise) & ~0xFFFF).view(torch.float32)
    return torch.where(x.isfinite(), raised, x).to(torch.bfloat16)


def _is_moment(value: Any) -> bool:
    """Not the count of steps, which half precision could not count."""
    return isinstance(value, Tensor) and value.ndim > 0 and value.is_floating_point()

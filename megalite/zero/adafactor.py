"""Adafactor: AdamW's second moment from the means of a matrix's rows and columns alone (N. Shazeer and M. Stern,
arXiv:1804.04235). The arithmetic is torch.optim.Adafactor's.

An update is in proportion to the root mean square of the weights, which the owner of a matrix does not have. So torch
is given weights of zero, with 1 for the least proportion: its step is then the direction, and where the weights are it
is multiplied by their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalite.zero.unit import Unit


@dataclass(frozen=True)
class Adafactor:
    """lr: the most of a step, relative to the weights; it is 1 / sqrt(step) where that is less. weight_decay: of groups
    that decay. beta2_decay: step^beta2_decay is what the newest squares count in the running means. clip: directions
    of a larger root mean square are scaled down to it. least: the weights' root mean square counts as no less.
    exclude: patterns of logical names (as in fnmatch) of matrices that are left to the other optimizer.
    round_numel: elements that a rank has whole at a time, if its matrices are smaller.
    """

    lr: float = 1e-2
    weight_decay: float = 0.0
    beta2_decay: float = -0.8
    clip: float = 1.0
    least: float = 1e-3
    exclude: tuple[str, ...] = ()
    round_numel: int = 1 << 24

    state_of: ClassVar[str] = "matrices"
    needs_rms: ClassVar[bool] = True

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """torch's; it keeps two vectors for each matrix."""
        options: dict[str, Any] = {"beta2_decay": self.beta2_decay, "d": self.clip, "weight_decay": 0.0}
        return torch.optim.Adafactor(groups, eps=(None, 1.0), **options)

    def elementwise(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        return gradient

    def dtype(self, unit: Unit) -> torch.dtype:
        return unit.wide

    def directions(
        self, wholes: Sequence[Tensor], owned: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> list[Tensor]:
        """-min(lr, 1 / sqrt(step)) times the scaled gradients."""
        for stand_in, whole in zip(owned, wholes, strict=True):
            stand_in.data = torch.zeros_like(whole)
            stand_in.grad = whole
        optimizer.step()  # of these alone: torch leaves out what has no gradient
        steps = [stand_in.data for stand_in in owned]
        for stand_in, step in zip(owned, steps, strict=True):
            stand_in.grad = None
            stand_in.data = step.new_zeros(()).expand(step.shape)  # a shape that takes no memory
        return steps

    def factor(self, shape: tuple[int, int], *, lr: float, rms: float) -> float:
        """What a direction is multiplied by when it is added to the weights."""
        return max(self.least, rms)

"""Muon: the momentum of a matrix, made orthogonal, is the direction of its update.

K. Jordan et al., https://kellerjordan.github.io/posts/muon; for large models J. Liu et al., arXiv:2502.16982, whose
scale 0.2 sqrt(max(rows, columns)) gives an update the root mean square of AdamW's, so that it takes AdamW's learning
rate and decay. In the order of torch.optim.Muon, which can't be taken as it is: it keeps momentum, decays and makes
orthogonal in one, and always in bfloat16, so that a float64 run would depend on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from megalite.zero.unit import HALF, Unit

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of x -> a x + b x^3 + c x^5 on the singular values: steep at 0, and within 0.7 to 1.2 after five steps (the post)."""


@dataclass(frozen=True)
class Muon:
    """lr, weight_decay: of a group whose multiplier is 1 and that decays. momentum: what is left of the mean of past
    gradients after a step; nesterov: the newest gradient counts once more. steps: of Newton-Schulz.
    exclude: patterns of logical names (as in fnmatch) of matrices that are left to the other optimizer.
    round_numel: elements that a rank has whole at a time, if its matrices are smaller.
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    exclude: tuple[str, ...] = ()
    round_numel: int = 1 << 24

    state_of: ClassVar[str] = "slices"
    needs_rms: ClassVar[bool] = False

    def optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Holds the momentum."""
        return _Momentum(groups, {})

    def elementwise(self, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        """What is made orthogonal: the mean of gradients, in the state of a slice."""
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - self.momentum)
        return gradient.lerp(buffer, self.momentum) if self.nesterov else buffer

    def dtype(self, unit: Unit) -> torch.dtype:
        """Newton-Schulz works in bfloat16 where the weights are of half precision, and matrices then travel in it."""
        return torch.bfloat16 if unit.weights.tensor.dtype in HALF else unit.wide

    def directions(
        self, wholes: Sequence[Tensor], owned: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> list[Tensor]:
        return [orthogonalized(whole, steps=self.steps) for whole in wholes]

    def factor(self, shape: tuple[int, int], *, lr: float, rms: float) -> float:
        """What a direction is multiplied by when it is added to the weights."""
        return -lr * 0.2 * math.sqrt(max(shape))


class _Momentum(torch.optim.Optimizer):
    """Groups and state alone: `megalite.zero.matrix_update` does the step."""


def orthogonalized(x: Tensor, *, steps: int = 5) -> Tensor:
    """(rows, columns) -> near the closest matrix with orthonormal rows or columns: singular values near 1.

    A quintic Newton-Schulz iteration, in the dtype of x, on the orientation with fewer rows: 4 rows^2 columns +
    2 rows^3 operations a step. Zero stays zero.
    """
    a, b, c = COEFFICIENTS
    tall = x.shape[0] > x.shape[1]
    y = x.mT if tall else x
    wide = torch.promote_types(y.dtype, torch.float32)
    y = y / torch.linalg.vector_norm(y, dtype=wide).clamp(min=1e-7).to(y.dtype)
    for _ in range(steps):
        gram = y @ y.mT
        y = torch.addmm(y, torch.addmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return y.mT if tall else y

"""Staying finite: the loss scale of float16, and when a run is lost.

One bad step is left out; many in a row mean that no good one will follow. With a dynamic scale a step whose gradients
have overflowed says first that the scale was too high.

No torch here: the launcher knows the error by its class and gives it an exit code of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_SKIPPED_IN_A_ROW = 10
"""After so many steps left out one after another the run ends. A step that is left out keeps weights and optimizer
state as they were, so only other data could bring a finite gradient back; that many batches are not all bad."""

FIRST_SCALE, GROWTH_STEPS = 2.0**16, 2000
"""As torch.amp.GradScaler begins and grows."""


class NotFiniteError(ArithmeticError):
    """The run gave no finite gradient any more; one line."""


@dataclass
class LossScale:
    """What the loss is multiplied by before backward, and the gradients divided by after it.

    A float16 holds nothing below 6e-8: gradients that small become zero unless they are scaled up, and beyond 65504
    they overflow. A dynamic scale is doubled after so many good steps and halved at an overflow, whose step is left out
    (Micikevicius et al., arXiv:1710.03740, section 3.2). In other precisions it is 1 and stays so. The norm that it
    goes by is the same on all ranks, and so is what follows.
    """

    is_dynamic: bool = False
    value: float = 1.0
    good_steps: int = 0
    in_a_row: int = 0

    @classmethod
    def of(cls, precision: str) -> LossScale:
        """As a precision of weights and activations needs it."""
        return cls(True, FIRST_SCALE) if precision == "fp16" else cls()

    def see(self, step: int, grad_norm: float) -> None:
        """Take note of a step's gradient norm. Raises NotFiniteError at the last step that is borne with."""
        if math.isfinite(grad_norm):
            self.in_a_row, self.good_steps = 0, self.good_steps + 1
            if self.is_dynamic and self.good_steps % GROWTH_STEPS == 0:
                self.value *= 2
            return
        self.good_steps = 0
        if self.is_dynamic and self.value > 1:
            self.value /= 2
            return
        self.in_a_row += 1
        if self.in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"non-finite: steps {step - self.in_a_row + 1} to {step} changed nothing, as the gradient of none was "
                "finite; the weights or the data have gone bad: take a smaller optim.lr, or look at data.paths"
            )

    def metrics(self) -> dict[str, float]:
        """What the step just made was scaled by, where that can change."""
        return {"train/loss_scale": self.value} if self.is_dynamic else {}

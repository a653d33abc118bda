"""When a run has failed to stay finite: one bad step is left out, many in a row mean that no good one will follow.

No torch here: the launcher knows the error by its class and gives it an exit code of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_SKIPPED_IN_A_ROW = 10
"""After so many steps left out one after another the run ends. A step that is left out keeps weights and optimizer
state as they were, so only other data could bring a finite gradient back; that many batches are not all bad."""


class NotFiniteError(ArithmeticError):
    """The run gave no finite gradient any more; one line."""


@dataclass
class Patience:
    """Counts the steps left out in a row. The norm is the same on all ranks, so all give up at the same step."""

    in_a_row: int = 0

    def see(self, step: int, grad_norm: float) -> None:
        """Take note of a step's gradient norm. Raises NotFiniteError at the last step that is borne with."""
        self.in_a_row = 0 if math.isfinite(grad_norm) else self.in_a_row + 1
        if self.in_a_row == MOST_SKIPPED_IN_A_ROW:
            raise NotFiniteError(
                f"non-finite: steps {step - self.in_a_row + 1} to {step} changed nothing, as the gradient of none was "
                "finite; the weights or the data have gone bad: take a smaller optim.lr, or look at data.paths"
            )

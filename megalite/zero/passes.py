"""When a backward pass ends, and whether it was one: what puts weight gradients off brings them in passes of one."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Passes:
    """Follows backward passes as hooks fire within them.

    ended: told at the end of each, with whether it was the pass of a micro-batch. arrived, promised: gradients of this
    pass that came, and that layers have put off; who sees them counts them up.
    """

    def __init__(self, ended: Callable[[bool], None]) -> None:
        self._ended = ended
        self._goes_on = False
        self._defers = False  # whether gradients have ever been put off
        self.arrived = self.promised = 0

    def notice(self) -> None:
        """Something fires within a backward pass: its end will be told."""
        if not self._goes_on:
            self._goes_on, self.arrived, self.promised = True, 0, 0
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def forget(self) -> None:
        """A pass that raised has no end."""
        self._goes_on = False

    def _end(self) -> None:
        self._goes_on = False
        if torch._C._current_autograd_node() is not None:
            return  # a backward within another (reentrant checkpointing), which goes on and will be noticed again
        # One gradient alone, where others were put off, is such a one that comes now, not a pass of its own.
        self._defers = self._defers or self.promised > 0
        self._ended(self.promised > 0 or self.arrived > self._defers)

"""When which unit's gradients are summed: in rounds, each in one pinned order.

Ranks that launch a unit when it is ready would sum different units against each other where one of them skips one,
and no error would tell. So a unit is launched only when all before it have been.

A round is a step at stages 0 and 1 (gradients are kept whole, and summed once) and a micro-batch at stages 2 and 3.
Arrivals are counted through the step, so one that belongs to a later micro-batch may go along with an earlier round:
sums commute. What has not arrived when its round must end goes as zeros.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.zero.unit import Slot, Unit


class Reductions:
    """Launches units as their gradients come. units: in the order of launch, all of one stage but for the root."""

    def __init__(self, units: Sequence[Unit], *, mesh: Mesh, stage: int) -> None:
        self.units, self.mesh = list(units), mesh
        self.by_microbatch = stage >= 2
        self.bounded = stage >= 1  # one reduction in flight, since each needs memory of its own
        self.microbatches = self.rounds = self.round = self.index = self.passes = 0
        self.is_learning = True  # until the first step has shown how often each gradient arrives
        self._in_flight: list[Unit] = []

    def open(self, microbatches: int) -> None:
        """A new step of so many micro-batches."""
        self.microbatches = microbatches
        self.rounds = microbatches if self.by_microbatch else 1
        self.round = self.index = self.passes = 0
        for unit in self.units:
            unit.open()
            self._begin_round(unit, 0)

    def may_arrive(self, slot: Slot) -> bool:
        """Whether one more gradient of a parameter can still be summed in this step."""
        return slot.unit.is_open or (self.by_microbatch and slot.rate is None)

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """A gradient goes into its unit, and with it whatever is complete now on its way."""
        slot.unit.put(slot, gradient)
        if slot.arrivals == slot.due:
            slot.unit.missing -= 1
            if not slot.unit.missing:
                self._launch_ready()

    def passed(self) -> None:
        """A backward pass has ended: what it did not bring will not come, unless it was put off."""
        self.passes += 1
        if self.by_microbatch:
            self._launch_ready()

    def finish(self) -> None:
        """Everything is summed; the first time, the arrivals seen become the rates that are expected from now on."""
        while self.round < self.rounds:
            self._launch()
        if self.is_learning:
            self._launch_leftovers()
        self._land()
        for pending in [unit.settle() for unit in self.units]:
            pending.wait()
        for slot in (slot for unit in self.units for slot in unit.slots if slot.rate is None):
            rate, rest = divmod(slot.arrivals, self.microbatches)
            slot.rate = 0 if rest else rate
        self.is_learning = False

    def _begin_round(self, unit: Unit, number: int) -> None:
        unit.is_open = number < self.rounds
        unit.missing = 0
        for slot in unit.slots:
            slot.due = (slot.rate or 1) * (number + 1) if self.by_microbatch else (slot.rate or 0) * self.microbatches
            unit.missing += slot.due == 0 or slot.arrivals < slot.due

    def _is_ready(self, unit: Unit) -> bool:
        if not unit.missing:
            return True
        if not self.by_microbatch or self.passes <= self.round:
            return False
        # The pass is over: a gradient whose count is known is waited for (a split backward brings it later).
        waiting = (slot for slot in unit.slots if slot.arrivals < slot.due)
        return all(not slot.rate and not slot.promised for slot in waiting)

    def _launch_ready(self) -> None:
        while self.round < self.rounds and self._is_ready(self.units[self.index]):
            self._launch()

    def _launch(self) -> None:
        """The next unit in the order."""
        unit = self.units[self.index] if self.units else None
        if unit is not None:
            self._start(unit)
            self._begin_round(unit, self.round + 1)
        self.index += 1
        if self.index >= len(self.units):
            self.index, self.round = 0, self.round + 1

    def _start(self, unit: Unit) -> None:
        if self.bounded:
            self._land()
        unit.launch()
        self._in_flight.append(unit)

    def _land(self) -> None:
        for unit in self._in_flight:
            unit.finish()
        self._in_flight.clear()

    def _launch_leftovers(self) -> None:
        """In the first step a gradient may come more often than once a micro-batch: one more round, of all ranks."""
        if not self.by_microbatch or not self.units:
            return
        written = [any(slot.written for slot in unit.slots) for unit in self.units]
        device = self.units[0].weights.tensor.device
        anywhere = start_all_reduce(torch.tensor(written, dtype=torch.int64, device=device), self.mesh.world, op="max")
        for unit, left in zip(self.units, anywhere.wait().tolist(), strict=True):
            if left:
                self._start(unit)

"""When which unit's gradients are summed: in rounds, each in one pinned order.

Ranks that launch a unit when it is ready would sum different units against each other where one of them skips one,
and no error would tell. So a unit is launched only when all before it in its line have been.

A round is a step at stages 0 and 1 (gradients are kept whole, and summed once) and a micro-batch at stages 2 and 3.
Arrivals are counted through the step, so one that belongs to a later micro-batch may go along with an earlier round:
sums commute. What has not arrived when its round must end goes as zeros.

All units stand in one line, unless the modules that hold them are worked on in turns, as a pipeline does with several
stages on a rank: then each module has a line of its own, which moves only within `last_backward` of that module, in
each by a round at most. All ranks take those turns in the same order, so they launch in the same order too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.zero.unit import Slot, Unit


@dataclass(eq=False)
class Line:
    """Units that are launched one after the other, round by round. holders: the numbers of the modules that have them.

    round, index: which unit comes next; ended: of each holder, how many of its micro-batches are over.
    """

    units: list[Unit]
    holders: tuple[int, ...]
    round: int = 0
    index: int = 0
    ended: dict[int, int] = field(default_factory=dict)

    def open(self) -> None:
        self.round = self.index = 0
        self.ended = dict.fromkeys(self.holders, 0)


class Reductions:
    """Launches units as their gradients come.

    holders: each unit, in the order of launch, with the numbers of the modules that hold it.
    """

    def __init__(self, holders: Mapping[Unit, Sequence[int]], *, mesh: Mesh, stage: int) -> None:
        self.units, self.mesh = list(holders), mesh
        self.by_microbatch = stage >= 2
        self.bounded = stage >= 1  # one reduction in flight, since each needs memory of its own
        self.microbatches = self.rounds = self.passes = 0
        self.is_learning = True  # until the first step has shown how often each gradient arrives
        self._together = [Line(self.units, ())]
        apart: dict[tuple[int, ...], list[Unit]] = {}
        for unit, numbers in holders.items():
            apart.setdefault(tuple(numbers), []).append(unit)
        # At the end of a turn its module's own line comes first, since a part of it may have gone within the turn.
        lines = [Line(units, numbers) for numbers, units in apart.items()]
        self._apart = sorted(lines, key=lambda line: len(line.holders))
        self.lines = self._together
        self._line_of: dict[Unit, Line] = {}
        self._moving: Line | None = None  # the only line that arrivals move, where modules take turns
        self._in_flight: list[Unit] = []

    @property
    def in_turns(self) -> bool:
        return self.lines is self._apart

    def open(self, microbatches: int, *, in_turns: bool = False) -> None:
        """A new step of so many micro-batches. in_turns: `last_backward` says when one is over, for each module."""
        self.microbatches = microbatches
        self.rounds = microbatches if self.by_microbatch else 1
        self.passes = 0
        self.lines = self._apart if in_turns else self._together
        self._moving = None
        for line in self.lines:
            line.open()
            for unit in line.units:
                self._line_of[unit] = line
                unit.open()
                self._begin_round(unit, 0)

    def may_arrive(self, slot: Slot) -> bool:
        """Whether one more gradient of a parameter can still be summed in this step."""
        return slot.unit.is_open or (self.by_microbatch and slot.rate is None and not self.in_turns)

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """A gradient goes into its unit, and with it whatever is complete now on its way."""
        slot.unit.put(slot, gradient)
        if slot.arrivals == slot.due:
            slot.unit.missing -= 1
            if not slot.unit.missing:
                self._launch_ready(self._line_of[slot.unit])

    def passed(self) -> None:
        """A backward pass has ended: what it did not bring will not come, unless it was put off."""
        self.passes += 1
        if self.by_microbatch and not self.in_turns:
            self._launch_ready(self.lines[0])

    @contextmanager
    def last_backward(self, holder: int) -> Iterator[None]:
        """In the block the last gradients of a module's micro-batch arrive; after it, that micro-batch is over."""
        if not self.in_turns:
            raise ValueError("last_backward is for stages that take turns; open the step by begin(..., in_turns=True)")
        self._moving = next((line for line in self.lines if line.holders == (holder,)), None)
        if self._moving is not None:
            self._launch_ready(self._moving)
        yield
        self._moving = None
        for line in self.lines:
            if holder in line.holders:
                line.ended[holder] += 1
                over = min(line.ended.values())
                due = over if self.by_microbatch else int(over == self.microbatches)
                while line.round < due:
                    self._launch(line)

    def finish(self) -> None:
        """Everything is summed; the first time, the arrivals seen become the rates that are expected from now on.

        Raises ValueError if `last_backward` has ended another number of micro-batches than the step was opened for.
        """
        ended = {count for line in self.lines for count in line.ended.values()}
        if ended - {0, self.microbatches}:
            raise ValueError(
                f"the step was opened by begin(microbatches={self.microbatches}), and {max(ended)} came to their end"
            )
        for line in self.lines:
            while line.round < self.rounds:
                self._launch(line)
        if self.is_learning and not self.in_turns:
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

    def _is_ready(self, line: Line) -> bool:
        unit = line.units[line.index]
        if self.in_turns:
            # A later turn's gradients may be here already, and on a rank that lacks some the round ends with that turn.
            turn = line.round if self.by_microbatch else self.microbatches - 1
            is_its_turn = line is self._moving and turn <= min(line.ended.values())
            return is_its_turn and not unit.missing and not self.is_learning
        if not unit.missing:
            return True
        if not self.by_microbatch or self.passes <= line.round:
            return False
        # The pass is over: a gradient whose count is known is waited for (a split backward brings it later).
        waiting = (slot for slot in unit.slots if slot.arrivals < slot.due)
        return all(not slot.rate and not slot.promised for slot in waiting)

    def _launch_ready(self, line: Line) -> None:
        while line.round < self.rounds and self._is_ready(line):
            self._launch(line)

    def _launch(self, line: Line) -> None:
        """The next unit of a line."""
        unit = line.units[line.index] if line.units else None
        if unit is not None:
            self._start(unit)
            self._begin_round(unit, line.round + 1)
        line.index += 1
        if line.index >= len(line.units):
            line.index, line.round = 0, line.round + 1

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
        anywhere = start_all_reduce(torch.tensor(written, dtype=torch.int64, device=device), self.mesh.stage, op="max")
        for unit, left in zip(self.units, anywhere.wait().tolist(), strict=True):
            if left:
                self._start(unit)

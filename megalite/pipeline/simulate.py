"""What a schedule costs, by arithmetic: when each action begins and ends, who waits, what is held.

A rank works off its row in order; an action begins when the rank is free and what it reads has arrived. So the first
possible time of everything follows in one pass over the actions. Exact where the costs are: integers stay integers,
and what is divided becomes a Fraction; floats stay floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from megalite.pipeline.lower import Lane, Message, in_order, lower
from megalite.pipeline.schedule import Action, Number, Schedule, held


@dataclass(frozen=True)
class Costs:
    """Times of one stage's passes, in any unit of time.

    forward, input_gradient, weight_gradient: F, B, W of every stage; BW takes B + W. stages: stage -> (F, B, W) where
    they differ, as for a stage with the head. of: Action -> its own time, before all others and as it is: what was
    measured has its overlap within it.
    latency: from the end of an action to the arrival on another rank of what it sends, plus volume / bandwidth, for
    which messages of one lane queue; volume in any unit, None takes no time. What stays on its rank is there at once.
    overlap: the time that a pair F&B takes, as a part of F + B; 1 where nothing overlaps them, and so unless measured.
    Raises ValueError for what is negative or not finite.
    """

    forward: Number = 1
    input_gradient: Number = 1
    weight_gradient: Number = 1
    stages: Mapping[int, tuple[Number, Number, Number]] = field(default_factory=dict)
    of: Mapping[Action, Number] = field(default_factory=dict)
    latency: Number = 0
    volume: Number = 1
    bandwidth: Number | None = None
    overlap: Number = 1

    def __post_init__(self) -> None:
        named = {name: value for name, value in vars(self).items() if isinstance(value, Number)}
        for stage, times in self.stages.items():
            named |= {f"stages[{stage}][{place}]": time for place, time in enumerate(times)}
        named |= {f"of[{action}]": time for action, time in self.of.items()}
        for name, value in named.items():
            if not (value >= 0 and math.isfinite(value)) or (name == "bandwidth" and value == 0):
                raise ValueError(
                    f"costs: {name}={value} is no time; take a finite number from 0 up, a bandwidth above 0"
                )

    def __call__(self, action: Action) -> Number:
        """How long an action takes."""
        if action in self.of:
            return self.of[action]
        usual = (self.forward, self.input_gradient, self.weight_gradient)
        forward, input_gradient, weight_gradient = self.stages.get(action.stage, usual)
        if action.kind == "BW":
            return input_gradient + weight_gradient
        return {"F": forward, "B": input_gradient, "W": weight_gradient}[action.kind]

    @property
    def transfer(self) -> Number:
        """How long one message occupies its lane."""
        return 0 if self.bandwidth is None else _quotient(self.volume, self.bandwidth)


class Event(NamedTuple):
    """An action with the times of its begin and end."""

    action: Action
    start: Number
    end: Number


@dataclass(frozen=True)
class Timeline:
    """What happens when: for each rank its events in order. The measures below are the papers', by their names."""

    schedule: Schedule
    rows: tuple[tuple[Event, ...], ...]

    @property
    def makespan(self) -> Number:
        """From the first begin of any action to the last end of any."""
        return max(row[-1].end for row in self.rows) - min(row[0].start for row in self.rows)

    def busy(self, rank: int) -> Number:
        """The time of a rank's actions together."""
        return sum(event.end - event.start for event in self.rows[rank])

    def span(self, rank: int) -> Number:
        """From a rank's first begin to its last end."""
        return self.rows[rank][-1].end - self.rows[rank][0].start

    def idle(self, rank: int) -> Number:
        """What a rank stands still within its span."""
        return self.span(rank) - self.busy(rank)

    @property
    def bubble(self) -> Number:
        """The part of all ranks' time, over the makespan, in which they do nothing: 1 - busy / (p makespan)."""
        all_time = len(self.rows) * self.makespan
        return _quotient(all_time - sum(map(self.busy, self._ranks)), all_time)

    @property
    def bubble_span(self) -> Number:
        """The same of the rank with most, within its own span: the zero-bubble papers' bubble rate (arXiv:2401.10241,
        section 5.3), whose zero is zero only there."""
        return max(_quotient(self.idle(rank), self.span(rank)) for rank in self._ranks)

    @property
    def idle_span(self) -> Number:
        """Idle time within its span of the rank with most: the formulas' bubble, as (p-1)(F+B+W) of 1F1B."""
        return max(map(self.idle, self._ranks))

    @property
    def _ranks(self) -> range:
        return range(len(self.rows))


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:
    """Runs a schedule on paper, each action at the first moment that it can. O(actions).

    Raises ValueError if it cannot come to its end. Of receives it supposes that they are posted in time.
    """
    free: list[Number] = [0] * schedule.ranks
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    arrivals: dict[Message, Number] = {}
    lanes: dict[Lane, Number] = {}  # when the last message has left it
    latency, transfer = costs.latency, costs.transfer
    for rank, (action, reads, sends) in in_order(lower(schedule)):
        start = free[rank] if reads is None else max(free[rank], arrivals[reads])
        end = free[rank] = start + costs(action) * _share(action, rows[rank], schedule, costs)
        rows[rank].append(Event(action, start, end))
        if sends is not None:
            lanes[sends.lane] = max(end, lanes.get(sends.lane, end)) + transfer
            arrivals[sends] = lanes[sends.lane] + latency
    return Timeline(schedule, tuple(map(tuple, rows)))


def _share(action: Action, row: list[Event], schedule: Schedule, costs: Costs) -> Number:
    """What a pair's overlap leaves of the time of one of the two."""
    if costs.overlap == 1 or action in costs.of:
        return 1
    second = bool(row) and row[-1].action in schedule.paired
    return costs.overlap if action in schedule.paired or second else 1


def peaks(schedule: Schedule, *, until_input_gradient: Number = 1, until_weight_gradient: Number = 1) -> list[Number]:
    """Activations that each rank holds at its highest moment, in whole-stage micro-batches.

    until_input_gradient: what one pass holds from its F to its B (M_B of arXiv:2401.10241), until_weight_gradient: from
    its B to its W (M_W); BW holds M_B to its end. With v stages a rank, each counts 1/v.
    """
    found = []
    for rank, row in enumerate(schedule.rows):
        most = max(held(row, lambda stage: (until_input_gradient, until_weight_gradient)))
        found.append(_quotient(most, len(schedule.stages_of(rank))))
    return found


def _quotient(number: Number, by: Number) -> Number:
    """number / by, exact where both are; a part of no time at all is none."""
    if by == 0:
        return 0
    return number / by if isinstance(number, float) or isinstance(by, float) else Fraction(number) / by

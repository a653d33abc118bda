"""What a schedule costs, by arithmetic: when each action begins and ends, who waits, what is held.

A rank works off its row in order; an action begins when the rank is free and what it reads has arrived. Exact where
the costs are: with integers or fractions every result is a fraction.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from megalite.pipeline.schedule import Action, Schedule

Number = int | float | Fraction


@dataclass(frozen=True)
class Costs:
    """Times of one stage's passes, in any unit of time.

    forward, input_gradient, weight_gradient: F, B, W of every stage; BW takes B + W. stages: stage -> (F, B, W) where
    they differ, as for a stage with the head. of: Action -> its own time, before all others (what was measured).
    latency: from the end of an action to the arrival on another rank of what it sends, plus volume / bandwidth, for
    which messages of one lane (from, to, kind) queue; volume is any unit, bandwidth None takes no time.
    overlap: the time that a pair F&B takes, as a part of F + B; 1 where nothing overlaps them.
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

    def __call__(self, action: Action) -> Number:
        """How long an action takes."""
        if action in self.of:
            return _exact(self.of[action])
        usual = (self.forward, self.input_gradient, self.weight_gradient)
        forward, input_gradient, weight_gradient = map(_exact, self.stages.get(action.stage, usual))
        both = input_gradient + weight_gradient
        return {"F": forward, "B": input_gradient, "W": weight_gradient, "BW": both}[action.kind]

    @property
    def transfer(self) -> Number:
        """How long one message occupies its lane."""
        return Fraction(0) if self.bandwidth is None else _exact(self.volume) / _exact(self.bandwidth)


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
        return sum((event.end - event.start for event in self.rows[rank]), Fraction(0))

    def span(self, rank: int) -> Number:
        """From a rank's first begin to its last end."""
        return self.rows[rank][-1].end - self.rows[rank][0].start

    @property
    def bubble(self) -> Number:
        """The part of all ranks' time, over the makespan, in which they do nothing: 1 - busy / (p makespan)."""
        busy = sum((self.busy(rank) for rank in range(self.schedule.ranks)), Fraction(0))
        return 1 - busy / (self.schedule.ranks * self.makespan)

    @property
    def bubble_span(self) -> Number:
        """The same of the rank with most, within its own span: the zero-bubble papers' bubble rate, whose zero is zero
        only there."""
        return max((self.span(rank) - self.busy(rank)) / self.span(rank) for rank in range(self.schedule.ranks))

    @property
    def idle_span(self) -> Number:
        """Idle time within its span of the rank with most: the formulas' bubble, as (p-1)(F+B+W) of 1F1B."""
        return max(self.span(rank) - self.busy(rank) for rank in range(self.schedule.ranks))


def simulate(schedule: Schedule, costs: Costs = Costs()) -> Timeline:  # noqa: B008, it is frozen
    """Runs a schedule on paper. Raises ValueError if it cannot come to its end; `lower.check` says more of why."""
    ends: dict[Action, Number] = {}
    arrivals: dict[Action, Number] = {}
    lanes: dict[tuple[int, int, str], Number] = defaultdict(lambda: Fraction(0))
    rows: list[list[Event]] = [[] for _ in schedule.rows]
    waiting = True
    while waiting:
        waiting = False
        moved = False
        for rank, row in enumerate(schedule.rows):
            while len(rows[rank]) < len(row):
                action = row[len(rows[rank])]
                ready = _ready(action, schedule, ends, arrivals)
                if ready is None:
                    waiting = True
                    break
                free = rows[rank][-1].end if rows[rank] else Fraction(0)
                _run(action, max(free, ready), schedule, costs, rows[rank], ends, arrivals, lanes)
                moved = True
        if waiting and not moved:
            stuck = next(row[len(done)] for row, done in zip(schedule.rows, rows, strict=True) if len(done) < len(row))
            raise ValueError(f"schedule {schedule.name} comes to a stop: {stuck} waits for what never comes")
    return Timeline(schedule, tuple(map(tuple, rows)))


def _ready(
    action: Action, schedule: Schedule, ends: Mapping[Action, Number], arrivals: Mapping[Action, Number]
) -> Number | None:
    """When all that an action reads is there; None while that is unknown."""
    kind, stage, microbatch = action
    if kind == "F":
        return Fraction(0) if stage == 0 else arrivals.get(Action("F", stage - 1, microbatch))
    if kind == "W":
        return ends.get(Action("B", stage, microbatch))
    forward = ends.get(Action("F", stage, microbatch))
    if stage == schedule.stages - 1 or forward is None:
        return forward
    above = (arrivals.get(Action(other, stage + 1, microbatch)) for other in ("B", "BW"))
    gradient = next((time for time in above if time is not None), None)
    return None if gradient is None else max(forward, gradient)


def _run(
    action: Action,
    start: Number,
    schedule: Schedule,
    costs: Costs,
    row: list[Event],
    ends: dict[Action, Number],
    arrivals: dict[Action, Number],
    lanes: dict[tuple[int, int, str], Number],
) -> None:
    took = costs(action) * _share(action, row, schedule, costs)
    end = ends[action] = start + took
    row.append(Event(action, start, end))
    if action.kind == "W":
        return
    reader = action.stage + (1 if action.kind == "F" else -1)
    if not 0 <= reader < schedule.stages:
        return
    here, there = schedule.rank_of[action.stage], schedule.rank_of[reader]
    arrivals[action] = end
    if here != there:
        lane = (here, there, "F" if action.kind == "F" else "B")
        lanes[lane] = max(end, lanes[lane]) + costs.transfer
        arrivals[action] = lanes[lane] + _exact(costs.latency)


def _share(action: Action, row: list[Event], schedule: Schedule, costs: Costs) -> Number:
    """What a pair's overlap leaves of the time of one of the two."""
    second = bool(row) and row[-1].action in schedule.paired
    return _exact(costs.overlap) if action in schedule.paired or second else 1


def peaks(schedule: Schedule, *, until_input_gradient: Number = 1, until_weight_gradient: Number = 1) -> list[Fraction]:
    """Activations that each rank holds at its highest moment, in whole-stage micro-batches.

    until_input_gradient: what one pass holds from its F to its B (M_B of arXiv:2401.10241), until_weight_gradient: from
    its B to its W (M_W); BW holds M_B to its end. With v stages a rank, each counts 1/v.
    """
    m_b, m_w = _exact(until_input_gradient), _exact(until_weight_gradient)
    change = {"F": m_b, "B": m_w - m_b, "W": -m_w, "BW": -m_b}
    found = []
    for rank, row in enumerate(schedule.rows):
        held = most = Fraction(0)
        for action in row:
            held += change[action.kind]
            most = max(most, held)
        found.append(Fraction(most) / len(schedule.stages_of(rank)))
    return found


def _exact(number: Number) -> Number:
    return number if isinstance(number, float) else Fraction(number)

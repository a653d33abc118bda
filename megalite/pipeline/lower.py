"""From a schedule to messages: what each action reads and sends, on which lane, and the proof that it all meets.

A *lane* carries the messages of one kind from one rank to another, in the order in which they were sent, to be read in
the order of its reader's need. Nothing but that order says which message is which: NCCL knows no tags. So `check`
proves, before anything runs, that a schedule

- is complete: each stage sees each micro-batch forward once, and backward once, as BW or as B and later W;
- swaps nothing: on every lane the order of sending is the order of reading;
- comes to its end: no circle of ranks that wait for one another;
- holds no more activations than it promises.

It comes to its end also where a lane takes a message only when its receive is posted, one ahead on each lane: without
swaps the k-th sent is the k-th read, its receive is posted as soon as the one before is taken, and a send stops nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, NoReturn

from megalite.pipeline.schedule import KINDS, Action, Row, Schedule, held_at_most

ACTIVATION, GRADIENT = "activation", "gradient"


class Lane(NamedTuple):
    """source, target: ranks of pp. kind: ACTIVATION or GRADIENT, which never share a lane: they have one shape, and in
    a V both go between the same two ranks in the same direction."""

    source: int
    target: int
    kind: str

    def __str__(self) -> str:
        return f"{self.kind}s from rank {self.source} to rank {self.target}"


class Message(NamedTuple):
    """What one stage leaves to the next. stage: the one that reads it."""

    lane: Lane
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"micro-batch {self.microbatch} for stage {self.stage}"


class Step(NamedTuple):
    """An action, with what it waits for from another rank and what it leaves to one; None where the neighbouring stage
    lives on the same rank, which is handed over there, or where there is none."""

    action: Action
    reads: Message | None
    sends: Message | None


@dataclass(frozen=True)
class Lowered:
    """A schedule with its messages. rows: one of steps a rank. lanes: those that are used, in the order of Lane."""

    schedule: Schedule
    rows: tuple[tuple[Step, ...], ...]
    lanes: tuple[Lane, ...]

    def incoming(self, rank: int) -> dict[Lane, tuple[Message, ...]]:
        """Lane -> what it brings to a rank, in the order in which the rank needs it."""
        return _by_lane(step.reads for step in self.rows[rank])

    def outgoing(self, rank: int) -> dict[Lane, tuple[Message, ...]]:
        """Lane -> what a rank sends on it, in order."""
        return _by_lane(step.sends for step in self.rows[rank])


def _by_lane(messages: Iterator[Message | None]) -> dict[Lane, tuple[Message, ...]]:
    found: dict[Lane, list[Message]] = {}
    for message in messages:
        if message is not None:
            found.setdefault(message.lane, []).append(message)
    return {lane: tuple(found[lane]) for lane in sorted(found)}


def lanes_of(rank_of: Sequence[int], *, backward: bool = True) -> tuple[Lane, ...]:
    """The lanes that any schedule over this placement uses. rank_of: stage -> rank."""
    activations, gradients = _lanes_to(rank_of)
    return tuple(sorted({*activations.values(), *(gradients.values() if backward else ())}))


def _lanes_to(rank_of: Sequence[int]) -> tuple[dict[int, Lane], dict[int, Lane]]:
    """Stage -> the lane by which its activations come, and that of its gradients, where one does."""
    activations, gradients = {}, {}
    for stage, (source, target) in enumerate(pairwise(rank_of)):
        if source != target:
            activations[stage + 1] = Lane(source, target, ACTIVATION)
            gradients[stage] = Lane(target, source, GRADIENT)
    return activations, gradients


def lower(schedule: Schedule) -> Lowered:
    """A schedule with its messages, as it is: whether they meet is for `check` to say."""
    activations, gradients = _lanes_to(schedule.rank_of)

    def step(action: Action) -> Step:
        kind, stage, microbatch = action
        if kind == "W":
            return Step(action, None, None)
        lanes, reader = (activations, stage + 1) if kind == "F" else (gradients, stage - 1)
        return Step(action, _message(lanes, stage, microbatch), _message(lanes, reader, microbatch))

    rows = tuple(tuple(map(step, row)) for row in schedule.rows)
    backward = any(action.kind != "F" for row in schedule.rows for action in row)
    return Lowered(schedule, rows, lanes_of(schedule.rank_of, backward=backward))


def lower_forward(rank_of: Sequence[int], microbatches: int) -> Lowered:
    """Evaluation over a placement, forward alone, for any number of micro-batches: by groups of as many as there are
    ranks, each group through the stages in order. Every row keeps one order of all actions, so nothing waits in a
    circle or is swapped, and no rank has more than a group's outputs waiting."""
    ranks = 1 + max(rank_of)
    rows: list[list[Action]] = [[] for _ in range(ranks)]
    for first in range(0, microbatches, ranks):
        for stage, rank in enumerate(rank_of):
            group = range(first, min(first + ranks, microbatches))
            rows[rank] += [Action("F", stage, microbatch) for microbatch in group]
    return lower(Schedule("forward", tuple(map(tuple, rows)), tuple(rank_of)))


def _message(lanes: dict[int, Lane], stage: int, microbatch: int) -> Message | None:
    return Message(lanes[stage], stage, microbatch) if stage in lanes else None


def check(schedule: Schedule) -> Lowered:
    """The schedule with its messages, proven to be complete, without swaps, to come to its end and to keep its promise.

    Raises ValueError, one line with rank, action and reason, for any other.
    """
    _check_placement(schedule)
    for rank in range(schedule.ranks):
        _check_complete(schedule, rank)
    lowered = lower(schedule)
    in_order(lowered)
    _check_lanes(lowered)
    _check_peaks(schedule)
    return lowered


def in_order(lowered: Lowered) -> list[tuple[int, Step]]:
    """(rank, step) of all actions, in one order in which they can run, each rank's in that of its row; O(actions).

    Raises ValueError, with the circle of ranks that wait for one another, where there is none.
    """
    schedule = lowered.schedule
    order: list[tuple[int, Step]] = []
    done: set[Action] = set()
    place = [0] * schedule.ranks
    waiting: dict[Action, list[int]] = {}  # what is missing -> the ranks that stand still for it
    awake = list(reversed(range(schedule.ranks)))
    while awake:
        rank = awake.pop()
        row = lowered.rows[rank]
        while place[rank] < len(row):
            action = (step := row[place[rank]]).action
            missing = next((need for need in needs(action, schedule.stages) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            place[rank] += 1
            order.append((rank, step))
            done.add(result := result_of(action))
            awake += waiting.pop(result, ())
    if waiting:
        _refuse_stop(schedule, {rank: missing for missing, ranks in waiting.items() for rank in ranks}, place)
    return order


def result_of(action: Action) -> Action:
    """What others name when they wait for an action: BW stands for its B, whose gradient is all they wait for."""
    return action._replace(kind="B") if action.kind == "BW" else action


def needs(action: Action, stages: int) -> list[Action]:
    """The results that an action reads, of its own stage and of the one before it on its way."""
    kind, stage, microbatch = action
    if kind == "F":
        return [Action("F", stage - 1, microbatch)] if stage else []
    if kind == "W":
        return [Action("B", stage, microbatch)]
    own = Action("F", stage, microbatch)
    return [own, Action("B", stage + 1, microbatch)] if stage + 1 < stages else [own]


def _refuse(schedule: Schedule, rank: int, what: str) -> NoReturn:
    raise ValueError(f"schedule {schedule.name}: rank {rank} {what}")


def _check_placement(schedule: Schedule) -> None:
    stages, ranks = schedule.stages, schedule.ranks
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < ranks:
            _refuse(schedule, rank, f"should hold stage {stage}, and there are {ranks} ranks, from 0")
    for rank, row in enumerate(schedule.rows):
        if not row:
            _refuse(schedule, rank, "has nothing to do; give it a stage, or take fewer ranks")
        for action, following in zip(row, [*row[1:], None], strict=True):
            if action.kind not in KINDS or action.microbatch < 0:
                _refuse(schedule, rank, f"has {action}, which is no action; kinds are {', '.join(KINDS)}")
            if not 0 <= action.stage < stages:
                _refuse(schedule, rank, f"has {action}, and there are {stages} stages, from 0")
            if schedule.rank_of[action.stage] != rank:
                _refuse(schedule, rank, f"has {action}, whose stage is rank {schedule.rank_of[action.stage]}'s")
            backward = following is not None and following.kind in ("B", "BW")
            if action in schedule.paired and not (action.kind == "F" and backward):
                _refuse(schedule, rank, f"pairs {action} with {following or 'nothing'}; a pair is F and then B or BW")


def _check_complete(schedule: Schedule, rank: int) -> None:
    """Every stage of a rank and every micro-batch: F, and BW or B and W, each once. In which order, `in_order` sees."""
    there: set[Action] = set()
    for action in schedule.rows[rank]:
        if action in there:
            _refuse(schedule, rank, f"has {action} twice")
        there.add(action)
    for stage in schedule.stages_of(rank):
        for microbatch in range(schedule.microbatches):
            passes = [found for kind in KINDS if (found := Action(kind, stage, microbatch)) in there]
            kinds = [action.kind for action in passes]
            if "BW" in kinds and len(kinds) > 2:
                _refuse(schedule, rank, f"has {passes[-1]}, which is B and W in one, and {passes[-2]} as well")
            whole = ("F", "BW") if "BW" in kinds or not {"B", "W"} & set(kinds) else ("F", "B", "W")
            for kind in whole:
                if kind not in kinds:
                    lacks = Action(kind, stage, microbatch)
                    beside = f" beside {passes[-1]}" if passes else ""
                    upto = f"micro-batches 0 to {schedule.microbatches - 1}"
                    _refuse(schedule, rank, f"lacks {lacks}{beside}; each of its stages takes {upto}")


def _check_lanes(lowered: Lowered) -> None:
    sent = {lane: order for rank in range(lowered.schedule.ranks) for lane, order in lowered.outgoing(rank).items()}
    for rank in range(lowered.schedule.ranks):
        for lane, needed in lowered.incoming(rank).items():
            for comes, need in zip(sent[lane], needed, strict=True):
                if comes != need:
                    _refuse(
                        lowered.schedule,
                        rank,
                        f"needs {need} when {comes} comes first: swapped on the lane of {lane}, where messages bear no "
                        "name; send in the order of reading",
                    )


def _check_peaks(schedule: Schedule) -> None:
    if schedule.peaks and len(schedule.peaks) != schedule.ranks:
        raise ValueError(
            f"schedule {schedule.name} promises peaks for {len(schedule.peaks)} ranks, and has {schedule.ranks}"
        )
    for rank, (row, promised) in enumerate(zip(schedule.rows, schedule.peaks, strict=False)):
        if (held := held_at_most(row)) > promised:
            _refuse(schedule, rank, f"holds {held} activations{_at(row, held)}, and promises at most {promised}")


def _at(row: Row, held: int) -> str:
    """Where a row first holds so many."""
    first = next(end for end in range(1, len(row) + 1) if held_at_most(row[:end]) == held)
    return f" from {row[first - 1]} on"


def _refuse_stop(schedule: Schedule, missing: dict[int, Action], place: Sequence[int]) -> NoReturn:
    """missing: rank that stands still -> the result that it waits for; place: where in its row."""
    known = {result_of(action): action for row in schedule.rows for action in row}
    chain: list[int] = []
    rank = min(missing)
    while rank not in chain:
        chain.append(rank)
        stops = schedule.rows[rank][place[rank]]
        if missing[rank] not in known:
            _refuse(schedule, rank, f"stops at {stops}, which waits for {missing[rank]}, which is in no row")
        rank = schedule.rank_of[missing[rank].stage]
    circle = chain[chain.index(rank) :]
    if len(circle) == 1:
        stops = schedule.rows[rank][place[rank]]
        _refuse(schedule, rank, f"has {stops} before {known[missing[rank]]}, which it needs")
    stand = [f"rank {rank} at {schedule.rows[rank][place[rank]]} for {known[missing[rank]]}" for rank in circle]
    raise ValueError(f"schedule {schedule.name} comes to a stop, ranks waiting in a circle: {', '.join(stand)}")

"""What actions read and send, and what `check` proves: tried on schedules that are broken in every way, and against a
machine with lanes that know no names."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.lower import Lane, Message, check, in_order, lanes_of, lower, lower_forward
from megalite.pipeline.schedule import KINDS, Action, Schedule, in_a_v, in_line, in_loops, parse

V = """
F0@0 F1@0 F0@3 B0@3 F1@3 B1@3 B0@0 W0@3 B1@0 W1@3 W0@0 W1@0
F0@1 F0@2 F1@1 F1@2 B0@2 B0@1 B1@2 B1@1 W0@2 W0@1 W1@2 W1@1
"""
GOOD = [
    "F0@0 BW0@0",
    "F0@0 F1@0 BW0@0 BW1@0\nF0@1 BW0@1 F1@1 BW1@1",
    "F0@0 F1@0 B0@0 W0@0 B1@0 W1@0\nF0@1 B0@1 F1@1 B1@1 W0@1 W1@1",
    "F0@0 F1@0 F0@2 F1@2 BW0@2 BW1@2 BW0@0 BW1@0\nF0@1 F1@1 F0@3 BW0@3 F1@3 BW1@3 BW0@1 BW1@1",
    V,
    "F0@0 F1@0 F0@5 BW0@5 BW0@0 F1@5 BW1@5 BW1@0\nF0@1 F0@4 F1@1 BW0@4 BW0@1 F1@4 BW1@4 BW1@1\n"
    "F0@2 F0@3 BW0@3 BW0@2 F1@2 F1@3 BW1@3 BW1@2",
]
PLACEMENTS = [in_line(1), in_line(3), in_loops(2, 2), in_loops(3, 2), in_loops(1, 3), in_a_v(1), in_a_v(2), in_a_v(4)]


def refusal(schedule: Schedule) -> str:
    with pytest.raises(ValueError) as refused:
        check(schedule)
    assert "\n" not in str(refused.value)
    return str(refused.value)


# Messages


def test_an_action_reads_from_the_stage_before_it_and_sends_to_the_one_after_unless_they_share_a_rank():
    lowered = check(parse(V))
    there, back = Lane(0, 1, "activation"), Lane(1, 0, "activation")
    down, up = Lane(0, 1, "gradient"), Lane(1, 0, "gradient")
    steps = {str(step.action): step[1:] for row in lowered.rows for step in row}
    assert steps["F0@0"] == (None, Message(there, stage=1, microbatch=0))
    assert steps["F1@1"] == (Message(there, 1, 1), None)
    assert steps["F1@2"] == (None, Message(back, 3, 1))
    assert steps["F0@3"] == (Message(back, 3, 0), None)
    assert steps["B0@3"] == (None, Message(down, 2, 0))
    assert steps["B1@2"] == (Message(down, 2, 1), None)
    assert steps["B1@1"] == (None, Message(up, 0, 1))
    assert steps["B0@0"] == (Message(up, 0, 0), None)
    assert all(step == (None, None) for word, step in steps.items() if word.startswith("W"))
    assert lowered.lanes == (there, down, back, up)


def test_what_comes_in_stands_in_the_order_of_need():
    eager = parse("F0@0 F1@0 F2@0 BW0@0 BW1@0 BW2@0\nF0@1 BW0@1 F1@1 BW1@1 F2@1 BW2@1")
    lane = Lane(0, 1, "activation")
    assert lower(eager).incoming(1) == {lane: tuple(Message(lane, 1, each) for each in range(3))}
    looped = lower(parse(GOOD[3])).incoming(1)[lane]
    assert [(message.stage, message.microbatch) for message in looped] == [(1, 0), (1, 1), (3, 0), (3, 1)]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_placement_uses_the_same_lanes_whatever_the_schedule(name, ranks):
    schedule = make(name, ranks=ranks, microbatches=3)
    lowered = check(schedule)
    used = {lane for rank in range(ranks) for lane in lowered.incoming(rank)}
    assert used == {lane for rank in range(ranks) for lane in lowered.outgoing(rank)}
    assert lowered.lanes == lanes_of(schedule.rank_of) == tuple(sorted(used))


def test_lanes_by_placement():
    assert lanes_of(in_line(2)) == (Lane(0, 1, "activation"), Lane(1, 0, "gradient"))
    assert lanes_of(in_line(1)) == lanes_of(in_a_v(1)) == ()
    assert {lane[:2] for lane in lanes_of(in_loops(3, 2), backward=False)} == {(0, 1), (1, 2), (2, 0)}
    assert {lane[:2] for lane in lanes_of(in_a_v(3), backward=False)} == {(0, 1), (1, 2), (2, 1), (1, 0)}
    assert set(lanes_of(in_a_v(3), backward=False)) < set(lanes_of(in_a_v(3)))


@pytest.mark.parametrize("rank_of", PLACEMENTS)
@pytest.mark.parametrize("microbatches", [0, 1, 2, 3, 4, 7])
def test_evaluation_takes_any_number_of_microbatches_through_every_stage_once(rank_of, microbatches):
    lowered = lower_forward(rank_of, microbatches)
    done = [step.action for _, step in in_order(lowered)]
    assert sorted(done) == [Action("F", stage, m) for stage in range(len(rank_of)) for m in range(microbatches)]
    assert lowered.lanes == lanes_of(rank_of, backward=False)
    assert runs_without_names(lowered.schedule)


# Proofs


@pytest.mark.parametrize("text", GOOD)
def test_a_good_schedule_is_lowered(text):
    assert check(parse(text)) == lower(parse(text))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 1), (1, 3), (2, 1), (3, 5), (4, 1), (4, 3), (4, 8), (5, 12)])
def test_every_schedule_of_ours_is_good_with_any_number_of_microbatches(name, ranks, microbatches):
    check(make(name, ranks=ranks, microbatches=microbatches))


BROKEN = {
    "no W": ("F0@0 B0@0", "rank 0 lacks W0@0 beside B0@0"),
    "no B": ("F0@0 W0@0", "rank 0 lacks B0@0 beside W0@0"),
    "no backward": ("F0@0 F1@0 BW0@0", "rank 0 lacks BW1@0 beside F1@0"),
    "no forward": ("BW0@0", "rank 0 lacks F0@0 beside BW0@0"),
    "a micro-batch that another stage has": (
        "F0@0 BW0@0 F1@0 BW1@0\nF0@1 BW0@1",
        "rank 1 lacks F1@1; each of its stages takes micro-batches 0 to 1",
    ),
    "a number left out": ("F0@0 BW0@0 F2@0 BW2@0", "rank 0 lacks F1@0"),
    "F twice": ("F0@0 F0@0 BW0@0", "rank 0 has F0@0 twice"),
    "W twice": ("F0@0 B0@0 W0@0 W0@0", "rank 0 has W0@0 twice"),
    "BW and B": ("F0@0 B0@0 BW0@0", "rank 0 has BW0@0, which is B and W in one, and B0@0 as well"),
    "BW and W": ("F0@0 BW0@0 W0@0", "rank 0 has BW0@0, which is B and W in one, and W0@0 as well"),
    "BW, B and W": ("F0@0 B0@0 W0@0 BW0@0", "which is B and W in one"),
    "W before B": ("F0@0 W0@0 B0@0", "rank 0 has W0@0 before B0@0, which it needs"),
    "B before F": ("B0@0 F0@0 W0@0", "rank 0 has B0@0 before F0@0, which it needs"),
    "BW before F": ("BW0@0 F0@0", "rank 0 has BW0@0 before F0@0, which it needs"),
    "stages of one rank the wrong way round": (
        "F0@1 F0@0 BW0@1 BW0@0",
        "rank 0 has F0@1 before F0@0, which it needs",
    ),
    "gradients of one rank the wrong way round": (
        "F0@0 F0@1 BW0@0 BW0@1",
        "rank 0 has BW0@0 before BW0@1, which it needs",
    ),
    "two ranks in a circle": (
        "F0@0 BW0@0 F1@0 BW1@0\nF0@1 F1@1 BW0@1 BW1@1",
        "ranks waiting in a circle: rank 0 at BW0@0 for BW0@1, rank 1 at F1@1 for F1@0",
    ),
    "a circle that others wait for": (
        "F0@0 B0@0 W0@0 F1@0 BW1@0\nF0@1 BW0@1 F1@1 BW1@1\nF0@2 F1@2 BW0@2 BW1@2",
        "in a circle: rank 1 at BW0@1 for BW0@2, rank 2 at F1@2 for F1@1",
    ),
    "three ranks in a circle": (
        "F0@3 F0@0 BW0@3 BW0@0\nF0@1 F0@4 BW0@4 BW0@1\nF0@2 F0@5 BW0@5 BW0@2",
        "rank 0 at F0@3 for F0@2, rank 2 at F0@2 for F0@1, rank 1 at F0@1 for F0@0",
    ),
    "two micro-batches swapped on a V's lane": (
        "F0@0 F1@0 F0@3 F1@3 BW0@3 BW1@3 BW0@0 BW1@0\nF1@1 F0@1 F0@2 F1@2 BW0@2 BW1@2 BW0@1 BW1@1",
        "rank 1 needs micro-batch 1 for stage 1 when micro-batch 0 for stage 1 comes first: swapped on the lane of "
        "activations from rank 0 to rank 1",
    ),
    "gradients swapped on a V's lane": (
        "F0@0 F1@0 F0@3 F1@3 BW0@3 BW1@3 BW0@0 BW1@0\nF0@1 F1@1 F0@2 F1@2 BW1@2 BW0@2 BW0@1 BW1@1",
        "rank 1 needs micro-batch 1 for stage 2 when micro-batch 0 for stage 2 comes first: swapped on the lane of "
        "gradients from rank 0 to rank 1",
    ),
    "two stages swapped on a loop's lane": (
        "F0@0 F0@2 F1@0 F1@2 BW0@2 BW1@2 BW0@0 BW1@0\nF0@1 F1@1 F0@3 F1@3 BW0@3 BW1@3 BW0@1 BW1@1",
        "rank 1 needs micro-batch 1 for stage 1 when micro-batch 0 for stage 3 comes first",
    ),
}


@pytest.mark.parametrize("text, says", BROKEN.values(), ids=BROKEN)
def test_a_broken_schedule_is_refused_with_rank_action_and_reason(text, says):
    said = refusal(parse(text, name="mine"))
    assert said.startswith("schedule mine") and says in said


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (Schedule("x", (parse("F0@0 BW0@0").rows[0], ()), (0,)), "rank 1 has nothing to do"),
        (Schedule("x", parse("F0@0 BW0@0").rows, (1,)), "rank 1 should hold stage 0, and there are 1 ranks"),
        (Schedule("x", parse("F0@0 BW0@0\nF0@1 BW0@1").rows, (0, 0)), "rank 1 has F0@1, whose stage is rank 0's"),
        (Schedule("x", parse("F0@0 BW0@0").rows, (0, 0)), "rank 0 lacks F0@1"),
        (Schedule("x", parse("F0@0 BW0@0\nF0@1 BW0@1").rows, (0,)), "rank 1 has F0@1, and there are 1 stages"),
        (Schedule("x", ((Action("X", 0, 0),),), (0,)), "rank 0 has X0@0, which is no action"),
        (Schedule("x", ((Action("F", 0, -1),),), (0,)), "which is no action"),
        (
            Schedule("x", parse("F0@0 BW0@0 F1@0 BW1@0").rows, (0,), frozenset({Action("BW", 0, 0)})),
            "rank 0 pairs BW0@0 with F1@0",
        ),
        (
            Schedule("x", parse("F0@0 F1@0 BW0@0 BW1@0").rows, (0,), frozenset({Action("BW", 0, 0)})),
            "rank 0 pairs BW0@0 with BW1@0",
        ),
        (
            Schedule("x", parse("F0@0 F1@0 BW0@0 BW1@0").rows, (0,), frozenset({Action("F", 0, 0)})),
            "rank 0 pairs F0@0 with F1@0",
        ),
    ],
)
def test_a_schedule_made_by_hand_that_does_not_fit_itself_is_refused(schedule, says):
    assert says in refusal(schedule)


def test_a_promise_that_is_broken_is_refused_with_where():
    rows = parse("F0@0 F1@0 F2@0 BW0@0 BW1@0 BW2@0").rows
    check(Schedule("x", rows, (0,), peaks=(3,)))
    check(Schedule("x", rows, (0,), peaks=(4,)))
    said = refusal(Schedule("x", rows, (0,), peaks=(2,)))
    assert said == "schedule x: rank 0 holds 3 activations from F2@0 on, and promises at most 2"
    assert "promises peaks for 2 ranks, and has 1" in refusal(Schedule("x", rows, (0,), peaks=(3, 3)))


# The machine


def runs_without_names(schedule: Schedule) -> bool:
    """Runs rows on ranks whose lanes know only order: a rank takes what comes next on the lane, and finds out then.

    A lane hands over one message at a time, into the one receive that is posted ahead on it; a send stops nobody. What
    a rank needs of itself must be there. Whether all rows come to their end with the right messages.
    """
    queues: dict[tuple[int, int, str], deque[tuple[str, int, int]]] = {}
    posted: dict[tuple[int, int, str], tuple[str, int, int] | None] = {}
    have: list[set[tuple[str, int, int]]] = [set() for _ in schedule.rows]
    rows = [deque(row) for row in schedule.rows]
    last = schedule.stages - 1

    def fetch(rank: int, stage: int, source: int, what: tuple[str, int, int]) -> bool | None:
        """Whether the input is there: None, not yet; False, another came in its place."""
        holder = schedule.rank_of[source]
        if holder == rank:
            return True if what in have[rank] else None
        lane = (holder, rank, what[0])
        if posted.get(lane) is None and queues.get(lane):
            posted[lane] = queues[lane].popleft()
        came = posted.get(lane)
        if came is None:
            return None
        posted[lane] = None
        return came == what

    def send(rank: int, stage: int, what: tuple[str, int, int]) -> None:
        target = schedule.rank_of[stage]
        if target == rank:
            have[rank].add(what)
        else:
            queues.setdefault((rank, target, what[0]), deque()).append(what)

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while row:
                kind, stage, m = row[0]
                own = {"F": None, "B": ("held", stage, m), "BW": ("held", stage, m), "W": ("to do", stage, m)}[kind]
                if own is not None and own not in have[rank]:
                    break
                if kind == "F" and stage:
                    there = fetch(rank, stage, stage - 1, ("activation", stage, m))
                elif kind in ("B", "BW") and stage < last:
                    there = fetch(rank, stage, stage + 1, ("gradient", stage, m))
                else:
                    there = True
                if there is None:
                    break
                if there is False:
                    return False
                row.popleft()
                moved = True
                if kind == "F":
                    have[rank].add(("held", stage, m))
                    if stage < last:
                        send(rank, stage + 1, ("activation", stage + 1, m))
                elif kind != "W":
                    if kind == "B":
                        have[rank].add(("to do", stage, m))
                    if stage:
                        send(rank, stage - 1, ("gradient", stage - 1, m))
    return not any(rows)


def is_complete(schedule: Schedule) -> bool:
    """Each stage and micro-batch, up to the highest there is: F once, and BW once or B and W once each."""
    counts = Counter(action for row in schedule.rows for action in row)
    return all(
        tuple(counts[Action(kind, stage, m)] for kind in KINDS) in ((1, 1, 1, 0), (1, 0, 0, 1))
        for stage in range(schedule.stages)
        for m in range(schedule.microbatches)
    ) and len(counts) == sum(counts.values())


def good_schedules() -> Iterator[Schedule]:
    for text in GOOD:
        yield parse(text)
    for name in SCHEDULES:
        for ranks, microbatches in ((2, 3), (3, 3)):
            made = make(name, ranks=ranks, microbatches=microbatches)
            yield Schedule(name, made.rows, made.rank_of)  # without pairs and promises, which a change may break


@st.composite
def changed(draw: st.DrawFn) -> Schedule:
    """A good schedule after a few changes: two actions of a row swapped, one removed, doubled, moved or renamed."""
    schedule = draw(st.sampled_from(list(good_schedules())))
    rows = [list(row) for row in schedule.rows]
    for change in draw(st.lists(st.sampled_from(["swap", "next", "next", "remove", "double", "kind"]), max_size=3)):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        at, other = (draw(st.integers(0, len(row) - 1)) for _ in range(2))
        if change == "next":
            other = (at + 1) % len(row)
        if change in ("swap", "next"):
            row[at], row[other] = row[other], row[at]
        elif change == "remove" and len(row) > 1:
            del row[at]
        elif change == "double":
            row.insert(other, row[at])
        elif change == "kind":
            row[at] = row[at]._replace(kind=draw(st.sampled_from(KINDS)))
    return Schedule("changed", tuple(map(tuple, rows)), schedule.rank_of)


@settings(max_examples=400, deadline=None)
@given(changed())
def test_what_is_accepted_is_what_is_complete_and_runs_on_lanes_without_names(schedule):
    good = is_complete(schedule) and runs_without_names(schedule)
    try:
        check(schedule)
    except ValueError as error:
        assert not good, error
        assert "\n" not in str(error)
    else:
        assert good


@settings(deadline=None)
@given(changed())
def test_an_order_of_all_actions_keeps_every_rows_and_every_need(schedule):
    lowered = lower(schedule)
    try:
        order = in_order(lowered)
    except ValueError:
        return
    assert all([step for rank, step in order if rank == mine] == list(row) for mine, row in enumerate(lowered.rows))
    seen: set[Action] = set()
    for _, (action, reads, _) in order:
        if reads is not None:
            source = "F" if reads.lane.kind == "activation" else "B"
            stage = action.stage - 1 if source == "F" else action.stage + 1
            assert {Action(source, stage, action.microbatch), Action(source + "W", stage, action.microbatch)} & seen
        seen.add(action)

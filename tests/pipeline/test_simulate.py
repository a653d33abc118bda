"""Timelines by hand, against the longest path, and against published numbers; what is exact stays so."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.schedule import Action, Number, Schedule, parse
from megalite.pipeline.simulate import Costs, peaks, simulate

TWO = parse("F0@0 F1@0 BW0@0 BW1@0\nF0@1 BW0@1 F1@1 BW1@1")
V = parse("F0@0 F0@3 BW0@3 BW0@0\nF0@1 F0@2 BW0@2 BW0@1")


def times(schedule: Schedule, costs: Costs) -> dict[str, tuple[Number, Number]]:
    return {str(action): (start, end) for row in simulate(schedule, costs).rows for action, start, end in row}


def test_an_action_begins_when_its_rank_is_free_and_its_input_there():
    assert times(TWO, Costs(forward=2, input_gradient=1, weight_gradient=2)) == {
        "F0@0": (0, 2),
        "F1@0": (2, 4),
        "F0@1": (2, 4),
        "BW0@1": (4, 7),
        "F1@1": (7, 9),
        "BW1@1": (9, 12),
        "BW0@0": (7, 10),
        "BW1@0": (12, 15),
    }


def test_its_measures_by_hand():
    """Rank 0 works 10 of 15 from the first to the last; rank 1 works 10 of the 10 from 2 to 12."""
    timeline = simulate(TWO, Costs(forward=2, input_gradient=1, weight_gradient=2))
    assert timeline.makespan == 15
    assert [timeline.busy(rank) for rank in range(2)] == [10, 10]
    assert [timeline.span(rank) for rank in range(2)] == [15, 10]
    assert timeline.idle_span == 5
    assert timeline.bubble == Fraction(1, 3)
    assert timeline.bubble_span == Fraction(1, 3)
    busiest_late = simulate(parse("F0@0 BW0@0\nF0@1 BW0@1"), Costs(forward=3, stages={1: (1, 1, 0)}))
    assert (busiest_late.bubble_span, busiest_late.bubble) == (Fraction(2, 7), Fraction(1, 2))


def test_the_bubble_in_spans_is_that_of_the_rank_whose_own_span_has_the_largest_part():
    """Rank 0 stands still 4 of 20, from 8 to 12; rank 1 fewer, 2, of the 6 from 7 to 13."""
    timeline = simulate(TWO, Costs(4, 4, 0, stages={1: (1, 1, 0)}, latency=3))
    assert [timeline.span(rank) for rank in range(2)] == [20, 6]
    assert [timeline.idle(rank) for rank in range(2)] == [4, 2]
    assert timeline.idle_span == 4
    assert timeline.bubble_span == Fraction(1, 3)


def test_a_message_takes_its_latency_between_ranks_and_none_on_one():
    late = times(V, Costs(latency=5))
    assert late["F0@1"] == (6, 7) and late["F0@2"] == (7, 8)
    assert late["F0@3"] == (13, 14) and late["BW0@3"] == (14, 16)
    assert late["BW0@2"] == (21, 23) and late["BW0@1"] == (23, 25) and late["BW0@0"] == (30, 32)


def test_messages_of_one_lane_queue_for_its_bandwidth_and_those_of_two_do_not():
    """Three activations end at 1, 2 and 3; the lane takes 3 for each, so they are there at 4, 7 and 10."""
    rows = parse("F0@0 F1@0 F2@0 BW0@0 BW1@0 BW2@0\nF0@1 F1@1 F2@1 BW0@1 BW1@1 BW2@1")
    queued = times(rows, Costs(volume=6, bandwidth=2))
    assert [queued[f"F{m}@1"][0] for m in range(3)] == [4, 7, 10]
    assert [queued[f"BW{m}@1"][1] for m in range(3)] == [13, 15, 17]
    assert [queued[f"BW{m}@0"][0] for m in range(3)] == [16, 19, 22]
    later = times(rows, Costs(volume=6, bandwidth=2, latency=1))
    assert [later[f"F{m}@1"][0] for m in range(3)] == [5, 8, 11]  # latency delays each, and queues nothing


def test_stages_and_single_actions_may_cost_their_own():
    costs = Costs(stages={1: (2, 3, 4)}, of={Action("F", 1, 1): 10, Action("BW", 1, 1): 0})
    took = {word: end - start for word, (start, end) in times(TWO, costs).items()}
    assert (took["F0@0"], took["BW0@0"], took["F0@1"], took["BW0@1"]) == (1, 2, 2, 7)
    assert (took["F1@1"], took["BW1@1"]) == (10, 0)


def longest_path(schedule: Schedule, costs: Costs) -> dict[Action, Number]:
    """The end of each action by its definition, without bandwidth: its time after the latest of what it waits for."""
    before = {b: a for row in schedule.rows for a, b in zip([None, *row], row, strict=False)}
    ends: dict[Action, Number] = {}

    def end(action: Action) -> Number:
        if action not in ends:
            kind, stage, m = action
            ready = [end(before[action])] if before[action] else [0]
            neighbour = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and 0 <= neighbour < schedule.stages:
                names = ["F"] if kind == "F" else ["B", "BW"]
                source = next(found for name in names if (found := Action(name, neighbour, m)) in before)
                remote = schedule.rank_of[neighbour] != schedule.rank_of[stage]
                ready.append(end(source) + (costs.latency if remote else 0))
            ends[action] = max(ready) + costs(action)
        return ends[action]

    for action in before:
        end(action)
    return ends


fractions = st.fractions(0, 9, max_denominator=6)


@settings(deadline=None)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 6),
    usual=st.tuples(fractions, fractions, fractions),
    first=st.tuples(fractions, fractions, fractions),
    latency=fractions,
)
def test_every_end_is_the_longest_path_to_it(name, ranks, microbatches, usual, first, latency):
    schedule = make(name, ranks=ranks, microbatches=microbatches)
    costs = Costs(*usual, stages={0: first}, latency=latency)
    ends = {event.action: event.end for row in simulate(schedule, costs).rows for event in row}
    assert ends == longest_path(schedule, costs)


def test_exact_costs_give_exact_results_and_floats_floats():
    whole = simulate(TWO, Costs(3, 2, 1))
    assert isinstance(whole.makespan, int) and isinstance(whole.bubble, Fraction)
    third = simulate(make("zb_v", ranks=4, microbatches=8), Costs(*[Fraction(1, 3)] * 3, latency=Fraction(1, 7)))
    assert isinstance(third.makespan, Fraction) and isinstance(third.bubble_span, Fraction)
    floats = simulate(TWO, Costs(0.3, 0.2, 0.1))
    assert isinstance(floats.bubble, float)
    assert floats.bubble == pytest.approx(float(whole.bubble), rel=1e-12)  # rounding of a handful of sums


def test_no_time_at_all_has_no_bubble():
    still = simulate(TWO, Costs(0, 0, 0))
    assert (still.makespan, still.bubble, still.bubble_span, still.idle_span) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"forward": -1}, "forward=-1"),
        ({"latency": float("nan")}, "latency=nan"),
        ({"weight_gradient": float("inf")}, "weight_gradient=inf"),
        ({"bandwidth": 0}, "bandwidth=0"),
        ({"stages": {2: (1, -2, 1)}}, r"stages\[2\]\[1\]=-2"),
        ({"of": {Action("F", 0, 3): -1}}, r"of\[F3@0\]=-1"),
    ],
)
def test_a_cost_that_is_no_time_is_refused_by_name(wrong, names):
    with pytest.raises(ValueError, match=f"costs: {names} is no time"):
        Costs(**wrong)


def test_what_cannot_come_to_its_end_is_refused():
    with pytest.raises(ValueError, match="rank 0 at BW0@0 for BW0@1, rank 1 at F1@1 for F1@0"):
        simulate(parse("F0@0 BW0@0 F1@0 BW1@0\nF0@1 F1@1 BW0@1 BW1@1"))
    with pytest.raises(ValueError, match="rank 1 stops at F0@1, which waits for F0@0, which is in no row"):
        simulate(parse("F1@0\nF0@1"))


# Pairs


def test_a_pair_takes_less_only_where_the_costs_say_that_something_overlaps_it():
    schedule = make("dualpipe_v", ranks=2, microbatches=6)
    alone = Schedule("without pairs", schedule.rows, schedule.rank_of)
    assert schedule.paired
    assert simulate(schedule).rows == simulate(alone).rows
    half = Costs(overlap=Fraction(1, 2))
    assert simulate(alone, half).rows == simulate(alone).rows
    in_pairs = schedule.paired | {b for row in schedule.rows for a, b in pairwise(row) if a in schedule.paired}
    for row in simulate(schedule, half).rows:
        for action, start, end in row:
            assert end - start == half(action) * (Fraction(1, 2) if action in in_pairs else 1)
    assert simulate(schedule, half).makespan < simulate(schedule).makespan


def test_what_was_measured_of_a_pair_has_its_overlap_within_it():
    pair = parse("F0@0 F1@0&B0@0 W0@0 BW1@0")
    costs = Costs(overlap=Fraction(1, 2), of={Action("F", 0, 1): 3})
    took = {word: end - start for word, (start, end) in times(pair, costs).items()}
    assert took == {"F0@0": 1, "F1@0": 3, "B0@0": Fraction(1, 2), "W0@0": 1, "BW1@0": 2}


# Published numbers


def test_latency_alone_takes_the_idle_time_of_1f1b_from_9_to_25():
    schedule = make("1f1b", ranks=4, microbatches=8)
    assert simulate(schedule).idle_span == 9
    assert simulate(schedule, Costs(latency=1)).idle_span == 25


def test_naive_works_one_part_in_as_many_as_there_are_ranks():
    for ranks in (1, 2, 4):
        assert simulate(make("naive", ranks=ranks, microbatches=5)).bubble == 1 - Fraction(1, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_peaks_with_what_is_held_until_b_and_until_w_are_the_zero_bubble_papers(ranks):
    """Worker i from 1: ZB-H1 (p-i+1) M_B + (i-1) M_W, ZB-H2 (2p-2i+1) M_B + (2i-2) M_W (arXiv:2401.10241, table 2)."""
    m_b, m_w = 3, 2
    for name, each in (
        ("zb_h1", lambda i: (ranks - i + 1) * m_b + (i - 1) * m_w),
        ("zb_h2", lambda i: (2 * ranks - 2 * i + 1) * m_b + (2 * i - 2) * m_w),
    ):
        schedule = make(name, ranks=ranks, microbatches=4 * ranks)
        found = peaks(schedule, until_input_gradient=m_b, until_weight_gradient=m_w)
        assert found == [each(i) for i in range(1, ranks + 1)]


def test_a_peak_counts_a_stage_as_its_part_of_a_rank():
    assert peaks(parse("F0@0 F0@1 BW0@1 BW0@0")) == [1]
    assert peaks(parse("F0@0 F1@0 F0@1 BW0@1 BW0@0 F1@1 BW1@1 BW1@0")) == [Fraction(3, 2)]
    assert peaks(TWO, until_input_gradient=5) == [10, 5]


# Size


def test_a_large_schedule_takes_seconds_at_most():
    """100,000 actions; processor time, so that neighbours do not count. What is not O(actions) takes minutes."""
    schedule = make("interleaved_zb", ranks=32, microbatches=256, virtual_stages=4)
    assert sum(map(len, schedule.rows)) == 3 * 4 * 32 * 256
    start = time.process_time()
    assert simulate(schedule).makespan > 3 * 4 * 256
    assert time.process_time() - start < 15

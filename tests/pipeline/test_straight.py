"""One stage a rank: the orders by hand, the idle time and the activations as their formulas say, exactly."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megalite.pipeline.schedule import held_at_most
from megalite.pipeline.simulate import Costs, simulate
from megalite.pipeline.straight import eager_1f1b, gpipe, in_turns, naive, one_f_one_b, zb_h1, zb_h2

RANKS = [1, 2, 3, 4, 8]
COSTS = [
    (1, 1, 1),
    (3, 3, 2),
    (2, 3, 1),
    (4, 5, 4),
    (3, 2, 2),
    (5, 6, 5),
    (Fraction(1, 3), Fraction(2, 7), Fraction(1, 5)),
]
FULL_BACKWARD = [*COSTS, (1, 1, 4), (1, 2, 3)]  # laws of BW ask nothing of W


def idle(schedule, passes, **more) -> Fraction:
    return simulate(schedule, Costs(*passes, **more)).idle_span


def test_1f1b_by_hand():
    assert str(one_f_one_b(3, 4)) == (
        "F0@0 F1@0 F2@0 BW0@0 F3@0 BW1@0 BW2@0 BW3@0\n"
        "F0@1 F1@1 BW0@1 F2@1 BW1@1 F3@1 BW2@1 BW3@1\n"
        "F0@2 BW0@2 F1@2 BW1@2 F2@2 BW2@2 F3@2 BW3@2"
    )


def test_1f1b_with_fewer_microbatches_than_stages_runs_them_all_forward_first():
    assert str(one_f_one_b(3, 1)) == "F0@0 BW0@0\nF0@1 BW0@1\nF0@2 BW0@2"
    assert str(one_f_one_b(3, 2)).splitlines()[0] == "F0@0 F1@0 BW0@0 BW1@0"


@pytest.mark.parametrize("make", [naive, one_f_one_b, eager_1f1b])
def test_one_rank_takes_each_microbatch_there_and_back(make):
    assert str(make(1, 3)) == "F0@0 BW0@0 F1@0 BW1@0 F2@0 BW2@0"


def test_gpipe_and_naive_by_hand():
    assert str(gpipe(2, 2)) == "F0@0 F1@0 BW0@0 BW1@0\nF0@1 F1@1 BW0@1 BW1@1"
    assert str(naive(2, 2)) == "F0@0 BW0@0 F1@0 BW1@0\nF0@1 BW0@1 F1@1 BW1@1"


def test_zb_h1_leaves_rank_r_r_weight_gradients_behind():
    assert str(zb_h1(2, 3)) == (
        "F0@0 F1@0 B0@0 W0@0 F2@0 B1@0 W1@0 B2@0 W2@0\nF0@1 B0@1 F1@1 B1@1 W0@1 F2@1 B2@1 W1@1 W2@1"
    )


@pytest.mark.parametrize("passes", FULL_BACKWARD)
@pytest.mark.parametrize("ranks", RANKS)
def test_whole_backwards_leave_every_rank_idle_for_the_ranks_beside_it(ranks, passes):
    """(p-1)(F+B+W), with any number of micro-batches; naive, as often as there are any."""
    for microbatches in {1, ranks - 1 or 1, ranks, 2 * ranks, 3 * ranks + 2}:
        for make in (gpipe, one_f_one_b, eager_1f1b):
            assert idle(make(ranks, microbatches), passes) == (ranks - 1) * sum(passes)
        assert idle(naive(ranks, microbatches), passes) == (ranks - 1) * microbatches * sum(passes)


@pytest.mark.parametrize("passes", COSTS)
@pytest.mark.parametrize("ranks", RANKS)
def test_zero_bubble_schedules_leave_what_their_formulas_say(ranks, passes):
    """W <= F and 2W <= F+B in all of COSTS."""
    forward, backward, weight = passes
    for microbatches in (ranks, ranks + 1, 2 * ranks, 3 * ranks + 2):
        assert idle(zb_h1(ranks, microbatches), passes) == (ranks - 1) * (forward + backward - weight)
    for microbatches in (2 * ranks - 1, 2 * ranks, 3 * ranks + 2):
        assert idle(zb_h2(ranks, microbatches), passes) == (ranks - 1) * (forward + backward - 2 * weight)


def test_their_conditions_are_needed():
    """One micro-batch too few, or a W too long."""
    assert idle(zb_h1(4, 3), (1, 1, 1)) > 3
    assert idle(zb_h1(4, 8), (1, 2, 2)) > 3 * (1 + 2 - 2)
    assert idle(zb_h2(4, 6), (1, 1, 1)) > 0
    assert idle(zb_h2(4, 8), (1, 3, 2)) > 3 * (1 + 3 - 4)
    assert idle(zb_h2(4, 8), (3, 1, 3)) > 3 * (3 + 1 - 6)


@pytest.mark.parametrize("ranks", RANKS)
def test_every_rank_holds_what_its_schedule_says(ranks):
    for microbatches in range(1, 3 * ranks + 3):
        for make, held in (
            (naive, lambda r: 1),
            (gpipe, lambda r, all=microbatches: all),
            (one_f_one_b, lambda r: ranks - r),
            (eager_1f1b, lambda r: 2 * (ranks - r) - 1),
            (zb_h1, lambda r: ranks),
            (zb_h2, lambda r: 2 * ranks - 1),
        ):
            schedule = make(ranks, microbatches)
            expected = tuple(min(microbatches, held(rank)) for rank in range(ranks))
            assert schedule.peaks == tuple(map(held_at_most, schedule.rows)) == expected, schedule.name


@pytest.mark.parametrize("latency", [Fraction(1, 10), Fraction(1, 2), 1, 2])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_eager_1f1b_waits_for_no_message_but_the_first_and_the_last_ones(ranks, latency):
    """The way there and back is paid once: 2 (p-1) T, for T up to (F+B+W) / 2 whatever m, where 1F1B pays again and
    again."""
    for microbatches in (2 * ranks, 4 * ranks):
        passes = (1, 1, 2)
        eager = idle(eager_1f1b(ranks, microbatches), passes, latency=latency)
        assert eager == (ranks - 1) * (sum(passes) + 2 * latency)
        assert idle(one_f_one_b(ranks, microbatches), passes, latency=latency) > eager
    slower = [idle(one_f_one_b(ranks, m), passes, latency=latency) for m in (2 * ranks, 4 * ranks)]
    assert slower[0] < slower[1]


@pytest.mark.parametrize("warm_up", [1, 2, 5, 9])
@pytest.mark.parametrize("lag", [None, 0, 1, 3, 9])
def test_turns_hold_warm_up_and_lag_together_at_most(warm_up, lag):
    passes = [(0, microbatch) for microbatch in range(6)]
    row = in_turns(passes, passes, warm_up=warm_up, lag=lag)
    assert len(row) == len(set(row)) == len(passes) * (2 if lag is None else 3)
    assert held_at_most(row) == min(len(passes), warm_up + (lag or 0))

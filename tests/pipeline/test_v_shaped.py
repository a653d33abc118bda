"""Two stages a rank in a V: orders by hand, idle time and activations as their formulas say, exactly."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise, product

import pytest

from megalite.pipeline.schedule import held_at_most
from megalite.pipeline.simulate import Costs, peaks, simulate
from megalite.pipeline.v_shaped import dualpipe_v, v_half, v_min, zb_v

RANKS = range(1, 9)


def growth(make, ranks: int, costs: Costs) -> Fraction:
    """What twice the micro-batches add to the idle time."""
    return simulate(make(ranks, 20), costs).idle_span - simulate(make(ranks, 10), costs).idle_span


def test_zb_v_by_hand():
    assert str(zb_v(2, 3)) == (
        "F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 B1@3 W1@3 B0@0 W0@0 F2@3 B2@3 W2@3 B1@0 W1@0 B2@0 W2@0\n"
        "F0@1 F0@2 F1@1 F1@2 B0@2 W0@2 F2@1 B0@1 W0@1 F2@2 B1@2 W1@2 B1@1 B2@2 B2@1 W1@1 W2@2 W2@1"
    )


def test_dualpipe_v_by_hand():
    assert str(dualpipe_v(2, 4)) == (
        "F0@0 F1@0 F2@0 F0@3 B0@3 W0@3 F1@3 F3@0&BW1@3 F2@3&BW0@0 BW2@3 F3@3&BW1@0 BW3@3 B2@0 W2@0 B3@0 W3@0\n"
        "F0@1 F0@2 F1@1 F1@2 F2@1 BW0@2 F2@2&BW0@1 F3@1&BW1@2 F3@2&BW1@1 BW2@2 BW2@1 B3@2 B3@1 W3@2 W3@1"
    )


def test_v_min_by_hand():
    assert str(v_min(1, 2)) == "F0@0 F0@1 B0@1 B0@0 W0@1 W0@0 F1@0 F1@1 B1@1 B1@0 W1@1 W1@0"


@pytest.mark.parametrize("ranks", RANKS)
def test_the_rank_with_most_holds_what_its_schedule_says(ranks):
    """In whole-stage micro-batches, from its F to its W; as many micro-batches as that reach it."""
    for microbatches in range(1, 3 * ranks + 3):
        for make, most in (
            (zb_v, ranks),
            (dualpipe_v, Fraction(2 * ranks + 1, 2)),
            (v_half, (ranks + 2) // 2),
            (v_min, (ranks + 4) // 3),
        ):
            schedule = make(ranks, microbatches)
            assert max(peaks(schedule)) == min(microbatches, most), schedule.name
            assert schedule.peaks == tuple(map(held_at_most, schedule.rows))


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v_and_dualpipe_v_hold_the_same_on_every_rank(ranks):
    for microbatches in range(2 * ranks, 3 * ranks + 3):
        assert zb_v(ranks, microbatches - 1).peaks == (2 * ranks,) * ranks
        assert dualpipe_v(ranks, microbatches).peaks == (2 * ranks + 1,) * ranks


@pytest.mark.parametrize("ranks", RANKS)
def test_zb_v_has_no_bubble_where_its_passes_are_equal(ranks):
    for microbatches in range(2 * ranks - 1, 3 * ranks + 3):
        timeline = simulate(zb_v(ranks, microbatches))
        assert timeline.idle_span == timeline.bubble_span == 0
    if ranks > 1:
        assert simulate(zb_v(ranks, 2 * ranks - 2)).idle_span > 0


@pytest.mark.parametrize("passes", [(1, 1, 1), (3, 3, 2), (2, 3, 1), (4, 5, 4), (5, 4, 4), (3, 2, 1), (4, 4, 1)])
def test_idle_time_where_passes_differ(passes):
    """zb_v: 2 (p-1)(B-W) where W <= F <= B; dualpipe_v: (p-1)(F+B-W) where W <= B <= F <= B+W."""
    forward, backward, weight = passes
    for ranks, more in product((1, 2, 3, 5, 8), (0, 3)):
        if weight <= forward <= backward:
            schedule = zb_v(ranks, 2 * ranks - 1 + more)
            assert simulate(schedule, Costs(*passes)).idle_span == 2 * (ranks - 1) * (backward - weight)
        if weight <= backward <= forward <= backward + weight:
            schedule = dualpipe_v(ranks, 2 * ranks + more)
            assert simulate(schedule, Costs(*passes)).idle_span == (ranks - 1) * (forward + backward - weight)


@pytest.mark.parametrize("ranks", RANKS)
def test_v_half_and_v_min_have_about_half_and_two_thirds_of_the_bubble_of_1f1b(ranks):
    """Of its 6 (p-1), in passes of one stage."""
    for microbatches in (ranks, ranks + 1, 3 * ranks + 2):
        assert simulate(v_half(ranks, microbatches)).idle_span == 3 * (ranks - 1) - (ranks > 1 and ranks % 2)
    for microbatches in (2, ranks + 1, 3 * ranks + 2):
        beyond = 1 if ranks % 3 == 0 else -1 if ranks > 1 else 0
        assert simulate(v_min(ranks, microbatches)).idle_span == 4 * (ranks - 1) + beyond


@pytest.mark.parametrize("ranks", [4, 5])
def test_the_bubble_of_v_half_grows_with_the_microbatches_just_where_its_paper_says(ranks):
    for forward, backward, weight in product(range(1, 4), repeat=3):
        kept = weight + 2 * backward >= 2 * forward and weight + 2 * forward >= 2 * backward
        grown = growth(v_half, ranks, Costs(forward, backward, weight))
        assert (grown == 0) == kept and grown >= 0, (forward, backward, weight)


@pytest.mark.parametrize("ranks", [4, 6])
def test_that_of_v_min_grows_unless_w_is_long(ranks):
    assert growth(v_min, ranks, Costs(1, 1, 1)) == growth(v_min, ranks, Costs(2, 3, 4)) == 0
    assert growth(v_min, ranks, Costs(2, 2, 1)) > 0 and growth(v_min, ranks, Costs(2, 3, 3)) > 0


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_fewer_microbatches_than_zb_v_is_shaped_for_fill_its_gaps(ranks):
    """Each one less than 2p - 1 leaves a rank idle for one pass more, down to m = p."""
    idle = [simulate(zb_v(ranks, microbatches)).idle_span for microbatches in range(ranks, 2 * ranks)]
    assert idle == list(reversed(range(ranks)))


@pytest.mark.parametrize("ranks", RANKS)
def test_pairs_are_a_forward_and_the_whole_backward_of_an_earlier_microbatch(ranks):
    for microbatches in (1, ranks, 2 * ranks, 3 * ranks + 1):
        schedule = dualpipe_v(ranks, microbatches)
        for row in schedule.rows:
            for action, following in pairwise(row):
                if action in schedule.paired:
                    assert (action.kind, following.kind) == ("F", "BW")
                    assert following.microbatch < action.microbatch or following.stage > action.stage
                    assert following.stage != action.stage
        assert schedule.paired <= {action for row in schedule.rows for action in row}

"""Several stages a rank, dealt around: orders by hand, idle time and activations as their formulas say, exactly."""

from __future__ import annotations

import pytest

from megalite.pipeline.looped import bfs, groups_of, interleaved, interleaved_zb
from megalite.pipeline.schedule import held_at_most
from megalite.pipeline.simulate import Costs, simulate
from megalite.pipeline.straight import gpipe, one_f_one_b, zb_h1

COSTS = [(1, 1, 1), (2, 3, 1), (4, 5, 4)]  # W <= F in all
GRID = [(ranks, stages) for ranks in (1, 2, 3, 5) for stages in (1, 2, 3)] + [(8, 2), (2, 5)]


def groups_at(ranks: int) -> tuple[int | None, ...]:
    return (None, ranks + 1, 2 * ranks)


def test_interleaved_by_hand():
    assert str(interleaved(2, 2, 2)) == (
        "F0@0 F1@0 F0@2 F1@2 BW0@2 BW1@2 BW0@0 BW1@0\nF0@1 F1@1 F0@3 BW0@3 F1@3 BW1@3 BW0@1 BW1@1"
    )


def test_bfs_takes_all_through_a_stage_before_the_next():
    assert str(bfs(2, 3, 2)).splitlines()[0] == "F0@0 F1@0 F2@0 F0@2 F1@2 F2@2 BW0@2 BW1@2 BW2@2 BW0@0 BW1@0 BW2@0"


@pytest.mark.parametrize("group", range(1, 7))
def test_groups_have_every_microbatch_once_and_differ_by_one(group):
    for microbatches in range(1, 40):
        groups = groups_of(microbatches, group)
        assert [each for some in groups for each in some] == list(range(microbatches))
        sizes = list(map(len, groups))
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert sizes[-1] >= min(group, microbatches)
        assert len(groups) == max(1, microbatches // group)  # as many as there can be of that size


def test_groups_that_divide_are_all_of_that_size():
    assert set(map(len, groups_of(24, 4))) == {4}
    assert list(map(len, groups_of(10, 4))) == [5, 5]
    assert list(map(len, groups_of(11, 4))) == [6, 5]
    assert list(map(len, groups_of(7, 4))) == [7]


@pytest.mark.parametrize("passes", COSTS)
@pytest.mark.parametrize(("ranks", "stages"), GRID)
def test_more_stages_divide_the_bubble_whatever_the_groups(ranks, stages, passes):
    """(p-1)(F+B+W) of one stage, which is a v-th of a rank's; (p-1)(F+B-W) where W waits. Any m >= p, any group."""
    forward, backward, weight = passes
    costs = Costs(*passes)
    for microbatches in {ranks, ranks + 1, 2 * ranks + 3}:
        assert simulate(bfs(ranks, microbatches, stages), costs).idle_span == (ranks - 1) * sum(passes)
        for group in groups_at(ranks):
            whole = simulate(interleaved(ranks, microbatches, stages, group), costs)
            split = simulate(interleaved_zb(ranks, microbatches, stages, group), costs)
            assert whole.idle_span == (ranks - 1) * sum(passes)
            assert split.idle_span == (ranks - 1) * (forward + backward - weight)


@pytest.mark.parametrize("make", [interleaved, bfs, interleaved_zb])
def test_fewer_microbatches_than_ranks_leave_stages_idle(make):
    assert simulate(make(4, 3, 2)).idle_span > simulate(make(4, 4, 2)).idle_span


@pytest.mark.parametrize(("ranks", "stages"), GRID)
def test_every_rank_holds_what_its_schedule_says(ranks, stages):
    for microbatches in range(1, 3 * ranks + 3):
        total = microbatches * stages
        assert bfs(ranks, microbatches, stages).peaks == (total,) * ranks
        for group in groups_at(ranks):
            first = len(groups_of(microbatches, group or ranks)[0])
            whole = interleaved(ranks, microbatches, stages, group)
            split = interleaved_zb(ranks, microbatches, stages, group)
            ahead = (stages - 1) * first
            assert whole.peaks == tuple(min(total, ahead + 2 * (ranks - r) - 1) for r in range(ranks))
            assert split.peaks == (min(total, ahead + ranks),) * ranks
            for schedule in (whole, split, bfs(ranks, microbatches, stages)):
                assert schedule.peaks == tuple(map(held_at_most, schedule.rows))


def test_uneven_groups_cost_activations_and_no_time():
    """Ten micro-batches over four ranks go in fives: idle as twelve in fours are, and one more held."""
    even, uneven = interleaved(4, 12, 2), interleaved(4, 10, 2)
    assert simulate(even).idle_span == simulate(uneven).idle_span
    assert (even.peaks[0], uneven.peaks[0]) == (11, 12)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_of_one_stage_they_are_the_straight_ones(ranks):
    for microbatches in (1, 3, 8):
        assert bfs(ranks, microbatches, 1).rows == gpipe(ranks, microbatches).rows
        assert interleaved_zb(ranks, microbatches, 1).rows == zb_h1(ranks, microbatches).rows
        looped, straight = interleaved(ranks, microbatches, 1), one_f_one_b(ranks, microbatches)
        assert simulate(looped).makespan == simulate(straight).makespan

"""Every schedule by name, on every grid: complete, ending, within exactly what it promises; refusals by name."""

from __future__ import annotations

import pytest

from megalite.pipeline.catalogue import LOOPED, SCHEDULES, make
from megalite.pipeline.lower import check
from megalite.pipeline.schedule import held_at_most
from megalite.pipeline.simulate import simulate

LOOPED_NAMES = [name for name, entry in SCHEDULES.items() if entry.family is LOOPED]
GROUPED = [name for name, entry in SCHEDULES.items() if entry.grouped]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", range(1, 9))
def test_any_number_of_microbatches_is_done_once_and_ends_within_exactly_the_promise(name, ranks):
    """`check` proves each pass there once, in order, nothing swapped, no circle of ranks that wait."""
    for microbatches in range(1, 3 * ranks + 3):
        schedule = make(name, ranks=ranks, microbatches=microbatches)
        check(schedule)
        assert (schedule.name, schedule.ranks, schedule.microbatches) == (name, ranks, microbatches)
        assert schedule.peaks == tuple(map(held_at_most, schedule.rows))
        passes = 3 if SCHEDULES[name].splits_backward else 2
        if name != "dualpipe_v":  # which has both
            assert {len(row) for row in schedule.rows} == {passes * microbatches * schedule.stages_per_rank}


@pytest.mark.parametrize("name", LOOPED_NAMES)
@pytest.mark.parametrize("virtual_stages", [2, 3, 4, 5])
def test_so_it_is_with_any_number_of_virtual_stages_and_any_group(name, virtual_stages):
    for ranks in (1, 2, 3, 4):
        for group in (None, ranks, ranks + 1, 3 * ranks) if name in GROUPED else (None,):
            for microbatches in range(1, 2 * ranks + 3):
                schedule = make(
                    name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages, group=group
                )
                check(schedule)
                assert schedule.stages_per_rank == virtual_stages
                assert schedule.peaks == tuple(map(held_at_most, schedule.rows))


@pytest.mark.parametrize("name", SCHEDULES)
def test_what_the_catalogue_says_of_a_schedule_is_so(name):
    entry = SCHEDULES[name]
    for ranks in (1, 2, 4):
        schedule = make(name, ranks=ranks, microbatches=9)
        assert schedule.rank_of == entry.placement(ranks)
        assert schedule.splits_backward == entry.splits_backward
        assert schedule.stages_per_rank == entry.family.least
        assert bool(schedule.paired) == (name == "dualpipe_v")
    assert entry.about and "\n" not in entry.about


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "naive"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_from_whole_from_on_more_microbatches_make_no_rank_wait_more(name, ranks):
    first = SCHEDULES[name].whole_from(ranks)
    idle = [simulate(make(name, ranks=ranks, microbatches=first + more)).idle_span for more in range(ranks + 3)]
    assert len(set(idle)) == 1


@pytest.mark.parametrize("name", ["interleaved", "bfs", "zb_h1", "zb_h2", "interleaved_zb", "zb_v", "dualpipe_v"])
def test_and_with_one_fewer_one_waits_longer(name):
    for ranks in (2, 3, 4, 6):
        first = SCHEDULES[name].whole_from(ranks)
        fewer, enough = (simulate(make(name, ranks=ranks, microbatches=m)).idle_span for m in (first - 1, first))
        assert fewer > enough


def test_straight_ones_hold_all_of_it_from_there():
    for name, most in (("zb_h1", lambda p: p), ("zb_h2", lambda p: 2 * p - 1)):
        for ranks in (1, 2, 4):
            first = SCHEDULES[name].whole_from(ranks)
            assert make(name, ranks=ranks, microbatches=first).peaks == (most(ranks),) * ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_pipeline_of_one_rank_never_waits(name):
    for microbatches in (1, 2, 5):
        assert simulate(make(name, ranks=1, microbatches=microbatches)).bubble == 0


# Refusals


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"name": "zbv"}, "pipeline.schedule=zbv is none of ours, and no file; take one of naive, gpipe, 1f1b, "),
        ({"ranks": 0}, "layout.pp=0: a pipeline has at least 1 rank"),
        (
            {"microbatches": 0},
            "pipeline.schedule=1f1b has 0 micro-batches a step; it runs from 1, and they are "
            "global_batch_size / (layout.dp x micro_batch_size)",
        ),
        ({"virtual_stages": 2}, "pipeline.virtual_stages=2 does not fit pipeline.schedule=1f1b: take 1, or null"),
        (
            {"name": "zb_v", "virtual_stages": 1},
            "pipeline.virtual_stages=1 does not fit pipeline.schedule=zb_v: take 2",
        ),
        (
            {"name": "zb_v", "virtual_stages": 4},
            "pipeline.virtual_stages=4 does not fit pipeline.schedule=zb_v: take 2",
        ),
        (
            {"name": "interleaved", "virtual_stages": 1},
            "pipeline.virtual_stages=1 does not fit pipeline.schedule=interleaved: take 2 or more; "
            "with one stage a rank it is 1f1b",
        ),
        ({"name": "bfs", "virtual_stages": 1}, "take 2 or more; with one stage a rank it is gpipe"),
        ({"name": "interleaved_zb", "virtual_stages": 1}, "take 2 or more; with one stage a rank it is zb_h1"),
        ({"name": "interleaved", "virtual_stages": 0}, "take 2 or more"),
        (
            {"name": "interleaved", "group": 3},
            "pipeline.group=3 with layout.pp=4: a shorter group than ranks starves the last; take 4 or more, or null",
        ),
        (
            {"group": 4},
            "pipeline.group=4 does not fit pipeline.schedule=1f1b, which has none: interleaved, interleaved_zb have",
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key_and_the_way_out(wrong, says):
    asked = {"name": "1f1b", "ranks": 4, "microbatches": 8} | wrong
    with pytest.raises(ValueError) as refused:
        make(asked.pop("name"), **asked)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_more_passes_than_can_be_written_out_are_refused_before_any_is():
    for ranks, microbatches in ((1, 10**6), (10**9, 1), (1024, 1024)):
        with pytest.raises(ValueError, match="more passes than 262144; take a larger micro_batch_size"):
            make("1f1b", ranks=ranks, microbatches=microbatches)

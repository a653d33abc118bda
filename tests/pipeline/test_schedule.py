"""A schedule is written as it is read, and what is none is refused with its line."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.pipeline.schedule import (
    KINDS,
    Action,
    Schedule,
    held_at_most,
    in_a_v,
    in_line,
    in_loops,
    parse,
)

TWO_RANKS = "F0@0 F1@0 BW0@0 BW1@0\nF0@1&B0@1 W0@1 F1@1 BW1@1"


def test_a_word_names_the_kind_the_microbatch_and_the_stage():
    assert Action.parse("F3@1") == Action("F", stage=1, microbatch=3)
    assert Action.parse("BW12@10") == Action("BW", stage=10, microbatch=12)


@given(st.builds(Action, st.sampled_from(KINDS), st.integers(0, 10**6), st.integers(0, 10**6)))
def test_an_action_prints_as_it_is_read(action):
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize("word", ["", "F", "F3", "F3@", "@1", "f3@1", "WB3@1", "F-1@0", "F3@1x", " F3@1", "F3@1&"])
def test_any_other_word_is_none(word):
    with pytest.raises(ValueError, match="is no action; write F3@1"):
        Action.parse(word)


def test_rows_pairs_and_placement_are_read():
    schedule = parse(TWO_RANKS, name="mine")
    assert schedule.name == "mine"
    assert [list(map(str, row)) for row in schedule.rows] == [
        ["F0@0", "F1@0", "BW0@0", "BW1@0"],
        ["F0@1", "B0@1", "W0@1", "F1@1", "BW1@1"],
    ]
    assert schedule.rank_of == (0, 1) and schedule.paired == {Action.parse("F0@1")}
    assert (schedule.ranks, schedule.stages, schedule.microbatches, schedule.stages_per_rank) == (2, 2, 2, 1)
    assert schedule.splits_backward and not parse("F0@0 BW0@0").splits_backward


def test_what_is_read_prints_back_the_same_with_blanks_and_with_commas():
    assert str(parse(TWO_RANKS)) == TWO_RANKS
    assert parse(TWO_RANKS).to_csv() == TWO_RANKS.replace(" ", ",")
    assert parse(parse(TWO_RANKS).to_csv()) == parse(TWO_RANKS)


def test_remarks_blank_lines_and_mixed_separators_say_nothing():
    text = "# mine\n\n F0@0,  F1@0 ,BW0@0\tBW1@0 # the first\n\nF0@1&B0@1 W0@1,F1@1 BW1@1,\n"
    assert parse(text) == parse(TWO_RANKS)


@given(st.data())
def test_any_rows_print_as_they_are_read(data):
    """Rows of one stage each, any actions in any order, pairs wherever a forward stands before a backward."""
    ranks = data.draw(st.integers(1, 4))
    rows = [
        tuple(
            Action(kind, rank, microbatch)
            for kind, microbatch in data.draw(
                st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=1)
            )
        )
        for rank in range(ranks)
    ]
    firsts = {
        first
        for row in rows
        for first, second in pairwise(row)
        if first.kind == "F" and second.kind in ("B", "BW") and row.count(first) == 1
    }
    paired = frozenset(data.draw(st.sets(st.sampled_from(sorted(firsts)))) if firsts else ())
    schedule = Schedule("custom", tuple(rows), in_line(ranks), paired)
    assert parse(str(schedule)) == schedule
    assert parse(schedule.to_csv()) == schedule


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the schedule is empty; write one line"),
        ("# nothing\n\n", "the schedule is empty"),
        ("F0@0\nF0@1 X1@1", "line 2: 'X1@1' is no action"),
        ("F0@0&W0@0", "line 1: 'F0@0&W0@0' is no pair"),
        ("B0@0&F0@0", "is no pair"),
        ("F0@0&F1@0", "is no pair"),
        ("F0@0&B0@0&W0@0", "is no pair"),
        ("F0@0 BW0@0\nF1@0", "rank 1 has F1@0, and stage 0 is rank 0's"),
        ("F0@0\nF0@2", "no rank has stage 1, and there is a stage 2"),
    ],
)
def test_what_is_no_schedule_is_refused_in_one_line(text, says):
    with pytest.raises(ValueError) as refused:
        parse(text)
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_placements():
    assert in_line(3) == (0, 1, 2)
    assert in_loops(3, 2) == (0, 1, 2, 0, 1, 2)
    assert in_a_v(3) == (0, 1, 2, 2, 1, 0)
    looped = Schedule("", ((),) * 3, in_loops(3, 2))
    assert [looped.stages_of(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("row", "most"),
    [
        ("F0@0 BW0@0 F1@0 BW1@0", 1),
        ("F0@0 F1@0 BW0@0 BW1@0", 2),
        ("F0@0 B0@0 F1@0 W0@0 B1@0 W1@0", 2),  # B lets nothing go: W still reads it
        ("F0@0 F0@1 BW0@1 BW0@0", 2),
    ],
)
def test_an_activation_is_held_from_its_forward_to_its_last_backward(row, most):
    assert held_at_most(parse(row).rows[0]) == most

"""Every byte has one kind, which follows from its place, its birth and its death."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch._C._profiler import _EventType

from megalite.train.memory_plot import MOST_POINTS, shown_rows
from megalite.train.memory_timeline import KINDS, Change, Held, Mark, Range, Timeline, read_tree, timeline

# A step of one micro-batch, on a clock of whole numbers.
RANGES = [Range("step 1", 0, 100), Range("F0", 10, 40), Range("BW0", 50, 80)]


def levels(changes: list[tuple[int, int, int]], **known) -> dict[str, list[int]]:
    """Kind -> its bytes before the first change and after each; kinds of which nothing was held are left out."""
    known = {"marks": (), "before": {}} | known
    found = timeline([Change(*change) for change in changes], device="cpu", ranges=RANGES, **known)
    return {kind: column.tolist() for kind, column in zip(KINDS, found.bytes.T, strict=True) if column.any()}


@pytest.mark.parametrize(
    ("birth", "death", "kind"),
    [
        (15, 20, "temporaries"),
        (15, 60, "activations"),
        (15, 45, "activations"),
        (15, None, "activations"),
        (55, 60, "temporaries"),
        (55, 90, "other"),
        (5, 60, "other"),
        (5, 8, "temporaries"),
        (85, 95, "temporaries"),
        (85, None, "other"),
    ],
)
def test_what_no_mark_names_is_told_by_the_action_of_its_birth_and_of_its_death(birth, death, kind):
    changes = [(birth, 7, 64)] + ([(death, 7, -64)] if death else [])
    assert levels(changes) == {kind: [0, 64, 0][: len(changes) + 1]}


def test_a_mark_names_the_allocation_that_is_at_the_place_at_its_time_from_birth_to_death():
    changes = [(15, 7, 64), (20, 7, -64), (55, 7, 32), (60, 7, -32), (62, 7, 8), (64, 7, -8)]
    assert levels(changes, marks=[Mark(58, 7, "gradients")]) == {
        "temporaries": [0, 64, 0, 0, 0, 8, 0],
        "gradients": [0, 0, 0, 32, 0, 0, 0],
    }
    assert levels([(90, 7, 64)], marks=[Mark(100, 7, "optimizer")]) == {"optimizer": [0, 64]}


def test_what_was_held_before_is_in_the_first_row():
    before = {1: Held("parameters", 100), 2: Held("gradients", 50)}
    changes = [(15, 7, 8), (20, 9, -30), (30, 1, -100)]  # 9 was never seen to be allocated
    assert levels(changes, before=before) == {
        "parameters": [100, 100, 100, 0],
        "gradients": [50, 50, 50, 50],
        "activations": [0, 8, 8, 8],
        "other": [30, 30, 0, 0],
    }
    assert levels(changes, before=before, before_bytes=200)["other"] == [50, 50, 20, 20]


def test_a_place_that_is_given_out_again_has_been_freed_even_where_nobody_saw_it():
    assert levels([(15, 7, 64), (55, 7, 16)]) == {"activations": [0, 64, 0], "other": [0, 0, 16]}


def test_a_recording_without_a_change_has_one_row():
    assert levels([], before={1: Held("parameters", 100)}) == {"parameters": [100]}


def test_the_peak_and_the_levels_of_each_step_are_told_with_step_and_action():
    held = np.zeros((4, len(KINDS)), dtype=np.int64)
    held[:, 3] = [0, 5, 9, 2]
    ranges = [("step 1", 0.0, 10.0), ("F0", 1.0, 4.0), ("step 2", 11.0, 20.0), ("BW0", 12.0, 18.0)]
    found = Timeline("cpu", np.array([0.0, 3.0, 15.0, 19.0]), held, ranges)
    assert (found.peak()["in"], found.peak()["total"]) == (["step 2", "BW0"], 9)
    totals = {name: [at["total"] for at in step.values()] for name, step in found.steps().items()}
    assert totals == {"step 1": [0, 5, 5], "step 2": [5, 9, 2]}
    assert [found.steps()["step 2"][at]["in"][0] for at in ("begin", "peak", "end")] == ["step 2"] * 3


def test_only_the_device_in_question_and_the_names_asked_for_are_read_in_order_of_time():
    def node(name: str, start: int, end: int, *children, allocation=None):
        kind = _EventType.Allocation if allocation else _EventType.TorchOp
        return SimpleNamespace(
            name=name, start_time_ns=start, end_time_ns=end, children=children, typed=(kind, allocation)
        )

    def allocation(time: int, nbytes: int, device: str = "cpu"):
        fields = SimpleNamespace(ptr=7, alloc_size=nbytes, device=torch.device(device))
        return node("[memory]", time, time, allocation=fields)

    inner = node("aten::mm", 12, 20, allocation(15, 64), allocation(15, -64), allocation(16, 3, "meta"))
    tree = [node("F0", 10, 40, inner), allocation(5, 1)]
    changes, ranges = read_tree(tree, device=torch.device("cpu"), names={"F0"})
    assert changes == [Change(5, 7, 1), Change(15, 7, 64), Change(15, 7, -64)]
    assert ranges == [Range("F0", 10, 40)]


@pytest.mark.parametrize("rows", [1, 2, MOST_POINTS, 3 * MOST_POINTS + 1])
def test_a_picture_of_many_rows_keeps_both_ends_and_the_peak(rows):
    totals = np.random.default_rng(0).integers(0, 10**6, rows)
    shown = shown_rows(totals)
    assert {0, rows - 1, int(totals.argmax())} <= set(shown.tolist()) and len(shown) <= MOST_POINTS + 2

"""The law over pipeline stages: every schedule trains as one process does, with whatever else cuts the model.

Rows are laid down as a skeleton, every schedule on every layout and every kind of schedule on every stage of ZeRO;
models, micro-batches (fewer than stages among them), recomputation and uneven splits are then dealt to them so that
every pair of values stands in a row (a few of them with every kind of schedule). Six layers: neither
4 nor 8 stages divide them, and the embedding or the head may be a stage alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import combinations, product
from typing import Any

import pytest

from megalite.layers.recompute import Recompute
from megalite.mesh import Layout
from megalite.pipeline.catalogue import SCHEDULES
from tests.layouts import BATCH, MODELS, PLAIN, UNSHARDED, Row, Sharded, Stages, assert_law

LAYERS = 6
DEEP = {name: f"deep {name}" for name in ("gpt2", "qwen2", "olmo2")}  # the first two's weights are tied
MODELS.update({deep: replace(MODELS[name], num_hidden_layers=LAYERS) for name, deep in DEEP.items()})

KINDS = {
    "whole backward": ["naive", "gpipe", "1f1b", "eager_1f1b"],
    "split backward": ["zb_h1", "zb_h2"],
    "whole, virtual stages": ["interleaved", "bfs"],
    "split, virtual stages": ["interleaved_zb", "zb_v", "v_half", "v_min", "dualpipe_v"],
}
VIRTUAL = KINDS["whole, virtual stages"] + KINDS["split, virtual stages"]
ZERO = [UNSHARDED, Sharded(1), Sharded(2), Sharded(3), Sharded(3, reshard="step")]
DATA = Layout(pp=2, dp=2, order=("pp", "tp", "cp", "dp"))
FULLY = Recompute("full")
UNEVEN = {1: (6,), 2: (5, 1), 4: (3, 1, 2, 0), 8: (0, 1, 1, 1, 1, 1, 1, 0)}

Values = dict[str, Any]
DEALT = {
    "model": list(DEEP.values()),
    "microbatches": [8, 4, 2, 1],
    "recompute": [PLAIN, FULLY, Recompute("selective", ("mlp", "norm"))],
    "uneven": [False, True],
    "sequence_parallel": [False, True],
}


BY_KIND = [{"schedule", "microbatches"}, {"schedule", "sequence_parallel"}, {"schedule", "kind"}]
"""What a schedule meets only as one of its kind."""


def skeleton() -> Iterator[Values]:
    for schedule in SCHEDULES:
        yield {"schedule": schedule, "layout": Layout(pp=4), "zero": UNSHARDED}
        yield {"schedule": schedule, "layout": Layout(pp=2, tp=2), "zero": UNSHARDED}
    for number, zero in enumerate(ZERO):
        for schedules in KINDS.values():
            yield {"schedule": schedules[number % len(schedules)], "layout": DATA, "zero": zero}
    for schedule in VIRTUAL:
        yield {"schedule": schedule, "layout": Layout(), "zero": UNSHARDED}


def possible(values: Values) -> bool:
    layout = values["layout"]
    return values["microbatches"] * layout.dp <= BATCH and (layout.tp > 1 or not values["sequence_parallel"])


def pairs_of(values: Values) -> set[frozenset[tuple[str, str]]]:
    """Of a row's values; a schedule is also of a kind."""
    kind = next(kind for kind, names in KINDS.items() if values["schedule"] in names)
    named = [(name, str(value)) for name, value in (values | {"kind": kind}).items()]
    return set(map(frozenset, combinations(named, 2)))


def worth(values: Values, seen: set[frozenset[tuple[str, str]]]) -> int:
    """Pairs that are new; those that are asked of a schedule count more, since it stands in few rows."""
    asked = (dict(pair).keys() for pair in pairs_of(values) - seen)
    return sum(1 if pair in BY_KIND or "schedule" not in pair else 10 for pair in asked)


def dealt() -> list[Values]:
    """Each row takes the values that bring most pairs that no row before it has."""
    seen: set[frozenset[tuple[str, str]]] = set()
    rows = []
    for fixed in skeleton():
        choices = [fixed | dict(zip(DEALT, values, strict=True)) for values in product(*DEALT.values())]
        best = max(filter(possible, choices), key=partial(worth, seen=seen))
        seen |= pairs_of(best)
        rows.append(best)
    return rows


def row_of(values: Values) -> Row:
    values = dict(values)
    stages = Stages(values.pop("schedule"))
    if values.pop("uneven"):
        stages = stages._replace(split=UNEVEN[stages.make(values["layout"].pp, values["microbatches"]).stages])
    return Row(stages=stages, **values)


DEALT_ROWS = dealt()
TABLE = [row_of(values) for values in DEALT_ROWS] + [
    Row("mlp", Layout(pp=2, tp=2), microbatches=4, stages=Stages("zb_v", split=(1, 1, 1, 1))),
    Row("mlp of three", Layout(pp=2, dp=2), microbatches=2, stages=Stages("zb_h1"), zero=Sharded(3)),
    Row("deep qwen2", Layout(pp=2), microbatches=4, stages=Stages("interleaved", 3)),
    Row("deep gpt2", Layout(pp=2), microbatches=8, stages=Stages("interleaved_zb", 3)),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_schedule_trains_as_one_process_does(row: Row) -> None:
    assert_law(row)


FULL = [
    Row(model, layout, microbatches=BATCH // layout.dp, zero=zero, stages=Stages(schedule))
    for schedule, model, layout in product(SCHEDULES, DEEP.values(), [Layout(pp=4), Layout(pp=2, tp=2), DATA])
    for zero in (ZERO if layout == DATA else [UNSHARDED])
]


@pytest.mark.slow
@pytest.mark.parametrize("row", FULL, ids=str)
def test_every_schedule_trains_as_one_process_does_on_every_model_layout_and_stage_of_zero(row: Row) -> None:
    assert_law(row)


def test_the_table_has_every_pair_of_values_that_can_be_and_at_most_sixty_rows() -> None:
    assert len(TABLE) <= 60
    assert {name for names in KINDS.values() for name in names} == set(SCHEDULES)
    seen = set().union(*map(pairs_of, DEALT_ROWS))
    factors = DEALT | {"schedule": list(SCHEDULES), "layout": [Layout(pp=4), Layout(pp=2, tp=2), DATA], "kind": KINDS}
    for one, other in combinations(factors, 2):
        if {one, other} in BY_KIND:
            continue
        for first, second in product(factors[one], factors[other]):
            layout = {one: first, other: second}.get("layout", Layout(tp=2))
            values = {"microbatches": 1, "sequence_parallel": False, one: first, other: second, "layout": layout}
            if possible(values):
                assert frozenset([(one, str(first)), (other, str(second))]) in seen, (one, str(first), str(second))
    several = {values["schedule"] for values in DEALT_ROWS if values["microbatches"] >= 4 and values["layout"].pp > 1}
    assert several == set(SCHEDULES)
    for kind, zero in product(KINDS, ZERO):
        assert frozenset([("kind", kind), ("zero", str(zero))]) in seen, (kind, str(zero))

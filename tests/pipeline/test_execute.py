"""A pipeline computes what one process computes, whatever the schedule, the stages and the micro-batches are."""

from __future__ import annotations

import functools
from functools import partial
from typing import NamedTuple

import pytest

from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.execute import Pipeline
from tests.pipeline.stages import (
    Body,
    Result,
    assert_equals,
    build,
    examples,
    one_process,
    pipeline_axis,
    take_gradients,
)
from tests.ranks import run

COUNTS = (5, 1, 8, 2)  # of micro-batches, step after step: the number changes, and with it the schedule


class Row(NamedTuple):
    schedule: str
    virtual_stages: int | None = None

    def stages(self, ranks: int) -> int:
        return len(SCHEDULES[self.schedule].placement(ranks, self.virtual_stages))


ROWS = [Row(name) for name in SCHEDULES] + [Row("interleaved", 3), Row("bfs", 3), Row("interleaved_zb", 3)]


def steps(rows: list[Row]) -> list[list[Result]]:
    """By row and step: each with other micro-batches, and an evaluation of other numbers of them between."""
    pp = pipeline_axis()
    found = []
    for name, virtual in rows:
        maker = partial(_made, name, pp.size, virtual)
        bodies = [Body] * Row(name, virtual).stages(pp.size)
        stages = build(bodies, maker(1).stages_of(pp.rank))
        pipeline = Pipeline(stages, maker, pp=pp)
        results = []
        for step, count in enumerate(COUNTS):
            loss = pipeline.step(examples(count, step=step), denominator=7.0)
            results.append(Result(loss, take_gradients(stages)))
            results.append(Result(pipeline.evaluate(examples(2 * step + 1, step=step)), take_gradients(stages)))
        found.append(results)
    return found


def _made(name: str, ranks: int, virtual_stages: int | None, microbatches: int):
    return make(name, ranks=ranks, microbatches=microbatches, virtual_stages=virtual_stages)


@functools.cache
def reference(stages: int, step: int, count: int) -> Result:
    return one_process(build([Body] * stages, range(stages)), examples(count, step=step), denominator=7.0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_schedule_gives_the_loss_and_gradients_of_one_process(ranks):
    """Of 1 to 8 micro-batches of different lengths, on up to 12 stages; evaluation leaves no gradient."""
    by_rank = run(steps, ranks, ROWS, checked=False)
    for number, row in enumerate(ROWS):
        for step, count in enumerate(COUNTS):
            results = [rank[number][2 * step] for rank in by_rank]
            assert_equals(results, reference(row.stages(ranks), step, count), f"{row}, {count} micro-batches")
            evaluated = [rank[number][2 * step + 1] for rank in by_rank]
            loss = reference(row.stages(ranks), step, 2 * step + 1).loss * 7.0
            for result in evaluated:
                assert abs(result.loss - loss) <= 1e-10 * loss
                assert not any(gradient.any() for gradient in result.gradients.values())

"""A pipeline computes what one process computes, whatever the schedule, the stages and the micro-batches are."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.comm import Call, Observer, observe, start_all_reduce
from megalite.mesh import Axis
from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.schedule import Schedule, parse
from tests.pipeline.stages import (
    Body,
    Result,
    Stage,
    assert_equals,
    build,
    end_waits_after,
    examples,
    one_process,
    pipeline_axis,
    take_gradients,
)
from tests.ranks import RanksFailed, run

COUNTS = {1: (5, 1, 8, 2), 2: (5, 1, 8, 2), 4: (3, 1, 8, 2)}
"""Ranks -> numbers of micro-batches, step after step, fewer than ranks and more; with them the schedule changes."""


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
        for step, count in enumerate(COUNTS[pp.size]):
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
        for step, count in enumerate(COUNTS[ranks]):
            results = [rank[number][2 * step] for rank in by_rank]
            assert_equals(results, reference(row.stages(ranks), step, count), f"{row}, {count} micro-batches")
            evaluated = [rank[number][2 * step + 1] for rank in by_rank]
            loss = reference(row.stages(ranks), step, 2 * step + 1).loss * 7.0
            for result in evaluated:
                assert abs(result.loss - loss) <= 1e-10 * loss
                assert not any(gradient.any() for gradient in result.gradients.values())


TEXT = """
F0@0 F1@0&B0@0 F2@0 W0@0 BW1@0 BW2@0    # pairs, split and whole backwards in one row
F0@1,B0@1,F1@1,BW1@1,W0@1,F2@1,BW2@1
"""


def of_text() -> list[Result]:
    pp = pipeline_axis()
    stages = build([Body] * 2, [pp.rank])
    pipeline = Pipeline(stages, parse(TEXT), pp=pp)
    found = []
    for step in range(2):
        found.append(Result(pipeline.step(examples(3, step=step)), take_gradients(stages)))
    return found


def test_a_schedule_that_is_written_by_hand_runs():
    whole = build([Body] * 2, range(2))
    for step, results in enumerate(zip(*run(of_text, 2, checked=False), strict=True)):
        assert_equals(results, one_process(whole, examples(3, step=step)), "by hand")


def counted(name: str) -> Result:
    """The count of all is a sum over ranks that travels while the first stages work."""
    pp = pipeline_axis()
    made = make(name, ranks=pp.size, microbatches=3)
    stages = build([Body] * made.stages, made.stages_of(pp.rank))
    total = start_all_reduce(torch.tensor(5 + pp.rank), pp)
    loss = Pipeline(stages, made, pp=pp).step(examples(3), denominator=total, loss_scale=64.0)
    return Result(loss, take_gradients(stages))


@pytest.mark.parametrize("name", ["1f1b", "zb_v"])
def test_gradients_alone_have_the_loss_scale_and_the_denominator_may_be_under_way(name):
    stages = SCHEDULES[name].placement(2)
    one = one_process(build([Body] * len(stages), range(len(stages))), examples(3), denominator=11.0)
    scaled = Result(one.loss, {key: 64.0 * gradient for key, gradient in one.gradients.items()})
    assert_equals(run(counted, 2, name, checked=False), scaled, name)


def test_the_scale_of_a_half_precision_loss_is_divided_before_it_is_rounded():
    """2^17 is not finite in float16, and 2^17 / 2^4 is."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones((), dtype=torch.float16))

        def forward(self, x: None, microbatch: None) -> Tensor:
            return self.weight * 1.0

    stage = Half()
    loss = Pipeline({0: stage}, make("1f1b", ranks=1, microbatches=1)).step(
        [None], denominator=16.0, loss_scale=2.0**17
    )
    assert loss == 1 / 16 and stage.weight.grad == 2.0**13


def seen_around() -> tuple[list[str], list[tuple[int, str]]]:
    pp = pipeline_axis()
    made = make("zb_v", ranks=pp.size, microbatches=2)
    stages = build([Body] * 4, made.stages_of(pp.rank))
    actions: list[str] = []
    last: list[tuple[int, str]] = []
    numbers = {id(stage): number for number, stage in stages.items()}

    @contextmanager
    def around(action: str) -> Iterator[None]:
        actions.append(action)
        yield

    @contextmanager
    def last_backward(stage: nn.Module) -> Iterator[None]:
        yield
        last.append((numbers[id(stage)], actions[-1]))

    Pipeline(stages, made, pp=pp, around=around).step(examples(2), last_backward=last_backward)
    return actions, last


def test_what_is_around_an_action_sees_the_row_and_each_last_backward_is_a_stages_w():
    made = make("zb_v", ranks=2, microbatches=2)
    for rank, (actions, last) in enumerate(run(seen_around, 2, checked=False)):
        assert actions == [str(action) for action in made.rows[rank]]
        assert last == [(action.stage, str(action)) for action in made.rows[rank] if action.kind == "W"]


@pytest.mark.parametrize(
    ("stages", "pp", "says"),
    [
        ([0], Axis("pp"), "schedule zb_v is for 2 ranks, and axis pp has 1"),
        ([0, 1], Axis("pp", 2), r"zb_v has the stages \[0, 3\] on rank 0 of pp, and the pipeline was given \[0, 1\]"),
        ([0], Axis("pp", 2), r"zb_v has the stages \[0, 3\] on rank 0 of pp, and the pipeline was given \[0\]"),
    ],
)
def test_stages_and_ranks_that_are_not_the_schedules_are_refused_with_both(stages, pp, says):
    with pytest.raises(ValueError, match=says):
        Pipeline(build([Body] * 4, stages), make("zb_v", ranks=2, microbatches=4), pp=pp)


def test_another_number_of_microbatches_than_the_schedules_is_refused_with_both():
    pipeline = Pipeline(build([Body], [0]), make("gpipe", ranks=1, microbatches=4))
    with pytest.raises(ValueError, match="schedule gpipe is for 4 micro-batches, and the step has 3"):
        pipeline.step(examples(3))


def test_arguments_of_another_kind_are_refused_with_what_they_should_be():
    stages, made = build([Body], [0]), make("gpipe", ranks=1, microbatches=4)
    with pytest.raises(ValueError, match=r"stages are given by their numbers, as in \{0: stage\}, and not as a list"):
        Pipeline(list(stages.values()), made)
    with pytest.raises(ValueError, match="schedule='1f1b' is neither a Schedule nor makes one"):
        Pipeline(stages, "1f1b")
    with pytest.raises(ValueError, match=r"denominator has the shape \(1,\); it is one number"):
        Pipeline(stages, made).step(examples(4), denominator=torch.ones(1))


def test_a_schedule_that_is_no_schedule_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="rank 0 lacks BW1@0"):
        Pipeline(build([Body], [0]), parse("F0@0 F1@0 BW0@0"))


def test_a_maker_that_moves_the_stages_is_refused():
    def made(microbatches: int) -> Schedule:
        rows = ["F0@0 F0@1 BW0@1 BW0@0"] if microbatches == 1 else ["F0@0 F1@0 BW0@0 BW1@0"]
        return parse("\n".join(rows), name="moving")

    pipeline = Pipeline(build([Body] * 2, [0, 1]), made)
    pipeline.step(examples(1))
    with pytest.raises(ValueError, match=r"moving has the stages \[0\]"):
        pipeline.step(examples(2))


class Fails(nn.Module):
    """Ends its rank, or raises, at its second call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.calls, self.how = 0, how

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 1 and self.how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls > 1:
            raise FloatingPointError("as it was told to")
        return x


def failing(how: str) -> tuple[str, float]:
    end_waits_after(3)
    pp = pipeline_axis()
    stage = Stage(Fails(how) if pp.rank == 1 else Body(), pp.rank, pp.size)
    pipeline = Pipeline({pp.rank: stage}, make("zb_h1", ranks=pp.size, microbatches=8), pp=pp)
    began = time.monotonic()
    try:
        pipeline.step(examples(8))
    except (RuntimeError, FloatingPointError) as error:
        return str(error), time.monotonic() - began
    return "", time.monotonic() - began


def test_a_stage_that_raises_ends_all_ranks_within_the_timeout_and_they_name_what_did_not_come():
    texts = run(failing, 4, "raises", checked=False)
    assert texts[1][0] == "as it was told to"
    for rank in (0, 2, 3):
        text, seconds = texts[rank]
        assert re.match(r"the (activation|gradient) of micro-batch \d for stage \d did not come from rank \d to", text)
        assert seconds < 3 + 5  # what a busy machine adds


def test_a_rank_that_dies_ends_its_neighbours_at_once():
    with pytest.raises(RanksFailed) as raised:
        run(failing_loudly, 2, checked=False)
    assert "rank 1 of 2 died of SIGKILL" in str(raised.value)
    assert re.search("rank 0 of 2 raised:(.|\n)*micro-batch 1 for stage 0 did not come from rank 1", str(raised.value))


def failing_loudly() -> None:
    text, _ = failing("dies")
    raise RuntimeError(text)


def order_of_leaving() -> list[str]:
    pp = pipeline_axis()
    made = make("1f1b", ranks=pp.size, microbatches=1)
    pipeline = Pipeline(build([Body] * 2, [pp.rank]), made, pp=pp)
    log: list[str] = []

    class Sends(Observer):
        def issuing(self, call: Call) -> None:
            if call.operation == "send":
                log.append("sent")

    @contextmanager
    def last_backward(stage: nn.Module) -> Iterator[None]:
        yield
        log.append("over")

    pipeline.step(examples(1))
    with observe(Sends()):
        pipeline.step(examples(1), last_backward=last_backward)
    return log


def test_a_gradient_leaves_before_its_microbatch_is_over_so_that_no_rank_waits_for_a_sum_of_data_ranks():
    assert run(order_of_leaving, 2, checked=False) == [["sent", "over"], ["sent", "over"]]

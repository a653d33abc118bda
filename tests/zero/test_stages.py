"""Stages change where weights and gradients are, never a number: odd models and orders of passes, hybrids, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.zero import Zero
from tests.ranks import run
from tests.zero import odd
from tests.zero.models import ParallelMLP
from tests.zero.training import (
    WIDTH,
    Passes,
    Record,
    adamw,
    assert_equals_one_process,
    global_batch,
    one_by_one,
    plain_mlp,
    reference,
    train,
)


class Case(NamedTuple):
    """A model, told its number of micro-batches, and how it is used. divided: its output depends on the division."""

    build: Callable[[int], nn.Module]
    units: tuple[type, ...] = ()
    passes: Passes = one_by_one
    divided: bool = False


CASES = {
    "parameters of 0, 1 and 3 entries": Case(lambda m: odd.OddSizes()),
    "checkpointed by the user": Case(lambda m: odd.Checkpointed(reentrant=False)),
    "checkpointed by the user, reentrant": Case(lambda m: odd.Checkpointed(reentrant=True)),
    "checkpointed in one unit": Case(lambda m: odd.Checkpointed(reentrant=True), units=(odd.Checkpointed,)),
    "tied within and between units": Case(lambda m: odd.TiedInside(), units=(odd.Outer,)),
    "tied within small units": Case(lambda m: odd.TiedInside(), units=(nn.Linear,)),
    "keywords, tuples, dicts, dataclasses": Case(lambda m: odd.Containers()),
    "the root's parameters everywhere": Case(lambda m: odd.Rooted()),
    "modules that come again in another order": Case(odd.Wandering),
    "a loss aside": Case(lambda m: odd.Aside()),
    "frozen units": Case(lambda m: odd.Frozen()),
    "all forwards first": Case(lambda m: odd.Nudged(), passes=odd.forwards_first),
    "backwards in reverse": Case(lambda m: odd.Nudged(), passes=odd.last_in_first_out),
    "evaluation in between": Case(lambda m: odd.Nudged(), passes=odd.with_looks),
    "backward twice": Case(lambda m: odd.Nudged(), passes=odd.backward_twice),
    "backward twice of one unit": Case(lambda m: odd.Nudged(), units=(odd.Nudged,), passes=odd.backward_twice),
    "a forward that raised": Case(lambda m: odd.Nudged(), passes=odd.after_an_error),
}


def built(case: Case, microbatches: int) -> Callable[[Mesh], nn.Module]:
    return lambda mesh: case.build(microbatches)


def trained(
    names: Sequence[str], layout: Layout, microbatches: int, options: Sequence[dict[str, Any]]
) -> dict[tuple[str, int], Record]:
    """Each case with each set of options, one after the other in one group of ranks."""
    mesh = Mesh.build(layout)
    records = {}
    for name in names:
        case = CASES[name]
        for number, chosen in enumerate(options):
            given = {"units": case.units} | chosen
            records[name, number] = train(built(case, microbatches), mesh, microbatches, given, case.passes)
    return records


def assert_all_equal_one_process(
    names: Sequence[str], layout: Layout, microbatches: int, options: Sequence[dict[str, Any]]
) -> None:
    by_rank = run(trained, layout.world_size, names, layout, microbatches, options, timeout=120, checked=False)
    for name in names:
        one = reference(built(CASES[name], 1))
        for number, chosen in enumerate(options):
            try:
                assert_equals_one_process([records[name, number] for records in by_rank], one)
            except AssertionError as error:
                raise AssertionError(f"{name} with {chosen}: {error}") from error


@pytest.mark.parametrize("microbatches", [1, 2])
def test_odd_models_and_orders_of_passes_train_as_in_one_process_at_every_stage(microbatches):
    options = [{"stage": stage} for stage in (0, 1, 2, 3)]
    assert_all_equal_one_process(list(CASES), Layout(dp=2), microbatches, options)


def test_they_do_so_whenever_stage_3_gathers_and_releases():
    choices = [{"reshard": "backward"}, {"reshard": "step", "prefetch": 0}, {"prefetch": 0}, {"prefetch": 3}]
    assert_all_equal_one_process(list(CASES), Layout(dp=2), 2, [{"stage": 3} | chosen for chosen in choices])


HYBRID = ["parameters of 0, 1 and 3 entries", "tied within and between units", "keywords, tuples, dicts, dataclasses"]


def test_shards_over_one_some_or_all_data_ranks_train_as_in_one_process():
    options = [{"stage": stage, "shard_over": over} for stage in (1, 2, 3) for over in (1, 2, 4)]
    assert_all_equal_one_process(HYBRID, Layout(dp=4), 2, options)


def with_tp(sequence_parallel: bool) -> list[Record]:
    mesh = Mesh.build(Layout(dp=2, tp=2))
    build = partial(ParallelMLP, sequence_parallel=sequence_parallel)
    chosen = [{"stage": stage, "shard_over": over} for stage in (1, 2, 3) for over in (1, 2)]
    return [train(build, mesh, (1, 3, 2), options) for options in chosen]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hybrids_train_as_in_one_process_beside_tensor_parallelism(sequence_parallel):
    one = reference(partial(ParallelMLP, sequence_parallel=sequence_parallel))
    for records in zip(*run(with_tp, 4, sequence_parallel), strict=True):
        assert_equals_one_process(records, one)


def cut_wrongly(over: int) -> str:
    with pytest.raises(ValueError) as raised:
        Zero(plain_mlp(Mesh.build(Layout(dp=4))), Mesh.build(Layout(dp=4)), stage=3, shard_over=over, optimizer=adamw)
    return str(raised.value)


@pytest.mark.parametrize("over", [0, 3, 8])
def test_a_number_of_shards_that_does_not_divide_the_data_ranks_is_refused_with_both_numbers(over):
    expected = f"zero.shard_over={over} must divide the 4 data ranks: take one of [1, 2, 4]"
    assert run(cut_wrongly, 4, over) == [expected] * 4


def local_stages(stage: int) -> list[Tensor]:
    """Two modules whose own forward is never called, only that of what they hold."""
    mesh = Mesh.build(Layout(dp=2))
    torch.manual_seed(0)
    model = plain_mlp(mesh)
    stages = [nn.ModuleDict({str(i): model[i] for i in part}) for part in (range(3), range(3, 6))]
    zero = Zero(stages, mesh, stage=stage, optimizer=adamw, seed=None)
    for step in range(3):
        zero.begin(microbatches=1)
        batch = global_batch(step)
        (batch.part(mesh.dp.rank, 2).loss(model) / batch.mask.sum()).backward()
        zero.step(max_norm=0.5)
    with zero.gathered():
        return [parameter.detach().clone() for parameter in model.parameters()]


def test_several_local_stages_train_as_one_module():
    expected = list(reference(plain_mlp).weights.values())
    for stage in (1, 2, 3):
        for weights in run(local_stages, 2, stage):
            for weight, one in zip(weights, expected, strict=True):
                assert (weight - one).norm() <= 1e-10 * one.norm()


def partly_used(stages: Sequence[int]) -> list[Record]:
    mesh = Mesh.build(Layout(dp=2))
    return [train(lambda mesh: odd.PartlyUsed(), mesh, 2, {"stage": stage}) for stage in stages]


def test_half_of_a_unit_that_only_some_ranks_use_trains_as_in_one_process_up_to_stage_2():
    one = reference(lambda mesh: odd.PartlyUsed(), 4)
    for records in zip(*run(partly_used, 2, (0, 1, 2), checked=False), strict=True):
        assert_equals_one_process(records, one)


# Ranks that use different modules at stage 3. A gather is a meeting of data ranks; each must end in an error.


class Forked(nn.Module):
    """From a step on, `middle` is used by data rank 0 alone. wide: its size is not that of the others."""

    def __init__(self, mesh: Mesh, *, wide: bool, since: int) -> None:
        super().__init__()
        self.rank, self.since, self.step = mesh.dp.rank, since, 0
        self.first, self.last, self.end = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(3))
        self.middle = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(1 + wide)))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        if self.rank == 0 or self.step < self.since:
            x = torch.tanh(self.middle(x))
        return self.end(self.last(x))


def forked(wide: bool, since: int, verify: bool) -> tuple[int, str]:
    _end_waits_after(4)
    mesh = Mesh.build(Layout(dp=2))
    model = Forked(mesh, wide=wide, since=since)
    zero = Zero(model, mesh, stage=3, units=(nn.Sequential,), optimizer=adamw, seed=0, verify=verify, prefetch=0)
    try:
        for model.step in range(since + 1):
            zero.begin(microbatches=1)
            global_batch(model.step).part(mesh.dp.rank, 2).loss(model).backward()
            zero.step()
    except RuntimeError as error:
        return model.step, str(error)
    return -1, "no error"


def _end_waits_after(seconds: int) -> None:
    limit = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.options._timeout = limit


@pytest.mark.parametrize("wide", [False, True])
def test_a_module_that_one_rank_alone_uses_in_the_first_step_is_refused_at_once_by_name(wide):
    for step, text in run(forked, 2, wide, 0, True, checked=False):
        assert step == 0 and "at zero.stage=3 each module must be used on all data ranks or on none" in text
        assert re.search(r"rank [01] needs unit (middle|last) and rank [01] unit (middle|last)$", text)


def test_a_module_that_one_rank_alone_uses_later_ends_within_the_timeout_by_name():
    """Of equal size, so that nothing but the count of gathers tells: rank 0 waits for a gather too many."""
    texts = [text for _, text in run(forked, 2, False, 2, True, checked=False)]
    assert all(text != "no error" for text in texts)
    assert any(re.match(r"unit \w+ was not (gathered|summed): a rank of \(0, 1\) did not come", text) for text in texts)


class Swapped(nn.Module):
    """Two layers of one size, which data rank 1 takes in the other order from step 1 on: as many gathers on each."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.rank, self.step = mesh.dp.rank, 0
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.b, self.a) if self.rank and self.step else (self.a, self.b)
        return second(torch.tanh(first(x)))


def swapped() -> tuple[int, str, bool]:
    mesh = Mesh.build(Layout(dp=2))
    model = Swapped(mesh)
    zero = Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    before: list[Tensor] = []
    try:
        for model.step in range(2):
            zero.begin(microbatches=1)
            global_batch(model.step).part(mesh.dp.rank, 2).loss(model).backward()
            before = [unit.masters.clone() for unit in zero.units]
            zero.step()
    except RuntimeError as error:
        same = all(torch.equal(unit.masters, old) for unit, old in zip(zero.units, before, strict=True))
        return model.step, str(error), same
    return -1, "no error", False


def test_ranks_that_gathered_different_units_of_one_size_are_refused_before_the_weights_change():
    for step, text, same in run(swapped, 2, checked=False):
        assert step == 1 and text.startswith("data ranks gathered different units in this step") and same

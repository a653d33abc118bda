"""A gather is a meeting of data ranks: where they use different modules at stage 3, each ends in an error."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.zero import Zero
from tests.ranks import run
from tests.zero import odd
from tests.zero.training import WIDTH, adamw, global_batch, plain_mlp, train


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


@pytest.mark.parametrize("wide", [False, True])
def test_a_module_that_one_rank_alone_uses_later_ends_within_the_timeout_by_name(wide):
    """Of equal size, nothing but the count of gathers tells: rank 0 waits for a gather too many. Of another size, the
    ranks miss one another at once, where Gloo's own collectives would abort the process."""
    texts = [text for _, text in run(forked, 2, wide, 2, True, checked=False)]
    assert all(text != "no error" for text in texts)
    assert any(re.match(r"unit \w+ was not (gathered|summed): a rank of \(0, 1\) did not come", text) for text in texts)


def half_used() -> str:
    _end_waits_after(4)
    try:
        train(lambda mesh: odd.PartlyUsed(), Layout(dp=2), 2, {"stage": 3})
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_half_of_a_unit_that_some_ranks_do_not_use_ends_within_the_timeout_by_name():
    """All ranks gather alike, but one waits in backward for a sum that the other launches at its end."""
    texts = run(half_used, 2, checked=False)
    assert all(re.match(r"unit \w+ was not (gathered|summed): a rank of \(0, 1\) did not come", text) for text in texts)


def deserted(stage: int) -> str:
    _end_waits_after(4)
    mesh = Mesh.build(Layout(dp=2))
    model = plain_mlp(mesh)
    zero = Zero(model, mesh, stage=stage, optimizer=adamw, seed=0, verify=False)
    if mesh.rank == 1:
        return ""
    zero.begin(microbatches=1)
    try:
        global_batch(0).part(0, 2).loss(model).backward()
        zero.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_rank_that_is_gone_is_missed_by_the_units_name_and_all_ranks_of_its_axis(stage):
    """At stage 0 too, where a unit is gathered by one rank alone; and what stage 3 asks for is said at stage 3 only."""
    text, _ = run(deserted, 2, stage, checked=False)
    assert re.match(r"unit \S+( \+ \S+)? was not summed: a rank of \(0, 1\) did not come \(", text), text


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

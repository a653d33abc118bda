"""What is sent, when, and in which order: one reduction a unit and step, under backward, in one pinned order."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import megalite.zero.unit
from megalite.mesh import Layout, Mesh
from megalite.spec import ParamSpec, ones
from megalite.zero import Zero
from tests.counting import count
from tests.ranks import run
from tests.zero.models import ParallelMLP, Weights
from tests.zero.training import WIDTH, adamw, global_batch, plain_mlp


def step(zero: Zero, model: nn.Module, mesh: Mesh, *, microbatches: int, number: int = 0) -> None:
    zero.begin(microbatches=microbatches)
    mine = global_batch(number).part(mesh.data().rank, mesh.data().size)
    for index in range(microbatches):
        mine.part(index, microbatches).loss(model).backward()
    zero.step(max_norm=1.0)


def counted(build, layout: Layout, microbatches: int, group: str) -> list[tuple[int, float, int, int]]:
    """(reductions of gradients, bytes they send, bytes of the gradients, other collectives in step()) by step."""
    mesh = Mesh.build(layout)
    model = build(mesh)
    zero = Zero(model, mesh, optimizer=adamw, seed=0, verify=False)
    result = []
    for number in range(2):
        with count() as seen:
            step(zero, model, mesh, microbatches=microbatches, number=number)
        gradients = sum(p.numel() * p.element_size() for p in model.parameters())
        reductions = seen.calls("all_reduce", group=group)
        result.append((reductions, seen.bytes_sent(group=group), gradients, seen.calls() - reductions))
    return result


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("dp", [2, 4])
def test_each_unit_is_reduced_once_a_step_and_only_gradients_are_sent_once(dp, microbatches):
    for steps in run(counted, dp, plain_mlp, Layout(dp=dp), microbatches, "dense_data"):
        for reductions, sent, gradients, others in steps:
            assert reductions == 3  # three linears, the norm with the second
            assert sent == 2 * (dp - 1) / dp * gradients
            assert others == 1  # the norm


def partial_sums(microbatches: int) -> list[tuple[int, int]]:
    mesh = Mesh.build(Layout(dp=2, tp=2))
    model = ParallelMLP(mesh, sequence_parallel=True)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    result = []
    for number in range(3):
        zero.begin(microbatches=microbatches)
        mine = global_batch(number).part(mesh.dp.rank, 2)
        for index in range(microbatches):
            mine.part(index, microbatches).loss(model).backward()
        with count() as seen:
            zero.step()
        result.append((seen.calls("all_reduce", group="tp"), next(c.numel for c in seen.record if c.group == "tp")))
    return result


@pytest.mark.parametrize("microbatches", [1, 4])
def test_partial_gradients_of_all_units_are_summed_by_one_collective_a_step(microbatches):
    for steps in run(partial_sums, 4, microbatches):
        assert steps == [(1, 4 * WIDTH)] * 3  # a scale and a row bias, in two blocks


def events(microbatches: int) -> list[list[str]]:
    """Launches and ends of layers' backward, in the order in which they happen."""
    mesh = Mesh.build(Layout(dp=2))
    model = plain_mlp(mesh)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    log: list[str] = []
    start = megalite.zero.unit.start_all_reduce
    names = {id(unit.gradients.tensor): unit.name for unit in zero.units}

    def recording(x: torch.Tensor, *args: Any, **options: Any) -> Any:
        log.append(f"launch {names[id(x)]}")
        return start(x, *args, **options)

    megalite.zero.unit.start_all_reduce = recording
    for index in (0, 3, 5):
        model[index].register_full_backward_hook(lambda *_, index=index: log.append(f"backward {index}"))
    steps = []
    for number in range(2):
        log.clear()
        zero.begin(microbatches=microbatches)
        mine = global_batch(number).part(mesh.dp.rank, 2)
        for index in range(microbatches):
            mine.part(index, microbatches).loss(model).backward()
        log.append("step")
        zero.step()
        steps.append(list(log))
    return steps


@pytest.mark.parametrize("microbatches", [1, 3])
def test_from_the_second_step_on_a_unit_is_launched_before_earlier_layers_have_their_backward(microbatches):
    """Forward's reverse, head first: 5, then 1 + 3, then 0. The first step learns, and launches in step()."""
    for first, second in run(events, 2, microbatches):
        backward = ["backward 5", "backward 3", "backward 0"]
        launches = ["launch 5", "launch 1 + 3", "launch 0"]
        assert first == [*backward * microbatches, "step", *launches]
        last = [event for event in second if event != "step"][3 * (microbatches - 1) :]
        assert second[: 3 * (microbatches - 1)] == backward * (microbatches - 1)
        assert [event for event in last if event.startswith("launch")] == launches
        assert last.index("launch 5") < last.index("backward 3")
        assert last.index("launch 1 + 3") < last.index("backward 0")
        assert second.index("launch 0") < second.index("step")


class Skipping(nn.Module):
    """Its last layer is used by data rank 0 only, and its first parts after the first step by all."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.rank = mesh.dp.rank
        self.first, self.last = (nn.Linear(WIDTH, WIDTH, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(x) if self.rank == 0 else x


def order_of_launches() -> list[list[str]]:
    mesh = Mesh.build(Layout(dp=2))
    model = Skipping(mesh)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    log: list[str] = []
    for unit in zero.units:
        unit.launch = lambda unit=unit: (log.append(unit.name), type(unit).launch(unit))[1]
    steps = []
    for number in range(2):
        log.clear()
        step(zero, model, mesh, microbatches=1, number=number)
        steps.append(list(log))
    return steps


def test_units_are_launched_in_one_order_on_all_ranks_though_one_of_them_skips_the_first():
    assert run(order_of_launches, 2) == [[["last", "first"]] * 2] * 2


def further_arrival() -> str:
    mesh = Mesh.build(Layout(dp=2))
    model = plain_mlp(mesh)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    step(zero, model, mesh, microbatches=2)
    zero.begin(microbatches=1)
    global_batch(1).loss(model).backward()
    with pytest.raises(RuntimeError) as raised:
        global_batch(1).loss(model).backward()
    return str(raised.value)


def test_a_gradient_for_a_unit_that_is_reduced_is_an_error_that_names_the_parameter():
    for text in run(further_arrival, 2):
        assert re.match(r"arrival 2 of 5\.(weight|bias) in a step of 1 micro-batches, after its unit 5 was", text)


def different_order() -> str:
    mesh = Mesh.build(Layout(dp=2, tp=2))
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    names = ("a", "b") if mesh.rank != 2 else ("b", "a")
    with pytest.raises(ValueError) as raised:
        Zero(nn.ModuleDict({name: layers[name] for name in names}), mesh, optimizer=adamw)
    return str(raised.value)


def test_ranks_whose_units_differ_in_order_are_refused_on_all_ranks():
    for text in run(different_order, 4):
        assert text.startswith("ranks 0 and 2 share a pipeline stage and differ in their parameters")


def different_weights(layout: Layout, offset: bool) -> str | None:
    mesh = Mesh.build(layout)
    torch.manual_seed(mesh.dp.rank if offset else mesh.pp.rank)
    try:
        Zero(plain_mlp(mesh), mesh, optimizer=adamw)
    except ValueError as error:
        return str(error)
    return None


def test_replicas_that_start_from_different_weights_are_refused_and_stages_may_differ():
    layout = Layout(dp=2, pp=2)
    assert run(different_weights, 4, layout, False) == [None] * 4
    for text in run(different_weights, 4, layout, True):
        assert text is not None and text.startswith("ranks 0 and 1 are replicas and hold different weights")


def expert_units() -> tuple[list[tuple[str, str]], int, int]:
    mesh = Mesh.build(Layout(dp=2, ep=2))
    experts = ParamSpec((2, 5), ones, cut={mesh.ep: 0}, expert=True)
    model = Weights(dense=ParamSpec((3,), ones), experts=experts)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    model(dense=1.0, experts=1.0).backward()
    with count() as seen:
        zero.step()
    return [(u.name, u.axis.name) for u in zero.units], seen.calls(group="dense_data"), seen.calls(group="expert_data")


def test_dense_and_expert_parameters_of_a_module_are_reduced_apart_each_over_its_own_axis():
    assert run(expert_units, 2) == [([("root", "expert_data"), ("root", "dense_data")], 1, 0)] * 2


def test_any_rank_count_takes_the_same_path():
    """One rank sends nothing, and a step is the same calls: no branch on the size of an axis."""
    with count() as seen:
        mesh = Mesh.build()
        model = ParallelMLP(mesh, sequence_parallel=True)
        zero = Zero(model, mesh, optimizer=adamw, seed=0)
        step(zero, model, mesh, microbatches=2)
    assert seen.calls() == 0 and zero.skipped == 0

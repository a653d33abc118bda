"""Stages that a pipeline works on in turns: what Zero sums, when, and in which order.

Two data ranks by two ranks of a pipeline; one stage a rank or two, whole backwards or split ones.
"""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.execute import Pipeline
from megalite.zero import Zero
from tests.law import assert_equal
from tests.pipeline.stages import Body, Example, Layer, Stage, examples
from tests.ranks import run
from tests.zero.training import DECAY, LR

DP, PP, MICROBATCHES, STEPS, MAX_NORM, TOKENS = 2, 2, 3, 3, 5.0, 50.0
FAMILY = ("1f1b", "zb_h1", "interleaved", "zb_v")  # one stage a rank and two, each with whole and with split backwards


class Choosing(Stage):
    """Has a layer more, which is used where the micro-batch says so. defers: whether that one puts gradients off."""

    def __init__(self, body: nn.Module, number: int, count: int, *, defers: bool = True) -> None:
        super().__init__(body, number, count)
        self.extra = nn.ModuleDict({str(number): Layer(defers=defers)})

    def forward(self, x: Tensor | None, example: Example) -> Tensor:
        (extra,) = self.extra.values()
        return super().forward(extra(x) if example.uses_all else x, example)


class Model(NamedTuple):
    """Which of the stages is `Choosing`, and how; whether the first one's linear weight is the last one's too."""

    choosing: int | None = None
    defers: bool = True
    tied: bool = False

    def stages(self, count: int, numbers: tuple[int, ...]) -> dict[int, nn.Module]:
        found: dict[int, nn.Module] = {}
        for number in numbers:
            torch.manual_seed(number)
            chooses = number == self.choosing
            found[number] = (
                Choosing(Body(), number, count, defers=self.defers) if chooses else Stage(Body(), number, count)
            )
        if self.tied and {0, count - 1} <= found.keys():
            first, last = ((next(iter(found[n].bodies.values())))[0].linear for n in (0, count - 1))
            last.weight = first.weight
        return found


PLAIN = Model()


def batch(step: int, data_rank: int, model: Model) -> list[Example]:
    """Data rank 1 uses no layer that may be left out."""
    found = examples(DP * MICROBATCHES, step=step)[data_rank * MICROBATCHES :][:MICROBATCHES]
    return [one._replace(uses_all=model.choosing is None or data_rank == 0) for one in found]


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([group | {"weight_decay": DECAY} for group in groups], lr=LR)


class Record(NamedTuple):
    """By step; launches: names of units in their order. weights: at the end."""

    losses: list[Tensor]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    launches: list[list[str]]
    weights: dict[str, Tensor]
    units: list[str]


class Trained:
    """One rank's stages under a pipeline and Zero."""

    def __init__(self, schedule: str, model: Model = PLAIN, **options: Any) -> None:
        self.mesh, self.model = Mesh.build(Layout(dp=DP, pp=PP)), model
        made = make(schedule, ranks=PP, microbatches=MICROBATCHES)
        self.stages = model.stages(made.stages, made.stages_of(self.mesh.pp.rank))
        how = {"units": (Layer,), "optimizer": adamw} | options
        self.zero = Zero(list(self.stages.values()), self.mesh, **how)
        self.pipeline = Pipeline(self.stages, made, pp=self.mesh.pp)
        self.launches: list[str] = []
        for unit in self.zero.units:
            unit.launch = lambda unit=unit: (self.launches.append(unit.name), type(unit).launch(unit))[1]

    def backward(self, step: int, *, last_backward: Callable[[nn.Module], Any] | None = None) -> Tensor:
        self.launches.clear()
        self.zero.begin(microbatches=MICROBATCHES, in_turns=True)
        examples = batch(step, self.mesh.dp.rank, self.model)
        how: dict[str, Any] = {"last_backward": last_backward or self.zero.last_backward}
        return self.pipeline.step(examples, denominator=TOKENS, announce=self.zero.announce, **how)

    def train(self) -> Record:
        record = Record([], [], [], [], {}, [unit.name for unit in self.zero.units])
        for step in range(STEPS):
            record.losses.append(self.backward(step))
            record.gradients.append({name: one.clone() for name, one in self.zero.raw_gradients().items()})
            record.launches.append(list(self.launches))
            record.norms.append(self.zero.step(max_norm=MAX_NORM).item())
        with self.zero.gathered():
            for stage in self.stages.values():
                record.weights.update({name: p.detach().clone() for name, p in stage.named_parameters()})
        return record


@functools.cache
def one_process(count: int, model: Model) -> Record:
    """All stages one after the other, by torch's own optimizer and clipping."""
    stages = model.stages(count, tuple(range(count)))
    parameters = {name: p for stage in stages.values() for name, p in stage.named_parameters()}
    names = {id(p): name for name, p in reversed(parameters.items())}  # a tied one's first
    trained = {name: p for name, p in parameters.items() if names[id(p)] == name}
    optimizer = torch.optim.AdamW(trained.values(), lr=LR, weight_decay=DECAY)
    record = Record([], [], [], [], {}, [])
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for rank in range(DP):
            for example in batch(step, rank, model):
                x: Any = None
                for stage in stages.values():
                    x = stage(x, example)
                (x / TOKENS).backward()
                total += x.detach() / TOKENS
        record.losses.append(total)
        record.gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        record.norms.append(nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    record.weights.update({name: p.detach() for name, p in parameters.items()})
    return record


def assert_equals(records: list[Record], one: Record, what: str) -> None:
    """All ranks', of which those of a pipeline share a loss, and data ranks the weights, to the bit."""
    for step in range(STEPS):
        loss = records[0].losses[step] + records[1].losses[step]
        assert_equal(loss, one.losses[step], f"{what}: loss of step {step}")
        for record in records:
            assert abs(record.norms[step] - one.norms[step]) <= 1e-10 * one.norms[step], f"{what}: norm of step {step}"
            for name, gradient in record.gradients[step].items():
                assert_equal(gradient, one.gradients[step][name], f"{what}: gradient of {name} in step {step}")
    found: dict[str, Tensor] = {}
    for place in range(PP):
        first, second = records[DP * place : DP * place + DP]
        assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)
        found |= first.weights
    assert found.keys() == one.weights.keys()
    for name, weight in found.items():
        assert_equal(weight, one.weights[name], f"{what}: {name} at the end")


def assert_launched(records: list[Record], stage: int, what: str) -> None:
    """In one order on both data ranks, each unit once a micro-batch where gradients are cut, else once a step."""
    for place in range(PP):
        first, second = records[DP * place : DP * place + DP]
        assert first.launches == second.launches, what
        for launches in first.launches:
            assert Counter(launches) == dict.fromkeys(first.units, MICROBATCHES if stage >= 2 else 1), what


def trained(stages: tuple[int, ...], model: Model, schedules: tuple[str, ...]) -> list[Record]:
    return [Trained(schedule, model, stage=stage).train() for stage in stages for schedule in schedules]


def count_of(schedule: str) -> int:
    return len(SCHEDULES[schedule].placement(PP))


def assert_law(stages: tuple[int, ...], model: Model, schedules: tuple[str, ...] = FAMILY) -> None:
    ranks = run(trained, DP * PP, stages, model, schedules, checked=False)
    for number, records in enumerate(zip(*ranks, strict=True)):
        stage, schedule = stages[number // len(schedules)], schedules[number % len(schedules)]
        what = f"stage {stage}, {schedule}"
        assert_equals(list(records), one_process(count_of(schedule), model), what)
        assert_launched(list(records), stage, what)


def test_every_stage_of_zero_under_a_pipeline_trains_as_one_process_does():
    assert_law((0, 1, 2, 3), PLAIN)


def test_a_layer_that_one_data_rank_leaves_out_changes_neither_sums_nor_order():
    """At stages 0 to 2: at stage 3 all data ranks use a module, or none does."""
    assert_law((0, 1, 2), Model(choosing=1))


def test_what_one_data_rank_has_complete_after_b_waits_for_its_stages_w_as_on_the_rank_that_leaves_it_out():
    """All of that layer's gradients come in B: launched there, or in the W of a micro-batch before, they would meet
    those of another stage, whose W is between."""
    assert_law((0, 1, 2), Model(choosing=1, defers=False), ("zb_v", "interleaved_zb"))


def test_a_weight_of_two_stages_of_one_rank_is_summed_once_for_both():
    """Once a step, and once a micro-batch where gradients are cut, though it arrives twice in each."""
    assert_law((0, 1, 2, 3), Model(tied=True), ("zb_v", "dualpipe_v"))


class Shares(nn.Module):
    """A layer of its own, left out on data rank 1, then one that another stage has too."""

    def __init__(self, number: int, shared: nn.Module) -> None:
        super().__init__()
        self.own, self.shared = nn.ModuleDict({str(number): nn.Linear(2, 2, bias=False)}), shared

    def forward(self, x: Tensor, *, data_rank: int) -> Tensor:
        (own,) = self.own.values()
        return self.shared(own(x) if data_rank == 0 else x).sum()


def shares_launched() -> tuple[list[str], dict[str, Tensor]]:
    """Names of the units of a second step in the order of launch, and its gradients, with all weights 1."""
    mesh, shared = Mesh.build(Layout(dp=DP)), nn.Linear(2, 2, bias=False)
    stages = [Shares(number, shared) for number in range(2)]
    for parameter in nn.ModuleList(stages).parameters():
        nn.init.ones_(parameter)
    zero = Zero(stages, mesh, stage=2, units=(nn.Linear,), optimizer=functools.partial(torch.optim.SGD, lr=0.0))
    launched: list[str] = []
    for unit in zero.units:
        unit.launch = lambda unit=unit: (launched.append(unit.name), type(unit).launch(unit))[1]
    for _ in range(2):
        launched.clear()
        zero.begin(microbatches=1, in_turns=True)
        for stage in reversed(stages):
            with zero.last_backward(stage):
                stage(torch.ones(1, 2), data_rank=mesh.dp.rank).backward()
        zero.reduce()
        gradients = zero.raw_gradients()
        zero.step()
    return launched, gradients


def test_a_weight_of_two_stages_is_summed_after_what_the_last_of_them_has_alone():
    """Also on the data rank that has the latter complete in its turn. Of weights and inputs of 1, own layers have
    gradients of 2; the shared one reads 2 on data rank 0 and 1 on data rank 1, in each of two stages."""
    first, second = run(shares_launched, DP, checked=False)
    assert first[0] == second[0] and len(set(first[0])) == 3
    for _, gradients in (first, second):
        assert sorted(gradient.mean().item() for gradient in gradients.values()) == [2, 2, 6]


def late(stage: int, schedule: str) -> str:
    one = Trained(schedule, stage=stage)
    for step in range(2):
        one.backward(step)
        if step == 0:
            one.zero.step()
    stage_module = next(iter(one.stages.values()))
    x = None if one.mesh.pp.rank == 0 else torch.zeros(2, 3, 6, dtype=torch.float64)
    with pytest.raises(RuntimeError) as raised:
        stage_module(x, batch(0, 0, one.model)[0]).sum().backward()
    return str(raised.value)


@pytest.mark.parametrize("stage", [0, 2])
def test_a_gradient_that_comes_after_the_last_backward_is_refused_by_its_parameters_name(stage):
    for text in run(late, DP * PP, stage, "zb_v", checked=False):
        assert re.match(rf"arrival {MICROBATCHES + 1} of bodies\.\d\.\d\.\S+ in a step of {MICROBATCHES} micro", text)


def open_buffers(schedule: str) -> list[list[int]]:
    """Whole gradient buffers that are open after each stage's last backward of a micro-batch; matrices that wait."""
    one = Trained(schedule, stage=2)
    found: list[list[int]] = []

    @contextmanager
    def watched(stage: nn.Module) -> Iterator[None]:
        with one.zero.last_backward(stage):
            yield
        held = [unit.gradients.is_allocated for unit in one.zero.units]
        waiting = [slot.name for unit in one.zero.units for slot in unit.slots if slot.waiting is not None]
        found.append([sum(held), sum("linear.weight" in name for name in waiting)])

    for step in range(2):
        one.backward(step, last_backward=watched)
        one.zero.reduce()
        assert not any(unit.gradients.is_allocated for unit in one.zero.units)
        one.zero.step()
    return found


@pytest.mark.parametrize("schedule", ["interleaved", "zb_v"])
def test_whole_gradients_of_a_microbatch_are_given_back_at_its_end_at_stage_2(schedule):
    """But for the one reduction in flight; no matrix of another stage waits meanwhile."""
    for found in run(open_buffers, DP * PP, schedule, checked=False):
        assert len(found) == 2 * 2 * MICROBATCHES
        assert all(held <= 1 and waiting == 0 for held, waiting in found)


def bad(stage: int, schedule: str) -> list[tuple[float, float, int, bool]]:
    """(loss, norm, steps left out, whether the weights are as before): a step with NaN in the last stage, and one."""
    one = Trained(schedule, stage=stage)
    found = []
    for step in range(3):
        before = [unit.masters.clone() for unit in one.zero.units]
        last = [module for module in one.stages.values() if module.is_last]
        handles = [module.register_forward_hook(lambda *args: args[2] * math.nan) for module in last if step == 1]
        loss = one.backward(step)
        for handle in handles:
            handle.remove()
        norm = one.zero.step(max_norm=1.0)
        same = all(torch.equal(unit.masters, old) for unit, old in zip(one.zero.units, before, strict=True))
        found.append((loss.item(), norm.item(), one.zero.skipped, same))
    return found


@pytest.mark.parametrize(("stage", "schedule"), [(0, "1f1b"), (3, "zb_v")])
def test_nan_in_the_last_stage_alone_leaves_the_step_out_on_all_ranks(stage, schedule):
    """No rank steps alone and none waits. And the next step is taken."""
    for steps in run(bad, DP * PP, stage, schedule, checked=False):
        assert [(math.isfinite(loss), math.isfinite(norm), skipped, same) for loss, norm, skipped, same in steps] == [
            (True, True, 0, False),
            (False, False, 1, True),
            (True, True, 1, False),
        ]


def whole_units(choices: list[tuple[str, int]]) -> list[list[tuple[int, int, int, int]]]:
    """Of each schedule and prefetch, by step: units entered, those on their way before, the most whole at once, and
    those that are left."""
    found = []
    for schedule, prefetch in choices:
        one = Trained(schedule, stage=3, prefetch=prefetch)
        gathering = one.zero._gathering
        early: list[bool] = []
        most = [0]
        enter = gathering._enter

        def watched(
            call: Any, enter: Any = enter, one: Trained = one, early: Any = early, most: Any = most, **how: Any
        ) -> None:
            early.append(call.unit.weights.is_allocated)
            enter(call, **how)
            most.append(sum(unit.weights.is_allocated for unit in one.zero.units))

        gathering._enter = watched
        steps = []
        for step in range(2):
            early.clear()
            most.clear()
            one.backward(step)
            left = sum(unit.weights.is_allocated for unit in one.zero.units)
            steps.append((len(early), sum(early), max(most), left))
            one.zero.step()
        found.append(steps)
    return found


def test_at_stage_3_only_a_steps_first_weights_are_waited_for_however_stages_take_turns():
    """Each stage has its own order, and the pipeline announces what comes next. Of whole units there are 1 + prefetch,
    also where one stage's forward is followed by the other's backward; after the step, none."""
    choices = [(schedule, prefetch) for schedule in (*FAMILY, "dualpipe_v") for prefetch in (1, 2)]
    for rank in run(whole_units, DP * PP, choices, checked=False):
        for (schedule, prefetch), (_, (entered, early, most, left)) in zip(choices, rank, strict=True):
            stages = count_of(schedule) // PP
            layers = 2
            assert entered == 2 * MICROBATCHES * stages * layers
            assert early == entered - 1, schedule
            assert most <= 1 + prefetch and left == 0


def test_turns_that_are_not_opened_not_of_a_stage_or_not_as_many_as_said_are_refused():
    """As is the module that holds the stages, which a pipeline does not know."""
    mesh, stages = Mesh.build(), nn.ModuleList([nn.Linear(2, 2)])
    zero = Zero(list(stages), mesh, optimizer=torch.optim.SGD)
    zero.begin(microbatches=2)
    with (
        pytest.raises(ValueError, match=r"open the step by begin\(..., in_turns=True\)"),
        zero.last_backward(stages[0]),
    ):
        pass
    zero.step()
    zero.begin(microbatches=2, in_turns=True)
    with pytest.raises(ValueError, match="a ModuleList is none of the 1 stages"), zero.last_backward(stages):
        pass
    with zero.last_backward(stages[0]):
        stages[0](torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match=r"begin\(microbatches=2\), and 1 came to their end"):
        zero.step()

"""`Pipeline`: runs any schedule over this rank's stages.

    pipeline = Pipeline({mesh.pp.rank: stage}, zb_h1(4, 8), pp=mesh.pp)
    loss = pipeline.step(microbatches, denominator=tokens)

A stage is an nn.Module that is called as stage(activation, microbatch), the first with None, and gives the next one's
activation; the last gives the loss, summed. Every rank has all micro-batches: only activations and gradients travel.

1. F runs a stage and keeps, of its output, only the place in the graph: the tensor goes on and is dropped once taken.
2. B runs its backward while a `WeightGradStore` is open, so that the products for weights wait for W; BW runs it whole.
   What W holds from B on are the inputs and output gradients of its layers.
3. Gradients gather in `parameter.grad`, or wherever hooks take them: Zero's.

One rank, or one stage, is no special case: then nothing is sent.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.comm import Pending, open_lanes, start_all_reduce
from megalite.mesh import Axis
from megalite.pipeline.lower import Lane, Lowered, Step, check, lower_forward
from megalite.pipeline.post import Form, Forms, Post, form_of
from megalite.pipeline.schedule import Action, Schedule
from megalite.weight_grad import WeightGradStore

Around = Callable[[Any], AbstractContextManager[Any]]
"""Gives what is entered around an action."""


def _nothing(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


class Pipeline:
    """This rank's stages, by their numbers, worked on in the order of a schedule.

    schedule: a `Schedule`, or what makes one for a number of micro-batches, where that changes from step to step. pp:
    the axis of its ranks. around: given each action as text (F3@1), returns what is entered around it, as a profiler's
    range. Raises ValueError for a schedule that is not complete, comes to a stop or swaps messages, and where stages or
    ranks are not those of the schedule.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        schedule: Schedule | Callable[[int], Schedule],
        *,
        pp: Axis | None = None,
        around: Around = _nothing,
    ) -> None:
        self.stages, self.pp, self.around = dict(sorted(stages.items())), pp or Axis("pp"), around
        self._made: dict[int, Lowered] = {}
        self._make = schedule
        self._rank_of: tuple[int, ...] = ()
        self._lanes: dict[Lane, Axis] = {}
        self._forms: Forms = {}
        self._told: set[int] = set()  # stages that were found to put no weight gradient off
        if isinstance(schedule, Schedule):
            self.prepare(schedule.microbatches)

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        return next((p.device for stage in self.stages.values() for p in stage.parameters()), torch.device("cpu"))

    def prepare(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches, checked; every rank calls it, as the first one opens the lanes."""
        if microbatches not in self._made:
            made = self._make if isinstance(self._make, Schedule) else self._make(microbatches)
            if made.microbatches != microbatches:
                raise ValueError(
                    f"schedule {made.name} is for {made.microbatches} micro-batches, and the step has {microbatches}"
                )
            self._require_fit(made)
            lowered = check(made)
            if not self._rank_of:
                self._rank_of = made.rank_of
                self._lanes = {Lane(*key): lane for key, lane in open_lanes(self.pp, lowered.lanes).items()}
            self._made[microbatches] = lowered
        return self._made[microbatches].schedule

    def _require_fit(self, schedule: Schedule) -> None:
        if schedule.ranks != self.pp.size:
            raise ValueError(f"schedule {schedule.name} is for {schedule.ranks} ranks, and axis pp has {self.pp.size}")
        wanted = schedule.stages_of(self.pp.rank)
        if tuple(self.stages) != wanted:
            raise ValueError(
                f"schedule {schedule.name} has the stages {list(wanted)} on rank {self.pp.rank} of pp, and the "
                f"pipeline was given {list(self.stages)}"
            )
        if self._rank_of not in ((), schedule.rank_of):
            raise ValueError(f"schedule {schedule.name} places its stages otherwise than the one before it")

    def step(
        self,
        microbatches: Sequence[Any],
        *,
        denominator: float | Tensor | Pending[Tensor] = 1.0,
        loss_scale: float = 1.0,
        last_backward: Around = _nothing,
    ) -> Tensor:
        """Forward and backward of all micro-batches. Returns the sum of their losses over the denominator: float64,
        0-d, the same on every rank of pp; gradients are those of it times loss_scale.

        last_backward: given a stage, returns what is entered around the action that brings the last gradients of one of
        its micro-batches, W or BW: `Zero.last_backward`.
        """
        self.prepare(len(microbatches))
        run = self._run(self._made[len(microbatches)], microbatches)
        run.denominator, run.loss_scale, run.last_backward = denominator, loss_scale, last_backward
        with torch.enable_grad():
            run.all()
        return start_all_reduce(run.loss, self.pp).wait()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed loss of any number of micro-batches, forward alone: float64, 0-d, the same on every rank of pp.

        In a placement that is known: after `prepare` or a step, where the schedule depends on their number.
        """
        assert self._rank_of, "prepare(microbatches) comes first"
        run = self._run(lower_forward(self._rank_of, len(microbatches)), microbatches)
        run.all()
        return start_all_reduce(run.loss, self.pp).wait()

    def _run(self, lowered: Lowered, microbatches: Sequence[Any]) -> _Run:
        device = self.device
        forms = [form_of(microbatch) for microbatch in microbatches]
        post = Post(lowered, self.pp.rank, lanes=self._lanes, forms=self._forms, microbatches=forms, device=device)
        return _Run(self, lowered, microbatches, post, torch.zeros((), dtype=torch.float64, device=device))

    def told_of(self, stage: int) -> None:
        """Says, once for each stage, that splitting its backward gains nothing."""
        if stage not in self._told:
            self._told.add(stage)
            warnings.warn(
                f"stage {stage} puts no weight gradient off, so its W does nothing and its B all of the work, which "
                "the schedule does not reckon with; megalite.defer(stage) makes plain linears put theirs off",
                stacklevel=2,
            )


@dataclass
class _Pass:
    """A micro-batch in a stage, from F to its backward. edge: None where no gradient is wanted; form: of its output."""

    x: Tensor | None
    edge: GradientEdge | None
    form: Form


class _Run:
    """One pass over a schedule."""

    def __init__(
        self, pipeline: Pipeline, lowered: Lowered, microbatches: Sequence[Any], post: Post, loss: Tensor
    ) -> None:
        self.pipeline, self.schedule, self.microbatches = pipeline, lowered.schedule, microbatches
        self.row, self.post, self.loss = lowered.rows[pipeline.pp.rank], post, loss
        self.denominator: float | Tensor | Pending[Tensor] = 1.0
        self.loss_scale = 1.0
        self.last_backward: Around = _nothing
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.stores: dict[tuple[int, int], WeightGradStore] = {}
        self.handed: dict[Action, Tensor] = {}  # what neighbouring stages on this rank leave to each other

    def all(self) -> None:
        for place, step in enumerate(self.row):
            received = None if step.reads is None else self.post.take(step.reads)
            self.post.settle(place)
            with self.pipeline.around(str(step.action)):
                result = self._act(step, received)
            if step.sends is not None:
                assert result is not None
                self.post.send(step.sends, result)
        if isinstance(self.denominator, Pending):
            self.denominator.wait()
        self.post.close()

    def _act(self, step: Step, received: Tensor | None) -> Tensor | None:
        """Runs one action. Returns what it leaves to another rank."""
        kind, stage, microbatch = step.action
        if received is None and kind != "W":
            received = self.handed.pop(step.action._replace(kind="F" if kind == "F" else "B"), None)
        if kind == "F":
            result, ahead = self._forward(stage, microbatch, received), 1
        elif kind == "W":
            with self.last_backward(self.pipeline.stages[stage]):
                self.stores.pop((stage, microbatch)).run()
            return None
        else:
            result, ahead = self._backward(kind, stage, microbatch, received), -1
        if step.sends is None and result is not None:
            self.handed[Action(kind if kind == "F" else "B", stage + ahead, microbatch)] = result
            return None
        return result

    def _forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        if x is not None and torch.is_grad_enabled() and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        y = self.pipeline.stages[stage](x, self.microbatches[microbatch])
        is_last = stage == self.schedule.stages - 1
        _require_output(y, stage, is_last=is_last)
        if torch.is_grad_enabled():
            edge = get_gradient_edge(y) if y.requires_grad else None
            self.passes[stage, microbatch] = _Pass(x, edge, Form.of(y))
        if not is_last:
            return y.detach()
        self.loss += (y.detach() / self._count()) if torch.is_grad_enabled() else y
        return None

    def _count(self) -> float | Tensor:
        return self.denominator.wait() if isinstance(self.denominator, Pending) else self.denominator

    def _backward(self, kind: str, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        one = self.passes.pop((stage, microbatch))
        if gradient is None:
            assert stage == self.schedule.stages - 1, f"{kind}{microbatch}@{stage} has no gradient"
            whole = torch.full((), self.loss_scale, dtype=one.form.dtype, device=self.loss.device)
            gradient = (whole / self._count()).to(one.form.dtype)
        assert Form.of(gradient) == one.form, (Form.of(gradient), one.form)
        module = self.pipeline.stages[stage]
        with self._deferring(stage, microbatch, module) if kind == "B" else self.last_backward(module):
            if one.edge is not None:
                torch.autograd.backward([one.edge], [gradient])
        if one.x is None:
            return None
        dx, one.x.grad = one.x.grad, None
        return torch.zeros_like(one.x) if dx is None else dx

    @contextmanager
    def _deferring(self, stage: int, microbatch: int, module: nn.Module) -> Iterator[None]:
        store = self.stores[stage, microbatch] = WeightGradStore()
        with store.open():
            yield
        if not store and any(parameter.requires_grad for parameter in module.parameters()):
            self.pipeline.told_of(stage)


def _require_output(y: Any, stage: int, *, is_last: bool) -> None:
    if not isinstance(y, Tensor):
        raise ValueError(
            f"stage {stage} gave a {type(y).__name__}; a stage gives one tensor, the next one's activation"
        )
    if is_last and y.ndim:
        raise ValueError(
            f"the last stage gave a tensor of shape {tuple(y.shape)}; it gives the summed loss, of shape ()"
        )

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
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megalite.comm import Pending, open_lanes, start_all_reduce
from megalite.mesh import Axis
from megalite.pipeline.form import Form, Forms, form_of
from megalite.pipeline.lower import Lane, Lowered, Step, check, lower_forward, result_of
from megalite.pipeline.post import Post
from megalite.pipeline.schedule import Action, Schedule
from megalite.weight_grad import WeightGradStore

Around = Callable[[Any], AbstractContextManager[Any]]
"""Gives what is entered around an action."""


class Announce(Protocol):
    """Is told which stage's pass comes after the one that begins; None after the last."""

    def __call__(self, stage: nn.Module | None, *, is_backward: bool) -> None: ...


def _nothing(_: Any) -> AbstractContextManager[None]:
    return nullcontext()


def _unheard(stage: nn.Module | None, *, is_backward: bool) -> None:
    pass


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
        _require_kinds(stages, schedule)
        self.stages, self.pp, self.around = dict(sorted(stages.items())), pp or Axis("pp"), around
        self._schedule = schedule
        self._lowered: dict[int, Lowered] = {}
        self._rank_of: tuple[int, ...] = ()
        self._lanes: dict[Lane, Axis] = {}
        self._forms: Forms = {}
        self._reported: set[int] = set()
        if isinstance(schedule, Schedule):
            self.prepare(schedule.microbatches)

    @property
    def device(self) -> torch.device:
        """Where the stages are."""
        tensors = chain.from_iterable(chain(stage.parameters(), stage.buffers()) for stage in self.stages.values())
        return next((x.device for x in tensors), torch.device("cpu"))

    def prepare(self, microbatches: int) -> Schedule:
        """The schedule for so many micro-batches, checked; every rank calls it, as the first one opens the lanes."""
        if microbatches not in self._lowered:
            made = self._schedule if isinstance(self._schedule, Schedule) else self._schedule(microbatches)
            if made.microbatches != microbatches:
                raise ValueError(
                    f"schedule {made.name} is for {made.microbatches} micro-batches, and the step has {microbatches}"
                )
            self._require_fit(made)
            lowered = check(made)
            if not self._rank_of:
                self._rank_of = made.rank_of
                self._lanes = {Lane(*key): lane for key, lane in open_lanes(self.pp, lowered.lanes).items()}
            self._lowered[microbatches] = lowered
        return self._lowered[microbatches].schedule

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
        announce: Announce = _unheard,
    ) -> Tensor:
        """Forward and backward of all micro-batches. Returns the sum of their losses over the denominator: float64,
        0-d, the same on every rank of pp; gradients are those of it times loss_scale.

        last_backward: given a stage, returns what is entered around the action that brings the last gradients of one of
        its micro-batches, W or BW: `Zero.last_backward`. announce: is told what comes next, so that weights can be
        fetched meanwhile: `Zero.announce`.
        """
        if isinstance(denominator, Tensor) and denominator.ndim:
            raise ValueError(f"denominator has the shape {tuple(denominator.shape)}; it is one number, of shape ()")
        self.prepare(len(microbatches))
        lowered, how = self._lowered[len(microbatches)], (denominator, loss_scale, last_backward, announce)
        with torch.enable_grad():
            return _Run(self, lowered, microbatches, *how).all()

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Any]) -> Tensor:
        """The summed loss of any number of micro-batches, forward alone: float64, 0-d, the same on every rank of pp.

        They are placed as a step's are, and follow one another as `lower_forward` says.
        """
        if not self._rank_of:
            self.prepare(len(microbatches))
        return _Run(self, lower_forward(self._rank_of, len(microbatches)), microbatches).all()

    def report_whole_backward(self, stage: int) -> None:
        """Says, once for each stage, that splitting its backward gains nothing."""
        if stage not in self._reported:
            self._reported.add(stage)
            warnings.warn(
                f"stage {stage} ({type(self.stages[stage]).__name__}) puts no weight gradient off, so its W does "
                "nothing and its B all of the work, which the schedule does not reckon with; megalite.defer(stage) "
                "makes plain linears put theirs off",
                stacklevel=2,
            )


@dataclass
class _Pass:
    """A micro-batch in a stage, from F to its backward. edge: None where no gradient is wanted; form: of its output."""

    x: Tensor | None
    edge: GradientEdge | None
    form: Form


@dataclass
class _Run:
    """One pass over a schedule, by the arguments of `Pipeline.step`."""

    pipeline: Pipeline
    lowered: Lowered
    microbatches: Sequence[Any]
    denominator: float | Tensor | Pending[Tensor] = 1.0
    loss_scale: float = 1.0
    last_backward: Around = _nothing
    announce: Announce = _unheard

    def __post_init__(self) -> None:
        pipeline, device = self.pipeline, self.pipeline.device
        self.stages, self.last_stage = pipeline.stages, self.lowered.schedule.stages - 1
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        forms = [form_of(microbatch) for microbatch in self.microbatches]
        how: dict[str, Any] = {"lanes": pipeline._lanes, "forms": pipeline._forms, "device": device}
        self.post = Post(self.lowered, pipeline.pp.rank, microbatches=forms, **how)
        self.passes: dict[tuple[int, int], _Pass] = {}
        self.stores: dict[tuple[int, int], WeightGradStore] = {}
        self.handed: dict[Action, Tensor] = {}  # what neighbouring stages on this rank leave, by who reads it

    def all(self) -> Tensor:
        """Works off this rank's row. Returns the loss, summed over pp."""
        row = self.lowered.rows[self.pipeline.pp.rank]
        for place, (step, following) in enumerate(zip(row, _following(row), strict=True)):
            coming = None if following is None else self.stages[following.stage]
            self.announce(coming, is_backward=following is not None and following.kind != "F")
            self._one(place, step)
        self._divisor()
        self.post.close()
        return start_all_reduce(self.loss, self.pipeline.pp).wait()

    def _one(self, place: int, step: Step) -> None:
        action = step.action
        received = self.handed.pop(result_of(action), None) if step.reads is None else self.post.take(step.reads)
        self.post.settle(place)
        around = self.last_backward if action.kind in ("W", "BW") else _nothing
        with around(self.stages[action.stage]):
            with self.pipeline.around(str(action)):
                result = self._act(action, received)
            if result is not None:  # leaves before what the end of a micro-batch brings with it
                self._leave(step, result)

    def _act(self, action: Action, received: Tensor | None) -> Tensor | None:
        """Runs one action. Returns what it leaves to the neighbouring stage, if it leaves anything."""
        kind, stage, microbatch = action
        if kind == "F":
            return self._forward(stage, microbatch, received)
        if kind == "W":
            self.stores.pop((stage, microbatch)).run()
            return None
        with self._deferring(stage, microbatch) if kind == "B" else nullcontext():
            return self._backward(stage, microbatch, received)

    def _leave(self, step: Step, result: Tensor) -> None:
        kind, stage, microbatch = step.action
        if step.sends is not None:
            self.post.send(step.sends, result)
        else:
            reader = Action("F", stage + 1, microbatch) if kind == "F" else Action("B", stage - 1, microbatch)
            self.handed[reader] = result

    def _forward(self, stage: int, microbatch: int, x: Tensor | None) -> Tensor | None:
        with_backward = torch.is_grad_enabled()
        if x is not None and with_backward and (x.is_floating_point() or x.is_complex()):
            x.requires_grad_()
        y = self.stages[stage](x, self.microbatches[microbatch])
        _require_output(y, stage, is_last=stage == self.last_stage)
        if with_backward:
            edge = get_gradient_edge(y) if y.requires_grad else None
            self.passes[stage, microbatch] = _Pass(x, edge, Form.of(y))
        if stage < self.last_stage:
            return y.detach()
        self.loss += y.detach().double() / self._divisor()
        return None

    def _backward(self, stage: int, microbatch: int, gradient: Tensor | None) -> Tensor | None:
        """Backward of one micro-batch. Returns the gradient of the stage's input, zeros where nothing depends on it."""
        one = self.passes.pop((stage, microbatch))
        if gradient is None:
            assert stage == self.last_stage, f"micro-batch {microbatch} in stage {stage} has no gradient"
            gradient = (torch.full_like(self.loss, self.loss_scale) / self._divisor()).to(one.form.dtype)
        assert Form.of(gradient) == one.form, (Form.of(gradient), one.form)
        if one.edge is not None:
            torch.autograd.backward([one.edge], [gradient])
        if one.x is None:
            return None
        dx, one.x.grad = one.x.grad, None
        return torch.zeros_like(one.x) if dx is None else dx

    def _divisor(self) -> float | Tensor:
        return self.denominator.wait() if isinstance(self.denominator, Pending) else self.denominator

    @contextmanager
    def _deferring(self, stage: int, microbatch: int) -> Iterator[None]:
        """In the block weight gradients are put off, until the W of this micro-batch."""
        store = self.stores[stage, microbatch] = WeightGradStore()
        with store.open():
            yield
        if not store and any(parameter.requires_grad for parameter in self.stages[stage].parameters()):
            self.pipeline.report_whole_backward(stage)


def _following(row: Sequence[Step]) -> list[Action | None]:
    """For each place of a row, the F, B or BW that is the next to come after it."""
    found: list[Action | None] = []
    following: Action | None = None
    for step in reversed(row):
        found.append(following)
        following = following if step.action.kind == "W" else step.action
    return found[::-1]


def _require_kinds(stages: Any, schedule: Any) -> None:
    if not isinstance(stages, Mapping):
        raise ValueError(f"stages are given by their numbers, as in {{0: stage}}, and not as a {type(stages).__name__}")
    if not isinstance(schedule, Schedule) and not callable(schedule):
        raise ValueError(
            f"schedule={schedule!r} is neither a Schedule nor makes one for a number of micro-batches; "
            "megalite.pipeline.catalogue.make gives one by name"
        )


def _require_output(y: Any, stage: int, *, is_last: bool) -> None:
    if not isinstance(y, Tensor):
        raise ValueError(
            f"stage {stage} gave a {type(y).__name__}; a stage gives one tensor, the next one's activation"
        )
    if y.layout != torch.strided or y.is_nested:
        raise ValueError(f"stage {stage} gave a tensor that is sparse or nested; what travels is one dense tensor")
    if is_last and y.ndim:
        raise ValueError(
            f"the last stage gave a tensor of shape {tuple(y.shape)}; it gives the summed loss, of shape ()"
        )

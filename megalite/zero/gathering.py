"""Stage 3: when a unit's weights are whole. Hooks on modules and on what they take and give.

1. Before a unit's module computes, forward or backward, the unit is gathered, and the gathers of the next `prefetch`
   units are started: those that came after it the last time, and after the last of a pass those that come first in the
   pass that was announced. Each stage has its own order, so that stages may take turns.
2. Before the next unit is entered, the one of the forward before is released: so a unit of several modules stays whole
   from the first to the last of them, and the last unit from its forward into its backward, if that comes next.
3. A unit is released in backward when all of its parameters, or the inputs of all of its modules that were entered one
   after the other, have their gradients, else at the end of the pass; before the next one is entered, so that
   1 + prefetch units are whole at once.

A module that computes its forward again in backward (checkpointing around it) enters like any other. What a module
leaves elsewhere than in its output is not seen: if its backward reads weights, it must depend on the module's inputs.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megalite.comm import start_all_gather
from megalite.zero.path import Path, Way
from megalite.zero.unit import Unit

WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)
"""torch's modules whose backward does not read their weights; others say so by `reads_weight_in_backward = False`."""
DISORDER = (
    "data ranks gathered different units in this step, so that some computed with other weights than their modules': "
    "at zero.stage=3 each module must be used on all data ranks or on none, in one order"
)
NO_PASS = -1  # torch's number of the backward pass where there is none
_FACTOR, _TRACES = 1_000_003, 1 << 24  # sums of a world of thousands of ranks, each times its size, stay exact


class Gathering:
    """Gathers and releases units around the modules that use them.

    uses: each unit with its modules. stages: the modules whose forward is a pass. reshard: "forward" releases after
    forward and after backward, "backward" after backward alone, "step" not before the weights change. noticed: told in
    a backward pass that it goes on. compares: until the first step, each gather asks first whether all want this unit.
    """

    def __init__(
        self,
        uses: Sequence[tuple[Unit, tuple[nn.Module, ...]]],
        *,
        stages: Sequence[nn.Module],
        prefetch: int = 1,
        reshard: str = "forward",
        noticed: Callable[[], None] = lambda: None,
        compares: bool = False,
    ) -> None:
        self.reshard, self._noticed, self._compares = reshard, noticed, compares
        self.units = [unit for unit, _ in uses]
        self._numbers = {unit: number for number, unit in enumerate(self.units)}
        self._trace = 0  # of the units gathered in this step, in order
        self._ways = [Way(Path(prefetch), Path(prefetch)) for _ in stages]
        self._announced: tuple[Way, bool] | None = None  # whose pass comes next, and whether that is its backward
        self._ahead: list[Unit] = []  # of the unit that was entered last
        self._entered: dict[Unit, int] = dict.fromkeys(self.units, 0)  # forwards that are going on within each unit
        self._open: dict[Unit, set[_Call]] = {unit: set() for unit in self.units}  # calls in their backward
        self._visit: tuple[Unit | None, int, set[_Call]] = (None, NO_PASS, set())  # see `_Call.visit`
        self._arrived: Counter[tuple[Unit, int]] = Counter()  # parameters with a gradient, of a unit and a pass
        for number, stage in enumerate(stages):
            stage.register_forward_pre_hook(_beginning(weakref.ref(self), number))
        way_of: dict[nn.Module, Way] = {}
        for stage, way in zip(stages, self._ways, strict=True):
            for module in stage.modules():
                way_of.setdefault(module, way)  # a module of two stages is called in the first: a tied embedding
        for unit, modules in uses:
            for module in modules:
                self._hook(unit, module, way_of[module])

    def _hook(self, unit: Unit, module: nn.Module, way: Way) -> None:
        owner = weakref.ref(self)
        calls: list[_Call] = []
        reads, hooked = _reads_weight_in_backward(module), weakref.ref(module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            # A deep copy of the module has this hook too, and weights of its own.
            if (gathering := owner()) is not None and hooked() is module:
                calls.append(gathering._enter_forward(_Call(unit, way), (args, kwargs), reads))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (gathering := owner()) is not None and calls and hooked() is module:
                gathering._leave_forward(calls.pop(), output if reads else None)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    def _enter_forward(self, call: _Call, inputs: Any, reads: bool) -> _Call:
        unit = call.unit
        self._enter(call, in_backward=_pass() != NO_PASS, returns=reads)
        self._entered[unit] += 1
        if self._visit[:2] != (unit, _pass()):
            self._visit = (unit, _pass(), set())
        call.visit = self._visit[2]
        if torch.is_grad_enabled() and reads:
            needed = [x for x in _tensors(inputs) if x.requires_grad]
            call.before = _nodes(needed)
            # A parameter that is handed over gets its gradient with the last of its uses, and would keep the hook.
            if needed and not any(isinstance(x, nn.Parameter) for x in needed):
                register_multi_grad_hook(needed, self._leaving(call))
        return call

    def _leave_forward(self, call: _Call, output: Any) -> None:
        self._entered[call.unit] -= 1
        before, call.before = call.before, set()
        if torch.is_grad_enabled():
            for node in _nodes(_tensors(output)) - before:
                node.register_prehook(self._entering(call))
                call.visit.add(call)

    def _entering(self, call: _Call) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def enter(_: Any) -> None:
            gathering = owner()
            if gathering is not None and call not in gathering._open[call.unit]:
                gathering._noticed()
                call.begun_in = _pass()
                gathering._open[call.unit].add(call)
                gathering._enter(call, in_backward=True)

        return enter

    def _leaving(self, call: _Call) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def leave(_: Any) -> None:
            if (gathering := owner()) is not None:
                gathering._leave_backward(call)

        return leave

    def _enter(self, call: _Call, *, in_backward: bool, returns: bool = True) -> None:
        unit, way = call.unit, call.way
        following = [] if self._announced is None else self._announced[0].first(in_backward=self._announced[1])
        if in_backward:
            if not way.backward.is_known:
                way.backward.expect(way.forward.back)
            self._ahead = way.backward.enter(unit, following=following)
        else:
            self._ahead = way.forward.enter(unit, following=following, returns=returns)
        if not in_backward or self.reshard == "forward":
            for other in self.units:
                if (
                    other is not unit
                    and other not in self._ahead
                    and not self._entered[other]
                    and not self._open[other]
                ):
                    self._release_after_forward(other)
        self._gather(unit)
        unit.wait()
        for coming in self._ahead:
            self._gather(coming)

    def announce(self, stage: int | None, *, in_backward: bool) -> None:
        """Which stage's pass comes after the one that is to begin now; None where it is not known."""
        self._announced = None if stage is None else (self._ways[stage], in_backward)

    def _gather(self, unit: Unit) -> None:
        if unit.weights.is_allocated:
            return
        number = self._numbers[unit]
        self._trace = (self._trace * _FACTOR + number + 1) % _TRACES
        if self._compares:
            mine = torch.tensor([number], device=unit.weight_shard.device)
            wanted = unit.meet(start_all_gather(mine, unit.gathers), "gathered", unit.gathers).tolist()
            for rank, other in zip(unit.gathers.ranks, wanted, strict=True):
                if other != number:
                    raise RuntimeError(
                        f"{DISORDER}: rank {unit.gathers.ranks[unit.gathers.rank]} needs unit {unit.name} and rank "
                        f"{rank} unit {self.units[other].name}"
                    )
        unit.gather()

    def disorder_share(self) -> int:
        """Summed over the world: 0 if all data ranks gathered alike since the last call, else almost surely not.

        The first of the ranks that gather together takes away what each of the others adds. Exact in float64.
        """
        trace, self._trace, self._compares = self._trace, 0, False
        if not self.units:
            return 0
        axis = self.units[0].gathers
        return trace if axis.rank else -(axis.size - 1) * trace

    def _release_after_forward(self, unit: Unit) -> None:
        comes_back = torch.is_grad_enabled() and self.reshard == "backward"
        if self.reshard != "step" and not comes_back:
            unit.release()

    def begin_pass(self, stage: int) -> None:
        """A stage's forward begins."""
        if _pass() == NO_PASS:
            self._ways[stage].forward.end()
            for calls in self._open.values():  # of a backward that has not reached its end
                calls.clear()

    def _leave_backward(self, call: _Call) -> None:
        unit = call.unit
        if call in self._open[unit]:
            self._open[unit].discard(call)
            call.visit.discard(call)
            if not self._open[unit] and not call.visit:
                self._release(unit)

    def _release(self, unit: Unit) -> None:
        is_kept = self._announced is not None and unit in self._ahead
        if not self._entered[unit] and self.reshard != "step" and not is_kept:
            unit.release()

    def arrived(self, unit: Unit) -> None:
        """One more parameter of a unit has its gradient, or has put it off: no more of this pass will read it.

        That is once a pass for each, since autograd sums all uses first. A backward within another is a pass apart.
        """
        if unit not in self._open:
            return
        key = (unit, _pass())
        self._arrived[key] += 1
        if self._arrived[key] == len(unit.slots):
            for call in [call for call in self._open[unit] if call.begun_in == key[1]]:
                call.visit.clear()
                self._leave_backward(call)

    def end_pass(self) -> None:
        """A backward pass has ended. What was gathered for the pass that was announced stays."""
        for way in self._ways:
            way.backward.end()
        self._arrived.clear()
        for unit in self.units:
            self._open[unit].clear()
            self._release(unit)

    def end_step(self) -> None:
        """Weights have changed: whatever is whole is old."""
        self._announced, self._ahead = None, []
        for way in self._ways:
            way.forward.end()
            way.backward.end()
        for unit in self.units:
            unit.release()

    @contextmanager
    def held(self) -> Iterator[None]:
        """All units are whole and stay so, through forwards too."""
        for unit in self.units:
            self._entered[unit] += 1
            self._gather(unit)
            unit.wait()
        try:
            yield
        finally:
            for unit in self.units:
                self._entered[unit] -= 1
                unit.release()


def _beginning(owner: weakref.ref[Gathering], stage: int) -> Callable[..., None]:
    def begin(module: nn.Module, args: Any) -> None:
        if (gathering := owner()) is not None:
            gathering.begin_pass(stage)

    return begin


class _Call:
    """One forward of a module, on a stage's way. before: what made its inputs, while it goes on; begun_in: the pass of
    its backward.

    visit: it and its neighbours, of the same unit with no other unit between, whose backward is not over.
    """

    __slots__ = ("before", "begun_in", "unit", "visit", "way")

    def __init__(self, unit: Unit, way: Way) -> None:
        self.unit, self.way, self.begun_in = unit, way, NO_PASS
        self.before: set[Any] = set()
        self.visit: set[_Call] = set()


def _pass() -> int:
    """The number of the backward pass that calls this; NO_PASS outside of one."""
    return torch._C._current_graph_task_id()


def _nodes(tensors: Iterable[Tensor]) -> set[Any]:
    """What made these tensors, as autograd sees it.

    Of a view, what made its base as well: an operation in place on the view (relu_ after a linear) leaves out the view.
    """
    bases = [(x, x._base if x._is_view() else None) for x in tensors]
    return {one.grad_fn for pair in bases for one in pair if one is not None and one.grad_fn is not None}


def _reads_weight_in_backward(module: nn.Module) -> bool:
    """False where every module with parameters says so (an embedding's gradient needs its rows' numbers alone)."""
    owners = [m for m in module.modules() if any(True for _ in m.parameters(recurse=False))]
    return not all(
        isinstance(m, WEIGHTLESS_BACKWARD) or getattr(m, "reads_weight_in_backward", True) is False for m in owners
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in nested containers; of a dataclass or another object, its attributes' ones."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        for value in values.values():
            yield from _tensors(value)
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from _tensors(value)
    elif hasattr(values, "__dataclass_fields__"):
        yield from _tensors(vars(values))

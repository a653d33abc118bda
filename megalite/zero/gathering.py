"""Stage 3: when a unit's weights are whole. Hooks on modules and on what they take and give.

1. Before a unit's module computes, forward or backward, the unit is gathered, and the gathers of the next `prefetch`
   units are started: those that came after it the last time.
2. Before the next unit is entered in forward, the one before is released: so a unit of several modules stays whole from
   the first to the last of them, and the last unit from its forward into its backward.
3. A unit is released in backward when the gradient of its module's inputs is there, else at its last gradient, else at
   the end of the pass; before the next one is entered, so that 1 + prefetch units are whole at once.

A module that computes its forward again in backward (checkpointing around it) enters like any other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook

from megalite.zero.unit import Unit

WEIGHTLESS_BACKWARD = (nn.Embedding, nn.EmbeddingBag)
"""torch's modules whose backward does not read their weights; others say so by `reads_weight_in_backward = False`."""


class Gathering:
    """Gathers and releases units around the modules that use them.

    uses: each unit with its modules. stages: the modules whose forward is a pass. reshard: "forward" releases after
    forward and after backward, "backward" after backward alone, "step" not before the weights change.
    """

    def __init__(
        self,
        uses: Sequence[tuple[Unit, tuple[nn.Module, ...]]],
        *,
        stages: Sequence[nn.Module],
        prefetch: int = 1,
        reshard: str = "forward",
    ) -> None:
        self.reshard = reshard
        self.units = [unit for unit, _ in uses]
        self._forward, self._backward = _Path(prefetch), _Path(prefetch)
        self._entered: dict[Unit, int] = dict.fromkeys(self.units, 0)  # forwards that are going on within each unit
        self._open: dict[Unit, set[_Call]] = {unit: set() for unit in self.units}  # calls in their backward
        for stage in stages:
            stage.register_forward_pre_hook(_beginning(weakref.ref(self)))
        for unit, modules in uses:
            for module in modules:
                self._hook(unit, module)

    def _hook(self, unit: Unit, module: nn.Module) -> None:
        owner = weakref.ref(self)
        calls: list[_Call] = []
        reads = _reads_weight_in_backward(module)

        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if (gathering := owner()) is not None:
                calls.append(gathering._enter_forward(unit, (args, kwargs), reads))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if (gathering := owner()) is not None and calls:
                gathering._leave_forward(calls.pop(), output, reads)

        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, always_call=True)

    def _enter_forward(self, unit: Unit, inputs: Any, reads: bool) -> _Call:
        self._enter(unit, in_backward=torch._C._current_graph_task_id() != -1, returns=reads)
        self._entered[unit] += 1
        call = _Call(unit)
        if torch.is_grad_enabled():
            needed = [x for x in _tensors(inputs) if x.requires_grad]
            if needed:
                call.has_inputs = True
                register_multi_grad_hook(needed, self._leaving(call))
        return call

    def _leave_forward(self, call: _Call, output: Any, reads: bool) -> None:
        self._entered[call.unit] -= 1
        if not torch.is_grad_enabled() or not reads:
            return
        for node in {x.grad_fn for x in _tensors(output) if x.grad_fn is not None}:
            node.register_prehook(self._entering(call))

    def _entering(self, call: _Call) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def enter(_: Any) -> None:
            gathering = owner()
            if gathering is not None and not call.was_entered:
                call.was_entered = True
                gathering._open[call.unit].add(call)
                gathering._enter(call.unit, in_backward=True)

        return enter

    def _leaving(self, call: _Call) -> Callable[[Any], None]:
        owner = weakref.ref(self)

        def leave(_: Any) -> None:
            if (gathering := owner()) is not None:
                gathering._leave_backward(call)

        return leave

    def _enter(self, unit: Unit, *, in_backward: bool, returns: bool = True) -> None:
        if in_backward:
            if not self._backward.is_known:
                self._backward.expect(self._forward.back)
            ahead = self._backward.enter(unit)
        else:
            ahead = self._forward.enter(unit, returns=returns)
            for other in self.units:
                if other is not unit and other not in ahead and not self._entered[other] and not self._open[other]:
                    self._release_after_forward(other)
        unit.gather()
        unit.wait()
        for following in ahead:
            following.gather()

    def _release_after_forward(self, unit: Unit) -> None:
        comes_back = torch.is_grad_enabled() and self.reshard == "backward"
        if self.reshard != "step" and not comes_back:
            unit.release()

    def begin_pass(self) -> None:
        """A stage's forward begins."""
        if torch._C._current_graph_task_id() == -1:
            self._forward.end()

    def _leave_backward(self, call: _Call) -> None:
        unit = call.unit
        self._open[unit].discard(call)
        if not self._open[unit] and not self._entered[unit] and self.reshard != "step":
            unit.release()

    def finished(self, unit: Unit) -> None:
        """All gradients of a unit are there: what has no gradient of inputs to wait for is over."""
        for call in [call for call in self._open.get(unit, ()) if not call.has_inputs]:
            self._leave_backward(call)

    def end_pass(self) -> None:
        """A backward pass has ended."""
        self._backward.end()
        for unit in self.units:
            self._open[unit].clear()
            if not self._entered[unit] and self.reshard != "step":
                unit.release()

    def end_step(self) -> None:
        """Weights have changed: whatever is whole is old."""
        for unit in self.units:
            unit.release()


class _Path:
    """The units of a pass in the order of entering: what was learned from the last pass says what comes next."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self._known: list[Unit] = []
        self._seen: list[Unit] = []
        self._returning: list[Unit] = []  # those that backward comes back to

    @property
    def is_known(self) -> bool:
        return bool(self._known or self._seen)

    @property
    def back(self) -> list[Unit]:
        """The way back, as long as no backward has shown it."""
        return self._returning[::-1]

    def expect(self, units: list[Unit]) -> None:
        self._known = units

    def enter(self, unit: Unit, *, returns: bool = True) -> list[Unit]:
        """Those that come after `unit`, `prefetch` of them."""
        if not self._seen or self._seen[-1] is not unit:
            self._seen.append(unit)
            if returns:
                self._returning.append(unit)
        place = len(self._seen) - 1
        if place >= len(self._known) or self._known[place] is not unit:
            return []
        return self._known[place + 1 : place + 1 + self.prefetch]

    def end(self) -> None:
        if self._seen:
            self._known, self._seen, self._returning = self._seen, [], []


def _beginning(owner: weakref.ref[Gathering]) -> Callable[..., None]:
    def begin(module: nn.Module, args: Any) -> None:
        if (gathering := owner()) is not None:
            gathering.begin_pass()

    return begin


class _Call:
    """One forward of a module: has it inputs whose gradient says that its backward is over, has that begun?"""

    __slots__ = ("has_inputs", "unit", "was_entered")

    def __init__(self, unit: Unit) -> None:
        self.unit, self.has_inputs, self.was_entered = unit, False, False


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

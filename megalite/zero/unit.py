"""A unit: the parameters of one module that live on one data axis, in one flat buffer.

Words: a parameter's *slot* is its place in the flat buffers; an *arrival* is a gradient that one backward leaves in
`parameter.grad`; a gradient is *final* when its slot has had the arrivals that are due in this step; a unit is
*launched* when the sum of its gradients over the data axis is started.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Pending, start_all_reduce
from megalite.mesh import Axis, Mesh
from megalite.spec import ParamSpec, draw_
from megalite.zero.norm import partial_axes, sort_key
from megalite.zero.partition import Held


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter's place in its unit, and the count of its arrivals.

    part: its range of the flat buffers; gradient: that range of the gradients, in the parameter's shape.
    rate: arrivals a micro-batch; None until the first step has shown it, 0 if it can't be told before `step()`.
    due: the arrival of this step after which the gradient is final; 0 if only `step()` can tell.
    """

    name: str
    spec: ParamSpec
    unit: Unit
    part: slice
    gradient: Tensor
    copies: int
    arrivals: int = 0
    rate: int | None = None
    due: int = 0


class Unit:
    """Flat weights, master weights and gradients of some parameters, which become views of the flat weights.

    weights: (numel,) in the parameters' dtype. masters: float32 if that is a half precision, else the weights
    themselves. gradients: the masters' dtype. All are ordered by (axes in `partial`, decay, copies), then by
    registration, so that what is treated alike is one slice.
    With a `seed`, declared parameters are drawn from (seed, name) into the masters, and may be on the meta device
    before. Raises ValueError for a parameter on the meta device that nothing says how to begin.
    """

    def __init__(
        self, name: str, held: Sequence[Held], *, mesh: Mesh, seed: int | None, device: torch.device | str
    ) -> None:
        self.name = name
        self.axis: Axis = mesh.data(held[0].spec)
        counted = [(one, one.spec.copies(mesh.view(one.spec))) for one in held]
        counted.sort(key=lambda pair: (sort_key(partial_axes(pair[0].spec)), not pair[0].spec.decay, pair[1]))
        first = held[0].parameter
        device = torch.device(device) if first.is_meta else first.device
        numel = sum(one.parameter.numel() for one in held)
        self.weights = torch.empty(numel, dtype=first.dtype, device=device)
        half = first.dtype in (torch.bfloat16, torch.float16)
        self.masters = torch.empty(numel, dtype=torch.float32, device=device) if half else self.weights
        self.gradients = torch.empty_like(self.masters)
        self.slots: list[Slot] = []
        start = 0
        for one, count in counted:
            part = slice(start, start + one.parameter.numel())
            gradient = self.gradients[part].view(one.parameter.shape)
            self.slots.append(Slot(one.name, one.spec, self, part, gradient, count))
            start = part.stop
        self._fill([one for one, _ in counted], seed)
        self.missing = len(self.slots)  # gradients that are not final yet
        self.is_open = False  # whether gradients may arrive
        self._pending: Pending[Tensor] | None = None

    @torch.no_grad()
    def _fill(self, held: Sequence[Held], seed: int | None) -> None:
        for one, slot in zip(held, self.slots, strict=True):
            begin(one, self.masters[slot.part].view(one.parameter.shape), seed=seed)
        self.round_masters()
        for one, slot in zip(held, self.slots, strict=True):
            view = self.weights[slot.part].view(one.parameter.shape)
            if one.parameter.is_meta:
                # .data, like below: a count of writes of its own, so that the parameter's shows only others' writes
                one.replace(nn.Parameter(view.data))
            else:
                one.parameter.data = view
                one.parameter.grad = None  # it must be None between arrivals

    def runs(self, key: Callable[[Slot], Any]) -> Iterator[tuple[Any, slice]]:
        """(key, range of the flat buffers) for each longest run of slots whose key is equal."""
        for value, group in itertools.groupby(self.slots, key):
            slots = list(group)
            yield value, slice(slots[0].part.start, slots[-1].part.stop)

    def round_masters(self) -> None:
        """The weights become the master weights, rounded once."""
        if self.masters is not self.weights:
            self.weights.copy_(self.masters)

    def open(self, microbatches: int) -> None:
        """Gradients of a new step may arrive, of `microbatches` micro-batches."""
        self.is_open, self.missing = True, len(self.slots)
        for slot in self.slots:
            slot.arrivals, slot.due = 0, (slot.rate or 0) * microbatches

    def launch(self) -> None:
        """Starts the sum over the data axis. What has not arrived is zero, and so is the gradient of padding."""
        self.is_open = False
        for slot in self.slots:
            if not slot.arrivals:
                slot.gradient.zero_()
            for dim in slot.spec.pad:
                valid = slot.spec.valid_box()[dim].stop
                slot.gradient.narrow(dim, valid, slot.gradient.shape[dim] - valid).zero_()
        self._pending = start_all_reduce(self.gradients, self.axis)

    def wait(self, microbatches: int) -> None:
        """The gradients are summed; the first time, the arrivals seen become the rate that is expected from now on."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        for slot in self.slots:
            if slot.rate is None:
                rate, rest = divmod(slot.arrivals, microbatches)
                slot.rate = 0 if rest else rate


def begin(held: Held, target: Tensor, *, seed: int | None) -> None:
    """Fills `target` with the values that a parameter starts from: drawn if declared and a seed is given, else its own.

    Raises ValueError if it is on the meta device and there is nothing to draw.
    """
    if seed is not None and held.spec.init is not None:
        draw_(target, held.spec, seed=seed, name=held.name)
    elif held.parameter.is_meta:
        way_out = "pass seed= to draw it" if held.spec.init is not None else "declare its ParamSpec with an init"
        raise ValueError(f"parameter {held.name} is on the meta device and has no values: {way_out}")
    else:
        target.copy_(held.parameter)


@torch.no_grad()
def begin_frozen(held: Held, *, seed: int | None, device: torch.device | str) -> None:
    """Gives a parameter that is not trained its first values, where it is, or on `device` if it is on meta."""
    target = held.parameter
    if target.is_meta:
        target = nn.Parameter(torch.empty_like(target, device=device), requires_grad=False)
    begin(held, target, seed=seed)
    if target is not held.parameter:
        held.replace(target)

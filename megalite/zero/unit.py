"""A unit: the parameters of some modules that live on one data axis, in one flat buffer that data ranks may share out.

Words: a parameter's *slot* is its place in the flat buffers; an *arrival* is a gradient that one backward leaves in
`parameter.grad`; a *shard* is this rank's equal part of a flat buffer. A unit is *launched* when the sum of its
gradients over the data axis is started, and *gathered* when every rank has all of its weights.

| stage | weights between uses | gradients                        | masters and optimizer state |
|-------|----------------------|----------------------------------|-----------------------------|
| 0     | whole                | whole, summed once a step        | whole                       |
| 1     | whole                | whole, summed once a step        | shard                       |
| 2     | whole                | shard, summed every micro-batch  | shard                       |
| 3     | shard                | shard, summed every micro-batch  | shard                       |

Rajbhandari et al., arXiv:1910.02054. Stage 0 is a shard of everything: over one rank, with all data ranks as replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Pending, start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.mesh import Axis, Mesh
from megalite.spec import ParamSpec, draw_
from megalite.zero.flat import Flat
from megalite.zero.guard import guard, unguard
from megalite.zero.norm import partial_axes, sort_key
from megalite.zero.partition import Held

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sharding:
    """How units are kept. stage: 0 to 3. over: so many neighbouring data ranks share a unit; None = all of them.

    gradients: the dtype in which they are added and summed; None = the masters'. offload: the masters lie on the CPU.
    """

    stage: int = 0
    over: int | None = None
    gradients: torch.dtype | None = None
    offload: bool = False

    def axes(self, mesh: Mesh, data: Axis) -> tuple[Axis, Axis, Axis]:
        """(replicas, shards, gathers) of a data axis; ValueError if its size cannot be cut so."""
        over = data.size if self.over is None else self.over
        if over < 1 or data.size % over:
            legal = [size for size in range(1, data.size + 1) if data.size % size == 0]
            raise ValueError(f"zero.shard_over={over} must divide the {data.size} data ranks: take one of {legal}")
        return mesh.shards(data, 1 if self.stage == 0 else over)


@dataclass(eq=False, slots=True)
class Slot:
    """One parameter's place in its unit, and the count of its arrivals.

    part: its range of the flat buffers; gradient: that range of the gradients, in the parameter's shape.
    copies: how many ranks of the world hold each of its entries, before shards. arrivals: of this step; written:
    whether there is one that is not launched yet, and waiting: that one, where it is not in the flat gradients;
    promised: weight gradients that a backward has put off.
    rate: arrivals a micro-batch; None until the first step has shown it, 0 if it varies.
    due: the arrival of this step after which the gradient may be launched.
    """

    name: str
    spec: ParamSpec
    unit: Unit
    part: slice
    gradient: Tensor
    copies: int
    arrivals: int = 0
    written: bool = False
    waiting: Tensor | None = None
    promised: int = 0
    rate: int | None = None
    due: int = 0


class Unit:
    """Flat weights, master weights and gradients of some parameters, which become views of the flat weights.

    weights: padded so that the shards divide them, in the parameters' dtype. masters: this rank's shard of them, in
    float32 if that is a half precision, else the weights themselves. gradients: whole, in the masters' dtype unless
    another was asked for; gradient_shard: this rank's part of their sum. All are ordered by (axes in `partial`, decay,
    copies), then by registration, so that what is treated alike is one slice.
    With a `seed`, declared parameters are drawn from (seed, name), in float32 at least, and may be on the meta device
    before. Raises ValueError for a parameter on the meta device that nothing says how to begin.
    """

    def __init__(
        self,
        name: str,
        held: Sequence[Held],
        *,
        mesh: Mesh,
        sharding: Sharding,
        seed: int | None,
        device: torch.device | str,
    ) -> None:
        self.name, self.stage = name, sharding.stage
        self.axis: Axis = mesh.data(held[0].spec)
        self.replicas, self.shards, self.gathers = sharding.axes(mesh, self.axis)
        counted = [(one, one.spec.copies(mesh.view(one.spec))) for one in held]
        counted.sort(key=lambda pair: (sort_key(partial_axes(pair[0].spec)), not pair[0].spec.decay, pair[1]))
        first = held[0].parameter
        device = torch.device(device) if first.is_meta else first.device
        self.wide = torch.float32 if first.dtype in HALF else first.dtype
        numel = sum(one.parameter.numel() for one in held)
        padded = -(-numel // self.shards.size) * self.shards.size
        self.part = self.shards.part(padded)
        self.weights = Flat(padded, dtype=first.dtype, device=device)
        self.gradients = Flat(padded, dtype=sharding.gradients or self.wide, device=device)
        self.slots: list[Slot] = []
        start = 0
        for one, count in counted:
            part = slice(start, start + one.parameter.numel())
            gradient = self.gradients.tensor[part].view(one.parameter.shape)
            self.slots.append(Slot(one.name, one.spec, self, part, gradient, count))
            start = part.stop
        self.parameters: list[nn.Parameter] = []
        if self.stage >= 2:
            self.gradients.free()
        self._fill([one for one, _ in counted], seed, offload=sharding.offload)
        self._sum: Tensor | None = None  # at stages 2 and 3 what is summed of this step: this rank's shard
        self.missing = len(self.slots)  # slots without the arrivals that are due
        self.is_open = False  # whether gradients may arrive
        self._reducing: Pending[Tensor] | None = None
        self._gathering: Pending[Tensor] | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether weights are kept as shards between uses."""
        return self.stage == 3 and self.shards.size > 1 and self.weights.tensor.numel() > 0

    @property
    def gradient_shard(self) -> Tensor:
        """This rank's part of the gradients' sum, once it is there."""
        if self.stage < 2:
            return self.gradients.tensor[self.part]
        assert self._sum is not None, self.name
        return self._sum

    @torch.no_grad()
    def _fill(self, held: Sequence[Held], seed: int | None, *, offload: bool) -> None:
        weights = self.weights.tensor
        drawn = weights if self.wide == weights.dtype else torch.empty_like(weights, dtype=self.wide)
        for one, slot in zip(held, self.slots, strict=True):
            begin(one, drawn[slot.part].view(one.parameter.shape), seed=seed)
        drawn[self.slots[-1].part.stop :] = 0
        if drawn is not weights:
            weights.copy_(drawn)
        for one, slot in zip(held, self.slots, strict=True):
            view = weights[slot.part].view(one.parameter.shape)
            if one.parameter.is_meta:
                # .data, like below: a count of writes of its own, so that the parameter's shows only others' writes
                one.replace(nn.Parameter(view.data))
            else:
                one.parameter.data = view
                one.parameter.grad = None  # it must be None between arrivals
            self.parameters.append(one.parameter)
        self.weight_shard = weights[self.part].clone() if self.is_sharded else weights[self.part]
        self.masters = self.weight_shard if drawn is weights else drawn[self.part].clone()
        if offload:
            self.masters = self.masters.to("cpu", copy=True)

    def live(self) -> dict[str, list[Tensor]]:
        """What has memory at this moment, by kind (weights, masters, gradients); each storage once."""
        flats = {"weights": self.weights, "gradients": self.gradients}
        found = {kind: [flat.tensor] if flat.is_allocated else [] for kind, flat in flats.items()}
        found["gradients"] += [slot.waiting for slot in self.slots if slot.waiting is not None]
        found["gradients"] += [] if self._sum is None else [self._sum]
        found["weights"] += [self.weight_shard] if self.is_sharded else []
        found["masters"] = [] if self.masters is self.weight_shard else [self.masters]
        return found

    def runs(self, key: Callable[[Slot], Any]) -> Iterator[tuple[Any, slice]]:
        """(key, range of this rank's shard) for each longest run of slots whose key is equal; empty ranges left out."""
        start, stop = self.part.start, self.part.stop
        for value, group in itertools.groupby(self.slots, key):
            slots = list(group)
            first, last = max(slots[0].part.start, start), min(slots[-1].part.stop, stop)
            if first < last:
                yield value, slice(first - start, last - start)

    # Gradients: open, (put, ..., launch, finish) once a round, settle.

    def open(self) -> None:
        """Gradients of a new step may arrive."""
        self.is_open, self._sum = True, None
        for slot in self.slots:
            slot.arrivals, slot.written, slot.waiting, slot.promised = 0, False, None, 0

    def put(self, slot: Slot, gradient: Tensor) -> None:
        """One arrival, given away. Where gradients are kept whole it goes into the flat buffer: the first of a round is
        copied, later ones are added, nothing is zeroed before. Else it waits as it is for the unit's launch."""
        slot.arrivals += 1
        if self.stage >= 2:
            gradient = gradient if slot.waiting is None else slot.waiting.to(slot.gradient.dtype).add_(gradient)
            slot.waiting = gradient
        elif slot.written:
            slot.gradient.add_(gradient)
        else:
            slot.gradient.copy_(gradient)
        slot.written = True

    def launch(self) -> None:
        """Starts the sum over the data axis. What has not arrived is zero, and so is the gradient of padding."""
        self.gradients.allocate()
        flat = self.gradients.tensor
        for slot in self.slots:
            if not slot.written:
                slot.gradient.zero_()
            elif slot.waiting is not None:
                slot.gradient.copy_(slot.waiting)
            slot.written, slot.waiting = False, None
            for dim in slot.spec.pad:
                valid = slot.spec.valid_box()[dim].stop
                slot.gradient.narrow(dim, valid, slot.gradient.shape[dim] - valid).zero_()
        flat[self.slots[-1].part.stop :] = 0
        if self.shards.size == 1 and self.stage < 2:
            self._reducing = start_all_reduce(flat, self.replicas)
        else:
            # Where gradients are kept whole, the sum goes in the place of this rank's part.
            self._reducing = start_reduce_scatter(flat, self.shards, into=flat[self.part] if self.stage < 2 else None)

    def finish(self) -> None:
        """The sum that was launched has come; what is kept of it is the shard."""
        assert self._reducing is not None
        total, self._reducing = self.meet(self._reducing, "summed", self.axis), None
        if self.stage < 2:
            return
        if self._sum is not None:
            self._sum.add_(total)
        else:
            # Over one rank the sum is the flat buffer itself, which is given back.
            self._sum = total.clone() if total is self.gradients.tensor else total
        self.gradients.free()

    def settle(self) -> Pending[Tensor]:
        """After the last round: the shard is summed over the replicas too, where that was not done already."""
        self.wait()  # for weights that no forward of this step has read: their masters change now
        if self.shards.size == 1 and self.stage < 2:
            return Pending.done(self.gradient_shard)
        return start_all_reduce(self.gradient_shard, self.replicas)

    def close(self) -> None:
        """After the update: the gradients are not needed any more."""
        self._sum = None

    # Weights: gather, wait, release. Parameters are guarded while they are not whole.

    def publish(self) -> None:
        """The masters were updated: rounded into the weights, which are gathered where each rank has all of them."""
        if self.masters is not self.weight_shard:
            self.weight_shard.copy_(self.masters)
        if self.shards.size > 1 and not self.is_sharded:
            self._guard()
            self._gathering = start_all_gather(self.weight_shard, self.gathers, into=self.weights.tensor)

    def gather(self) -> None:
        """Starts to fetch all of the weights, if they are not here or on their way."""
        if self.is_sharded and not self.weights.is_allocated:
            self.weights.allocate()
            self._gathering = start_all_gather(self.weight_shard, self.gathers, into=self.weights.tensor)

    def wait(self) -> None:
        """The weights are whole from here on, if a gather was started."""
        if self._gathering is not None:
            pending, self._gathering = self._gathering, None
            self.meet(pending, "gathered", self.gathers)
            for parameter in self.parameters:
                unguard(parameter)

    def meet(self, pending: Pending[Tensor], what: str, axis: Axis) -> Tensor:
        """Waits for the other ranks of an axis. Raises RuntimeError, by the unit's name, if one does not come."""
        try:
            return pending.wait()
        except RuntimeError as error:
            missed = f"unit {self.name} was not {what}: a rank of {axis.ranks} did not come"
            if self.is_sharded:
                missed += "; at zero.stage=3 all data ranks use a module and each of its parameters, or none does"
            raise RuntimeError(f"{missed} ({error})") from error

    def release(self) -> None:
        """Gives the memory of weights that are kept as shards back."""
        if self.is_sharded and self.weights.is_allocated:
            self.wait()
            self._guard()
            self.weights.free()

    def require_whole(self) -> None:
        """What a guarded parameter asks before it is read. Raises ValueError, by name, if the weights are not here."""
        if self.is_sharded:
            raise ValueError(
                f"a parameter of unit {self.name} was read while its weights are spread over the data ranks "
                "(zero.stage=3): they are whole within the forward and backward of its own module only"
            )
        self.wait()

    def _guard(self) -> None:
        for parameter in self.parameters:
            guard(parameter, self)


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

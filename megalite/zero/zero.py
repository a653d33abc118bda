"""`Zero`: data parallelism under backward. Gradients, master weights, optimizer, and the step that joins them.

1. Each parameter has a hook that fires when autograd has left a gradient in `parameter.grad`. The hook moves it into
   the unit's flat gradients and counts it.
2. How many arrivals a micro-batch brings is learned in the first step. From then on a gradient is known to be final at
   its last arrival, and a unit whose gradients are all final is summed over the data axis while backward goes on, in
   one pinned order, forward's reversed: see `reductions`.
3. At stage 3 weights are whole only while they are used: see `gathering`.
4. `step()` launches what is left, with zeros for what has not come, and waits; sums `partial` gradients over their
   axes; takes one norm over the world; clips; updates this rank's shard; rounds the masters into the weights and, at
   stages 1 and 2, gathers them again: each is waited for where it is first read.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import start_all_gather, start_all_reduce
from megalite.mesh import Mesh
from megalite.zero.agreement import require_agreement
from megalite.zero.gathering import DISORDER, Gathering
from megalite.zero.making import holders, make_units, require_real
from megalite.zero.matrix_update import MatrixRule
from megalite.zero.norm import squared_norm_share, sum_partial
from megalite.zero.partition import Held, held_parameters
from megalite.zero.passes import Passes
from megalite.zero.reductions import Reductions
from megalite.zero.unit import Sharding, Slot
from megalite.zero.update import Moments, Optimizer, Update
from megalite.zero.verify import Findings, Verifier, summary
from megalite.zero.watch import Watch

STAGES = (0, 1, 2, 3)
RESHARD = ("forward", "backward", "step")


class Zero:
    """Data-parallel training of `stages`, this rank's modules: any nn.Module; a plain parameter counts as replicated.

        zero = Zero(model, mesh, units=(Block,), optimizer=make_optimizer)
        zero.begin(microbatches=m)
        for each micro-batch: (loss_sum / tokens_of_the_global_batch).backward()
        norm = zero.step(max_norm=1.0)

    Gradients are summed over the data axis, never averaged: the caller divides the loss by what is counted globally.

    stage, shard_over: what data ranks hold once instead of each, over how many of them; see `unit`. prefetch, reshard:
    when stage 3 has weights whole; see `gathering`.
    units: classes whose instances are a unit each; see `partition`. optimizer: makes torch's own from groups of flat
    slices, {"params", "decay", "lr_multiplier"}; it gives those without decay weight_decay=0, and must be elementwise.
    matrices: `Muon` or `Adafactor` for what is a matrix; see `matrix_update`. lr_multipliers, moments: see `update`.
    gradients: the dtype in which they are added and summed; None = the masters'.
    offload: masters and the optimizer's state lie in the CPU's memory, and it updates them.
    seed: draws every declared parameter from (seed, logical name), also from the meta device, on `device`; None keeps
    the values. verify: checks the raw gradients of the first step against the ParamSpecs.
    Load, convert, move, freeze before, not after: parameters become views of flat weights here, and half-precision
    weights give their float32 masters. Raises ValueError for a parameter to be trained whose dtype is not a real one.
    """

    def __init__(
        self,
        stages: nn.Module | Sequence[nn.Module],
        mesh: Mesh,
        *,
        stage: int = 0,
        shard_over: int | None = None,
        prefetch: int = 1,
        reshard: str = "forward",
        units: tuple[type, ...] = (),
        optimizer: Optimizer,
        matrices: MatrixRule | None = None,
        lr_multipliers: Mapping[str, float] | None = None,
        gradients: torch.dtype | None = None,
        moments: Moments | None = None,
        offload: bool = False,
        seed: int | None = None,
        verify: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        if stage not in STAGES:
            raise ValueError(f"zero.stage={stage} is unknown; legal values: {', '.join(map(str, STAGES))}")
        if reshard not in RESHARD:
            raise ValueError(f"reshard={reshard} is unknown; legal values: {', '.join(RESHARD)}")
        modules = [stages] if isinstance(stages, nn.Module) else list(stages)
        held = held_parameters(modules)
        require_real(held)
        self.mesh, self.stage = mesh, stage
        sharding = Sharding(stage, shard_over, gradients, offload)
        making: dict[str, Any] = {"mesh": mesh, "seed": seed, "device": device or "cpu"}
        uses, checksums = make_units(modules, held, tuple(units), sharding=sharding, **making)
        self.units = [unit for unit, _ in uses]
        self.device = self.units[0].weights.tensor.device if self.units else torch.device(device or "cpu")
        require_agreement(self.units, checksums, mesh=mesh, device=self.device)
        self._update = Update(self.units, optimizer, matrices=matrices, lr_multipliers=lr_multipliers, moments=moments)
        self.skipped = 0  # steps left out because the gradient was not finite
        self._slots = [slot for unit in self.units for slot in unit.slots]
        self._verifier = Verifier(self._slots, mesh=mesh, device=self.device) if verify else None
        self._modules = modules
        self._reductions = Reductions(holders(self.units, modules), mesh=mesh, stage=stage)
        kept_apart = [(unit, modules) for unit, modules in uses if unit.is_sharded]
        how: dict[str, Any] = {"prefetch": prefetch, "reshard": reshard, "compares": verify}
        self._passes = Passes(_ending(weakref.ref(self)))
        self._gathering = Gathering(kept_apart, stages=modules, noticed=self._passes.notice, **how)
        self._microbatches = 0  # of the step that is open; 0 outside of begin() and step()
        self._reduced = False
        self._listen(held)
        self._watch = Watch(held, self._slots)

    def _listen(self, held: Sequence[Held]) -> None:
        """Hooks hold this object weakly and no parameter at all: torch can't free a cycle through a hook."""
        slots = {slot.name: number for number, slot in enumerate(self._slots)}
        for one in held:
            if one.name in slots:
                hook = _arrival_hook(weakref.ref(self), slots[one.name])
                one.parameter.register_post_accumulate_grad_hook(hook)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """torch's, over this rank's shards."""
        return self._update.optimizer

    @property
    def lr(self) -> float:
        """The learning rate, before a group's multiplier; assign to change that of every group."""
        return self._update.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._update.lr = value

    def begin(self, *, microbatches: int, in_turns: bool = False) -> None:
        """Opens a step of so many micro-batches; it may differ from step to step.

        in_turns: the stages are worked on one at a time, as a pipeline does, and `last_backward` says when.
        Raises RuntimeError if a parameter is no longer the view that is trained, or was frozen or unfrozen, since
        this object was built, or if weights were written that are only copies of masters.
        """
        if microbatches < 1:
            raise ValueError(f"microbatches={microbatches} must be at least 1")
        if self._microbatches:
            raise RuntimeError("begin() was called twice: step() comes between")
        self._watch.require_unchanged()
        self._microbatches, self._reduced = microbatches, False
        self._passes.forget()
        self._reductions.open(microbatches, in_turns=in_turns)
        if self._verifier is not None:
            self._verifier.open()

    @contextmanager
    def last_backward(self, stage: nn.Module) -> Iterator[None]:
        """In the block the last gradients of a micro-batch of one of the stages arrive: what is to be summed is summed
        from within it on. For steps that were opened with in_turns; every data rank enters the same blocks in the same
        order.
        """
        with self._reductions.last_backward(self._number(stage)):
            yield

    def announce(self, stage: nn.Module | None, *, is_backward: bool) -> None:
        """Said before one of the stages begins a pass: which one's comes after it, and whether that is its backward. At
        stage 3 its first weights are then gathered under this one's end. None: nothing is known to come."""
        self._gathering.announce(None if stage is None else self._number(stage), in_backward=is_backward)

    def _number(self, stage: nn.Module) -> int:
        number = next((number for number, module in enumerate(self._modules) if module is stage), None)
        if number is None:
            raise ValueError(
                f"a {type(stage).__name__} is none of the {len(self._modules)} stages that Zero was built with; give "
                "it the same modules as the pipeline, as a list"
            )
        return number

    def _arrive(self, slot: Slot, parameter: Tensor) -> None:
        """One gradient is in `parameter.grad`, or none: a layer that puts its weight's gradient off fires empty."""
        gradient = parameter.grad
        self._passes.notice()
        self._gathering.arrived(slot.unit)
        if gradient is None:
            slot.promised += 1
            self._passes.promised += 1
            return
        if not self._microbatches or self._reduced or not self._reductions.may_arrive(slot):
            raise RuntimeError(self._late(slot))
        if gradient.layout != torch.strided:
            raise ValueError(
                f"the gradient of {slot.name} is {gradient.layout}, and gradients are summed in flat dense buffers: "
                "build the module with sparse=False"
            )
        parameter.grad = None
        self._passes.arrived += 1
        slot.promised = max(slot.promised - 1, 0)
        if self._verifier is not None:
            self._verifier.observe(slot, gradient)
        self._reductions.put(slot, gradient)

    def _end_pass(self, is_whole: bool) -> None:
        self._gathering.end_pass()
        if self._microbatches and is_whole:
            self._reductions.passed()

    def _late(self, slot: Slot) -> str:
        if not self._microbatches or self._reduced:
            return (
                f"a gradient of {slot.name} arrived outside of begin() and step(): call begin(microbatches=...) first"
            )
        return (
            f"arrival {slot.arrivals + 1} of {slot.name} in a step of {self._microbatches} micro-batches, after its "
            f"unit {slot.unit.name} was reduced with {slot.due} ({slot.rate} per micro-batch, as in the first step): "
            "either begin(microbatches=...) is too low, or the parameter is now used in more backward passes"
        )

    @torch.no_grad()
    def reduce(self) -> None:
        """Finishes all sums over ranks, so that `raw_gradients` can be read; `step()` calls it if nobody has."""
        if not self._microbatches:
            raise RuntimeError("no step is open: begin(microbatches=...) comes first")
        if self._reduced:
            return
        self._reductions.finish()
        sum_partial(self.units)
        self._reduced = True

    def raw_gradients(self) -> dict[str, Tensor]:
        """Parameter's name -> its gradient, summed over all ranks and not clipped; this rank's cut, padding zero.

        Between begin() and step(), after `reduce()`, which it calls. Every rank calls it: shards are gathered. Where
        there are none, what is given is a view of what `step()` then uses and clips.
        """
        self.reduce()
        gradients: dict[str, Tensor] = {}
        for unit in self.units:
            whole = start_all_gather(unit.gradient_shard, unit.shards).wait()
            gradients |= {slot.name: whole[slot.part].view(slot.gradient.shape) for slot in unit.slots}
        return gradients

    @torch.no_grad()
    def step(self, *, max_norm: float | None = None, loss_scale: float = 1.0) -> Tensor:
        """One update from the gradients since `begin`. Returns their norm over all parameters: float64, 0-d.

        max_norm: gradients are multiplied by max_norm / (norm + 1e-6) where that is below 1 (torch's formula).
        loss_scale: the factor that the loss was multiplied by, taken out again here, for float16.
        If the norm is not finite (one bad entry on one rank is enough) no rank updates anything: weights and optimizer
        state keep their bits, and `skipped` counts one. Raises RuntimeError on all ranks if `verify` finds a fault, or
        if data ranks used different modules at stage 3.
        """
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm={max_norm} must be greater than 0, or None for no clipping")
        if not (math.isfinite(loss_scale) and loss_scale > 0):
            raise ValueError(f"loss_scale={loss_scale} must be finite and greater than 0; 1.0 is no scaling")
        self.reduce()
        self._microbatches = 0
        norm = self._norm() / loss_scale
        if not math.isfinite(norm.item()):
            self.skipped += 1
            for unit in self.units:
                unit.close()
            return norm
        clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm.item() + 1e-6))
        self._gathering.end_step()
        self._update.step(clip / loss_scale)
        for unit in reversed(self.units):  # in forward's order: what is used first is gathered first
            unit.close()
            unit.publish()
        return norm

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All weights are whole within, to be read: what stage 3 otherwise allows in forward and backward alone.

        Every rank enters it, between steps; it takes the memory of the whole model.
        """
        for unit in self.units:
            unit.wait()
        with self._gathering.held():
            yield

    def _norm(self) -> Tensor:
        """|g| by one all-reduce over the world; an entry that is not finite, verify's findings, and whether data ranks
        gathered different units, ride along."""
        findings = self._verifier.compare() if self._verifier is not None else Findings()
        share = squared_norm_share(self.units, self.device)
        others = share.new_tensor([len(findings.faults), len(findings.suspects), self._gathering.disorder_share()])
        sums = torch.cat([share[None], others])
        squared_norm, faults, suspects, disorder = start_all_reduce(sums, self.mesh.world).wait().tolist()
        if disorder:
            raise RuntimeError(DISORDER)
        if faults:
            elsewhere = "another rank has found a gradient that is not what its ParamSpec says; see its message"
            raise RuntimeError(summary(findings.faults) or elsewhere)
        if findings.suspects:
            warnings.warn(summary(findings.suspects), stacklevel=4)  # of whoever called step(), which is decorated
        if self._verifier is not None and math.isfinite(squared_norm):
            again = suspects > 0 and self._verifier.remember(findings.suspects)
            self._verifier = self._verifier if again else None
        return torch.tensor(squared_norm, dtype=torch.float64, device=self.device).sqrt()


def _ending(zero: weakref.ref[Zero]) -> Callable[[bool], None]:
    def end(is_whole: bool) -> None:
        if (owner := zero()) is not None:
            owner._end_pass(is_whole)

    return end


def _arrival_hook(zero: weakref.ref[Zero], number: int) -> Callable[[Tensor], None]:
    def arrive(parameter: Tensor) -> None:
        owner = zero()
        if owner is not None:
            owner._arrive(owner._slots[number], parameter)

    return arrive

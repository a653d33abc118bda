"""Three clipped AdamW steps, by `Zero` on the ranks of a layout and by plain torch in one process, to be compared.

The global batch is a pure function of the step: (samples, seq, width) inputs and targets and a mask of the valid
tokens, of which some samples have none, so ranks and micro-batches have unequal counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.spec import init_parameters, param_specs
from megalite.weight_grad import WeightGradStore
from megalite.zero import Zero

SAMPLES, SEQ, WIDTH = 16, 4, 8
STEPS, LR, DECAY, MAX_NORM = 3, 0.05, 0.1, 0.5
Build = Callable[[Mesh], nn.Module]
Passes = Callable[[nn.Module, list[Callable[[], Tensor]]], None]


class Batch(NamedTuple):
    x: Tensor
    target: Tensor
    mask: Tensor

    def part(self, part: int, parts: int) -> Batch:
        return Batch(*(tensor.chunk(parts)[part] for tensor in self))

    def loss(self, model: nn.Module) -> Tensor:
        """Summed over valid tokens; the caller divides by the tokens of the global batch."""
        return (((model(self.x) - self.target) ** 2).sum(-1) * self.mask).sum()


class Record(NamedTuple):
    """One rank's raw gradients and norm of each step, and the weights at the end; boxes: its part of each parameter."""

    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]
    boxes: dict[str, tuple[slice, ...]]


def global_batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(step)
    x, target = torch.randn(2, SAMPLES, SEQ, WIDTH, dtype=torch.float64, generator=generator)
    mask = torch.rand(SAMPLES, SEQ, generator=generator) < 0.6
    mask[SAMPLES // 2 : SAMPLES * 3 // 4] = False  # at dp=4 all that one rank has, at dp=2 two micro-batches of four
    return Batch(x, target, mask)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    groups = [group | {"weight_decay": DECAY if group["decay"] else 0.0} for group in groups]
    return torch.optim.AdamW(groups, lr=LR)


def one_by_one(model: nn.Module, losses: list[Callable[[], Tensor]]) -> None:
    """Each micro-batch forward and backward: what `passes` is elsewhere is another order of the same work."""
    for loss in losses:
        loss().backward()


def put_off(model: nn.Module, losses: list[Callable[[], Tensor]]) -> None:
    """Weight gradients are put off until each micro-batch's end."""
    for loss in losses:
        store = WeightGradStore()
        with store.open():
            loss().backward()
        assert len(store)
        store.run()


def train(
    build: Build,
    layout: Layout | Mesh,
    microbatches: int | Sequence[int],
    options: dict[str, Any],
    passes: Passes = one_by_one,
) -> Record:
    """What one rank of the layout does. passes: takes the micro-batches of a step, each a function that gives its loss,
    through forward and backward."""
    torch.manual_seed(0)
    mesh = layout if isinstance(layout, Mesh) else Mesh.build(layout)
    model = build(mesh)
    zero = Zero(model, mesh, **{"optimizer": adamw, "seed": 7} | options)
    boxes = {name: spec.box() for name, spec in param_specs(model).items()}
    record = Record([], [], {}, boxes)
    for step in range(STEPS):
        count = microbatches if isinstance(microbatches, int) else microbatches[step]
        batch = global_batch(step)
        tokens = batch.mask.sum()
        mine = batch.part(mesh.data().rank, mesh.data().size)
        parts = [mine.part(index, count) for index in range(count)]
        zero.begin(microbatches=count)
        passes(model, [partial(_mean_loss, model, part, tokens) for part in parts])
        record.gradients.append({name: gradient.clone() for name, gradient in zero.raw_gradients().items()})
        record.norms.append(zero.step(max_norm=MAX_NORM).item())
    with zero.gathered():
        record.weights.update({name: p.detach().clone() for name, p in model.named_parameters()})
    return record


def _mean_loss(model: nn.Module, part: Batch, tokens: Tensor) -> Tensor:
    return part.loss(model) / tokens


def reference(build: Build, parts: int = 1) -> Record:
    """One process, by torch's own optimizer and clipping; `parts` > 1 takes the batch in so many pieces."""
    torch.manual_seed(0)
    model = build(Mesh.build())
    init_parameters(model, 7)
    specs, parameters = param_specs(model), dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    groups = [{"params": [trained[n] for n in trained if specs[n].decay == d], "decay": d} for d in (True, False)]
    optimizer = adamw(groups)
    record = Record([], [], {}, {})
    for step in range(STEPS):
        batch = global_batch(step)
        tokens = batch.mask.sum()
        for part in range(parts):
            (batch.part(part, parts).loss(model) / tokens).backward()
        for parameter in trained.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        record.gradients.append({name: p.grad.clone() for name, p in trained.items() if p.grad is not None})
        record.norms.append(nn.utils.clip_grad_norm_(trained.values(), MAX_NORM).item())
        optimizer.step()
        optimizer.zero_grad()
    record.weights.update({name: p.detach().clone() for name, p in parameters.items()})
    return record


def assert_equals_one_process(records: Sequence[Record], one: Record) -> None:
    """Each rank's part of each raw gradient, the norm, and the weights after the last step.

    To 1e-10 of the larger of the tensor's norm and 1e-3 of the global one: a tensor of zeros has its rounding from the
    others. Replicas must be equal to the bit.
    """
    for record in records:
        for step, gradients in enumerate(record.gradients):
            assert gradients.keys() == one.gradients[step].keys()
            assert abs(record.norms[step] - one.norms[step]) <= 1e-10 * one.norms[step], "norm"
            for name, gradient in gradients.items():
                expected = one.gradients[step][name][record.boxes[name]]
                scale = max(one.gradients[step][name].norm().item(), 1e-3 * one.norms[step])
                assert (gradient - expected).norm().item() <= 1e-10 * scale, f"gradient of {name} in step {step}"
        for name, weight in record.weights.items():
            expected = one.weights[name][record.boxes[name]]
            assert (weight - expected).norm().item() <= 1e-10 * max(one.weights[name].norm().item(), 1e-3), name
    for record in records[1:]:
        for name, weight in record.weights.items():
            if record.boxes[name] == records[0].boxes[name]:
                assert torch.equal(weight, records[0].weights[name]), f"replicas of {name} have drifted apart"


def plain_mlp(mesh: Mesh) -> nn.Module:
    """Plain modules: a parameter without a spec counts as replicated."""
    layers = [nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH)]
    return nn.Sequential(*layers).double()

"""Small stages for the laws of the pipeline, and what one process makes of them.

A model is a list of *bodies*, modules from activation to activation; the first stage reads the micro-batch's x, the
last gives the summed squared distance to its target, or to as many entries of it as there are. Every weight is drawn
from the number of its stage, so each rank builds its own stages alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.layers.linear import ColumnParallelLinear
from megalite.mesh import Axis, Layout, Mesh
from tests.law import assert_equal

WIDTH, ROWS = 6, 2
LENGTHS = (3, 3, 5, 3, 4)  # of the micro-batches, over and over: the first two alike, then others, then one again


class Example(NamedTuple):
    """A micro-batch. x, target: (rows, length, width). uses_all: whether a stage may use all of its layers."""

    x: Tensor
    target: Tensor
    uses_all: bool = True


def examples(count: int, *, step: int = 0, lengths: Sequence[int] = LENGTHS) -> list[Example]:
    generator = torch.Generator().manual_seed(step)
    found = []
    for number in range(count):
        shape = (2, ROWS, lengths[number % len(lengths)], WIDTH)
        found.append(Example(*torch.randn(shape, dtype=torch.float64, generator=generator)))
    return found


def linear(*, defers: bool = True, dtype: torch.dtype = torch.float64) -> nn.Module:
    if defers:
        return ColumnParallelLinear(WIDTH, WIDTH, tp=Axis("tp"), dtype=dtype)
    return nn.Linear(WIDTH, WIDTH, dtype=dtype)


class Layer(nn.Module):
    """x + tanh(linear(norm(x))). The norm's gradients are never put off, the linear's unless it is plain."""

    def __init__(self, *, defers: bool = True) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH, dtype=torch.float64), linear(defers=defers)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Body(nn.Sequential):
    def __init__(self, layers: int = 2, *, defers: bool = True) -> None:
        super().__init__(*(Layer(defers=defers) for _ in range(layers)))


class Stage(nn.Module):
    """number: of `count` stages; its parameters' names bear it."""

    def __init__(self, body: nn.Module, number: int, count: int) -> None:
        super().__init__()
        self.bodies = nn.ModuleDict({str(number): body})
        self.is_first, self.is_last = number == 0, number == count - 1

    def forward(self, x: Tensor | None, example: Example) -> Tensor:
        assert (x is None) == self.is_first
        (body,) = self.bodies.values()
        y = body(example.x if x is None else x)
        if not self.is_last:
            return y
        return (y - example.target.flatten()[: y.numel()].view(y.shape)).square().sum()


Bodies = Sequence[Callable[[], nn.Module]]
"""What makes the body of each stage."""


def build(bodies: Bodies, numbers: Sequence[int]) -> dict[int, nn.Module]:
    """The stages of these numbers."""
    found: dict[int, nn.Module] = {}
    for number in numbers:
        torch.manual_seed(number)
        found[number] = Stage(bodies[number](), number, len(bodies))
    return found


class Result(NamedTuple):
    """loss of a step; gradients: (stage, name) -> of each trained parameter, zeros if none came."""

    loss: Tensor
    gradients: dict[tuple[int, str], Tensor]


def take_gradients(stages: Mapping[int, nn.Module]) -> dict[tuple[int, str], Tensor]:
    """The gradients since the last call."""
    found = {}
    for number, stage in stages.items():
        for name, parameter in stage.named_parameters():
            if parameter.requires_grad:
                found[number, name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            else:
                assert parameter.grad is None, f"{name} is frozen"
            parameter.grad = None
    return found


def one_process(stages: Mapping[int, nn.Module], batch: Sequence[Example], *, denominator: float = 1.0) -> Result:
    """The law's other side: all stages one after the other, plain backward."""
    total = torch.zeros((), dtype=torch.float64)
    for example in batch:
        x: Tensor | None = None
        for stage in stages.values():
            x = stage(x, example)
        assert x is not None
        if x.requires_grad:
            (x / denominator).backward()
        total += x.detach().double() / denominator
    return Result(total, take_gradients(stages))


def assert_equals(results: Sequence[Result], one: Result, what: str) -> None:
    """Of all ranks of a pipeline: each has the loss, and together they have each gradient once."""
    found: dict[tuple[int, str], Tensor] = {}
    for result in results:
        assert torch.equal(result.loss, results[0].loss), f"{what}: the loss differs from rank to rank"
        assert not found.keys() & result.gradients.keys()
        found |= result.gradients
    assert_equal(results[0].loss, one.loss, f"{what}: loss")
    assert found.keys() == one.gradients.keys()
    for (stage, name), gradient in one.gradients.items():
        assert_equal(found[stage, name], gradient, f"{what}: gradient of {name} in stage {stage}")


def pipeline_axis() -> Axis:
    """All ranks of this world as one pipeline."""
    return Mesh.build(Layout(pp=dist.get_world_size())).pp


def end_waits_after(seconds: int) -> None:
    """Groups that are made from here on end a wait with an error after so long."""
    limit = timedelta(seconds=seconds)
    dist.distributed_c10d._set_pg_timeout(limit, dist.group.WORLD)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    backend.options._timeout = limit

"""Small modules whose parameters are replicated, cut, or summands, for the laws of `Zero`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite import comm
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.mesh import Axis, Mesh
from megalite.spec import ParallelModule, ParamSpec, normal, ones
from tests.zero.training import WIDTH


class Scale(ParallelModule):
    """A weight a channel, like a norm's; its gradient is a hundred times as large as it would be, so errors show."""

    def __init__(self, *, partial: tuple[Axis, ...]) -> None:
        super().__init__()
        spec = ParamSpec((WIDTH,), ones, partial=partial, decay=False)
        self.weight = self.declare("weight", spec, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + 100 * (self.weight - 1))


class ParallelMLP(ParallelModule):
    """enter -> split -> (scale -> column -> tanh -> row), twice -> gather -> leave; split and gather only with sp."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool, partial: bool | None = None) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = mesh.tp, sequence_parallel
        summed = (mesh.tp,) if (sequence_parallel if partial is None else partial) else ()
        options = {"tp": mesh.tp, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
        self.enter = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                Scale(partial=summed),
                ColumnParallelLinear(WIDTH, 16, **options),
                nn.Tanh(),
                RowParallelLinear(16, WIDTH, **options),
            )
            for _ in range(2)
        )
        self.leave = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.enter(x))
        if self.sequence_parallel:
            x = comm.split(x, self.tp, -2)
        for block in self.blocks:
            x = x + block(x)
        if self.sequence_parallel:
            x = comm.gather(x, self.tp, -2)
        return self.leave(x)


class Weights(ParallelModule):
    """Parameters of given specs whose gradient is whatever `forward(**gradients)` is told: sum of weight * gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64, **specs: ParamSpec) -> None:
        super().__init__()
        for name, spec in specs.items():
            self.declare(name, spec, dtype=dtype)

    def forward(self, **gradients: Tensor | float) -> Tensor:
        total = sum((getattr(self, name) * gradient).sum() for name, gradient in gradients.items())
        assert isinstance(total, Tensor)
        return total


def matrix(*shape: int, **options) -> ParamSpec:
    return ParamSpec(shape, normal(1.0), **options)

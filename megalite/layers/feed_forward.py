"""The MLP of a Block: up, nonlinearity, down; its inside cut over the tensor axis."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.layers.recompute import Recompute
from megalite.mesh import Axis
from megalite.spec import Init


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The nonlinearity by its Hugging Face name. ValueError for another."""
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
    }
    if name not in known:
        raise ValueError(f"model.hidden_act={name} is unknown; take one of {', '.join(known)}")
    return known[name]


class FeedForward(nn.Module):
    """down(act(up x)), or gated down(act(gate x) * up x): with silu this is SwiGLU (arXiv:2002.05202).

    x: (batch, seq[/tp], hidden) -> the same. Gate and up are one weight (2, ffn, hidden), cut along ffn, so that each
    rank has the same part of both. Raises ValueError if tp does not divide ffn.
    """

    def __init__(
        self,
        hidden: int,
        ffn: int,
        *,
        tp: Axis,
        act: str = "silu",
        gated: bool = True,
        bias: bool = False,
        sequence_parallel: bool = False,
        init: Init | None = None,
        out_init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        layer: int = 0,
        recompute: Recompute | None = None,
    ) -> None:
        super().__init__()
        self.act, self.gated = activation(act), gated
        self.layer, self.recompute = layer, recompute or Recompute("none")
        parts = 2 if gated else 1
        self.up = ColumnParallelLinear(
            hidden, parts * ffn, bias, device, dtype, tp=tp, sequence_parallel=sequence_parallel,
            out_shape=(parts, ffn), cut_dim=1, matrices={0: (1,) * parts}, init=init,
        )  # fmt: skip
        self.down = RowParallelLinear(
            ffn, hidden, bias, device, dtype, tp=tp, sequence_parallel=sequence_parallel, init=out_init
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.recompute.call("mlp", self.layer, self._forward, x)

    def _forward(self, x: Tensor) -> Tensor:
        return self.recompute.call("activation", self.layer, self._activate, self.up(x), into=self.down)

    def _activate(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.act(x)
        gate, up = x.chunk(2, dim=-1)
        return self.act(gate) * up

"""The deep MLP on which tensor and data parallelism are taught, cut as Megatron-LM cuts a transformer's MLP."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.comm import gather
from megalite.layers.feed_forward import activation
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.mesh import Mesh
from megalite.models.config import MLPConfig
from megalite.models.microbatch import VectorMicrobatch
from megalite.spec import normal


class MLP(nn.Module):
    """num_hidden_layers times x <- act(x W^T), every W (hidden, hidden), no bias.

    Odd layers are cut along their outputs, even ones along their inputs, so that a pair of them takes one all-reduce
    forward and one backward; an unpaired last one is gathered. What is between a pair, (batch, hidden/tp), is cut.
    """

    def __init__(
        self,
        config: MLPConfig,
        *,
        mesh: Mesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        tp = (mesh or Mesh.build()).tp
        config.validate_cut(tp.size, sequence_parallel=False, seq_len=1)
        self.config, self.tp = config, tp
        self.act = activation(config.hidden_act)
        init = normal(config.initializer_range)
        kinds = (ColumnParallelLinear, RowParallelLinear)
        self.layers = nn.ModuleList(
            kinds[index % 2](config.hidden_size, config.hidden_size, False, device, dtype, tp=tp, init=init)
            for index in range(config.num_hidden_layers)
        )

    def outputs(self, inputs: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden), equal on all ranks of tp."""
        x = inputs
        for layer in self.layers:
            x = self.act(layer(x))
        return gather(x, self.tp, -1) if len(self.layers) % 2 else x

    def forward(self, activation: Tensor | None, microbatch: VectorMicrobatch) -> Tensor:
        """The sum of squared errors over this micro-batch, a scalar; the caller divides by the number of entries."""
        x = microbatch.inputs if activation is None else activation
        return (self.outputs(x) - microbatch.targets).square().sum()

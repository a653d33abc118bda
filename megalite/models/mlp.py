"""The deep MLP on which tensor and data parallelism are taught, cut as Megatron-LM cuts a transformer's MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import gather
from megalite.layers.feed_forward import activation
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.mesh import Mesh
from megalite.models.config import MLPConfig
from megalite.models.microbatch import VectorMicrobatch
from megalite.models.part import Part
from megalite.spec import normal

_KINDS = (ColumnParallelLinear, RowParallelLinear)


class MLP(nn.Module):
    """num_hidden_layers times x <- act(x W^T), every W (hidden, hidden), no bias.

    Odd layers are cut along their outputs, even ones along their inputs, so that a pair of them takes one all-reduce
    forward and one backward; an unpaired last one is gathered. What is between a pair, (batch, hidden/tp), is cut.
    part: what of the model this is, a pipeline stage; None = all. (activation | None, microbatch) -> activation, or the
    loss on the last. One that ends within a pair hands the cut activation over: each rank of tp has its own.
    Raises ValueError, naming the config key, where tp cannot cut the layers or a first stage has none.
    """

    def __init__(
        self,
        config: MLPConfig,
        *,
        mesh: Mesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        part: Part | None = None,
    ) -> None:
        super().__init__()
        tp = (mesh or Mesh.build()).tp
        config.validate_cut(tp.size, sequence_parallel=False, seq_len=1)
        self.config, self.tp = config, tp
        self.part = part = part or Part(range(config.num_hidden_layers))
        if part.is_first and not part.layers:
            raise ValueError(
                "the first stage has no layer, and an MLP has no embedding: its entry of pipeline.split must be at "
                "least 1, and pipeline.embedding_layers below a stage's share"
            )
        self.act = activation(config.hidden_act)
        how: dict[str, Any] = {"bias": False, "tp": tp, "init": normal(config.initializer_range)}
        how |= {"device": device, "dtype": dtype}
        width = config.hidden_size
        self.layers = nn.ModuleDict({str(layer): _KINDS[layer % 2](width, width, **how) for layer in part.layers})

    def outputs(self, inputs: Tensor) -> Tensor:
        """(batch, hidden) -> (batch, hidden), equal on all ranks of tp; of a part, what the next one reads."""
        x = inputs
        for layer in self.layers.values():
            x = self.act(layer(x))
        ends_cut = self.part.is_last and self.config.num_hidden_layers % 2
        return gather(x, self.tp, -1) if ends_cut else x

    def forward(self, activation: Tensor | None, microbatch: VectorMicrobatch) -> Tensor:
        """The sum of squared errors over this micro-batch, a scalar; the caller divides by the number of entries."""
        x = self.outputs(self._inputs(microbatch) if activation is None else activation)
        return (x - microbatch.targets).square().sum() if self.part.is_last else x

    def _inputs(self, microbatch: VectorMicrobatch) -> Tensor:
        if not self.part.is_first:
            raise ValueError(
                f"the stage of layers {list(self.part.layers)} is not the first: it takes an activation, not None"
            )
        return microbatch.inputs

"""From a configuration to a model on the meta device, and to Zero, which lays its parameters out and draws them."""

from __future__ import annotations

from dataclasses import asdict

import torch
from torch import nn

from megalite.layers import ColumnParallelLinear, RowParallelLinear
from megalite.layers.recompute import Recompute
from megalite.mesh import Mesh
from megalite.models.config import MLPConfig
from megalite.models.gpt import GPT, Block, LossOptions
from megalite.models.mlp import MLP
from megalite.train.config import Config
from megalite.train.optim import matrices, optimizer
from megalite.train.strict import ConfigError
from megalite.zero import Moments, Zero

UNITS = (Block, ColumnParallelLinear, RowParallelLinear)
"""What Zero reduces together: a GPT's Blocks (which hold the linears), the deep MLP's layers."""


def build_model(config: Config, *, mesh: Mesh) -> nn.Module:
    """This rank's part of the model; `model(None, microbatch)` gives the sum of the loss.

    Raises ConfigError for what only the layers know to be impossible, alike on all ranks.
    """
    try:
        return _build_model(config, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_model(config: Config, mesh: Mesh) -> nn.Module:
    dtype = getattr(torch, config.dtype)
    if isinstance(config.model, MLPConfig):
        return MLP(config.model, mesh=mesh, device="meta", dtype=dtype)
    assert config.layout.sequence_parallel is not None, "check() fills it in"
    return GPT(
        config.model,
        mesh=mesh,
        sequence_parallel=config.layout.sequence_parallel,
        recompute=Recompute(config.recompute, tuple(config.recompute_ops), config.recompute_every),
        loss=LossOptions(**asdict(config.loss)),
        seed=config.seed,
        device="meta",
        dtype=dtype,
    )


def build_zero(config: Config, model: nn.Module, *, mesh: Mesh, device: str) -> Zero:
    """Draws the weights, equal for every layout, and trains them; the model is on `device` from here on."""
    return Zero(
        model,
        mesh,
        stage=config.zero.stage,
        shard_over=config.zero.shard_over,
        prefetch=config.zero.prefetch,
        reshard=config.zero.released_after,
        offload=config.zero.offload,
        units=UNITS,
        optimizer=optimizer(config.optim),
        matrices=matrices(config.optim),
        lr_multipliers=config.optim.multipliers(),
        gradients=_half(config.precision.gradients),
        moments=Moments(
            _half(config.precision.moments), stochastic=config.precision.stochastic_rounding, seed=config.seed
        ),
        seed=config.seed,
        verify=config.verify,
        device=device,
    )


def _half(name: str | None) -> torch.dtype | None:
    return None if name is None else torch.bfloat16

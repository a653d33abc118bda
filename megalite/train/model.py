"""From a configuration to this rank's stages of a model on the meta device; to Zero, which lays their parameters out
and draws them; to the pipeline that works on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from megalite.layers import ColumnParallelLinear, RowParallelLinear
from megalite.layers.recompute import Recompute
from megalite.mesh import Mesh
from megalite.models import stages
from megalite.models.config import MLPConfig
from megalite.models.gpt import Block, LossOptions
from megalite.pipeline.execute import Around, Pipeline
from megalite.train.config import Config
from megalite.train.optim import matrices, optimizer
from megalite.train.placement import placement
from megalite.train.spans import microbatches, spans_of
from megalite.train.strict import ConfigError
from megalite.zero import Moments, Zero

UNITS = (Block, ColumnParallelLinear, RowParallelLinear)
"""What Zero reduces together: a GPT's Blocks (which hold the linears), the deep MLP's layers."""


def build_stages(config: Config, *, mesh: Mesh) -> dict[int, nn.Module]:
    """This rank's stages of the model, by number, on the meta device.

    Raises ConfigError for what only the layers know to be impossible, alike on all ranks.
    """
    try:
        return _build_stages(config, mesh)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _build_stages(config: Config, mesh: Mesh) -> dict[int, nn.Module]:
    cut = placement(config)
    how: dict[str, Any] = {"device": "meta", "dtype": getattr(torch, config.dtype)}
    if not isinstance(config.model, MLPConfig):
        assert config.layout.sequence_parallel is not None, "check() fills it in"
        how |= {
            "sequence_parallel": config.layout.sequence_parallel,
            "recompute": Recompute(config.recompute, tuple(config.recompute_ops), config.recompute_every),
            "loss": LossOptions(**asdict(config.loss)),
            "seed": config.seed,
        }
    return dict(stages(config.model, cut.parts_of(mesh.pp.rank), mesh=mesh, rank_of=cut.rank_of, **how))


def build_zero(config: Config, stages: Mapping[int, nn.Module], *, mesh: Mesh, device: str) -> Zero:
    """Draws the weights, equal for every layout, and trains them; the stages are on `device` from here on."""
    return Zero(
        list(stages.values()),
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


def build_pipeline(config: Config, stages: Mapping[int, nn.Module], *, mesh: Mesh, around: Around) -> Pipeline:
    """Works on the stages as configured. around: what is entered around each action, as `Profile.range`."""
    pipeline = Pipeline(stages, placement(config).schedule, pp=mesh.pp, around=around)
    pipeline.prepare(microbatches(config, spans_of(config)[0]))
    return pipeline


def _half(name: str | None) -> torch.dtype | None:
    return None if name is None else torch.bfloat16

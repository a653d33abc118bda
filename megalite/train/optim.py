"""The optimizer and the learning rate: what happens to a weight, whatever the layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megalite.train.config import OptimConfig
from megalite.zero import Adafactor, Muon

OptimizerFactory = Callable[[Sequence[dict[str, Any]]], torch.optim.Optimizer]


def optimizer(config: OptimConfig) -> OptimizerFactory:
    """A factory: groups [{"params": [...], "decay": bool}, ...] -> a torch optimizer over them.

    With muon and adafactor it is AdamW, for what `matrices` leaves.
    Weight decay is decoupled from the gradient in AdamW (arXiv:1711.05101); it is 0 in groups whose decay is False.
    Each group's lr is the schedule's peak until the loop sets it. An empty group, and an empty parameter, are legal.
    """

    def make(groups: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        decayed = [
            {
                **{key: value for key, value in group.items() if key != "decay"},
                "weight_decay": config.weight_decay if group["decay"] else 0.0,
            }
            for group in groups
        ]
        beta1, beta2 = config.betas
        if config.name == "sgd":
            return torch.optim.SGD(decayed, lr=config.lr, momentum=beta1, fused=_fusible(decayed))
        return torch.optim.AdamW(decayed, lr=config.lr, betas=(beta1, beta2), eps=config.eps, fused=_fusible(decayed))

    return make


def matrices(config: OptimConfig) -> Muon | Adafactor | None:
    """How matrices are updated where that is not elementwise."""
    shared: dict[str, Any] = {
        "lr": config.lr,
        "weight_decay": config.weight_decay,
        "exclude": tuple(config.not_matrices),
    }
    if config.name == "muon":
        return Muon(momentum=config.momentum, steps=config.newton_schulz_steps, **shared)
    return Adafactor(beta2_decay=config.beta2_decay, **shared) if config.name == "adafactor" else None


def learning_rate(config: OptimConfig, step: int, *, steps: int) -> float:
    """The learning rate of a step, from 1 to `steps`: a pure function, so a resumed run has the straight run's.

    Warm-up is the line from min_lr before the first step to lr at step warmup_steps. From there on it stays (constant),
    or comes down to min_lr at the last step: along a line (linear), half a cosine (cosine, arXiv:1608.03983), or, in
    the last decay_steps alone, along decay_shape (wsd: arXiv:2404.06395; its sqrt is 1 - sqrt, arXiv:2405.18392).
    Always within [min_lr, lr], and above 0 at the first step unless lr is 0, whatever the edges: a warm-up as long as
    the run never decays, a run of one step without warm-up takes lr, and a decay begins where warm-up ends at the
    earliest.
    """
    low, high = config.lowest_lr, config.lr
    if step < config.warmup_steps:
        return low + (high - low) * step / config.warmup_steps
    start = max(config.warmup_steps, 1)
    shape = config.schedule
    if shape == "wsd":
        decay_steps = max(steps // 10, 1) if config.decay_steps is None else config.decay_steps
        start, shape = max(start, steps - decay_steps), config.decay_shape
    progress = min(max(step - start, 0) / max(steps - start, 1), 1.0)
    return high - (high - low) * FALLEN[shape](progress)


FALLEN: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 0.0,
    "linear": lambda progress: progress,
    "cosine": lambda progress: (1 - math.cos(math.pi * progress)) / 2,
    "sqrt": math.sqrt,
}
"""How far the learning rate has come down from lr to min_lr, both in [0, 1]."""


def _fusible(groups: Sequence[dict[str, Any]]) -> bool:
    """Whether torch has one kernel for the whole update: on CPU and CUDA, for floating-point parameters."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    return all(p.device.type in ("cpu", "cuda") and p.is_floating_point() for p in parameters)

"""The loss over the validation part: the same samples, and so the same number, in every layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.train.batches import Batch


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], *, mesh: Mesh) -> float:
    """Mean loss over all summands (tokens that count) of all data ranks' batches: a mean of sums, never of means.

    `model(None, microbatch)` gives the sum over its summands. Dropout is off meanwhile. Every rank calls it, with
    equally many micro-batches. No summand at all gives 0.
    """
    was_training = model.training
    model.eval()
    loss, count = 0.0, 0
    for batch in batches:
        for microbatch in batch:
            loss += model(None, microbatch).item()
            count += microbatch.valid()
    model.train(was_training)
    device = next(model.parameters()).device
    total = start_all_reduce(torch.tensor([loss, count], dtype=torch.float64, device=device), mesh.data()).wait()
    return (total[0] / total[1].clamp(min=1)).item()

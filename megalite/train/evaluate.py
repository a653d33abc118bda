"""The loss over the validation part: the same samples, and so the same numbers, in every layout."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.models.microbatch import Microbatch
from megalite.pipeline.execute import Pipeline
from megalite.train.batches import Batch


@torch.no_grad()
def evaluate(pipeline: Pipeline, batches: Iterable[Batch], *, mesh: Mesh) -> dict[str, float]:
    """val/loss, the mean over all summands (tokens that count) of all data ranks' batches: of sums, never of means.

    In nats; for text also val/perplexity, its exponential, and val/bits_per_byte where it is known how many bytes the
    tokens stand for: the same text in other tokens can be compared by it. Dropout is off meanwhile. Every rank calls
    it, with equally many micro-batches; no summand gives 0.
    """
    modes = {stage: stage.training for stage in pipeline.stages.values()}
    for stage in modes:
        stage.eval()
    loss = count = label_bytes = 0.0
    is_text, bytes_known = False, True
    for batch in batches:
        total = pipeline.evaluate(batch)
        loss += total.item()
        for microbatch in batch:
            count += microbatch.valid()
            is_text = isinstance(microbatch, Microbatch)
            bytes_known = bytes_known and microbatch.label_bytes is not None
            label_bytes += microbatch.label_bytes or 0.0
    for stage, was_training in modes.items():
        stage.train(was_training)
    sums = torch.tensor([loss, count, label_bytes, not bytes_known], dtype=torch.float64, device=pipeline.device)
    sums = start_all_reduce(sums, mesh.data()).wait()
    loss, count, label_bytes, unknown = sums.tolist()
    mean = loss / max(count, 1.0)
    metrics = {"val/loss": mean}
    if is_text:
        metrics["val/perplexity"] = math.exp(mean) if mean < 700 else math.inf  # beyond, float64 overflows
    if is_text and not unknown and label_bytes:
        metrics["val/bits_per_byte"] = loss / math.log(2) / label_bytes
    return metrics

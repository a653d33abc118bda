"""The names of all that a run measures. docs/metrics.md says how each is computed; a test holds the two together.

A metric has a group and a name with its unit, `group/name`; a row is a mapping of names to numbers.
"""

from __future__ import annotations

from collections.abc import Mapping

from megalite.models.config import GPTConfig
from megalite.train.config import Config

METRICS: Mapping[str, str] = {
    "train/loss": "always",
    "train/grad_norm": "always",
    "train/lr": "always",
    "train/loss_scale": "precision fp16",
    "train/tokens": "always",
    "train/samples": "always",
    "perf/tokens_per_sec": "always",
    "perf/tokens_per_sec_per_rank": "always",
    "perf/step_seconds": "always",
    "perf/data_seconds": "always",
    "perf/wait_seconds": "always",
    "perf/mfu": "peak",
    "perf/slowest_rank": "ranks",
    "perf/step_seconds_max": "ranks",
    "perf/wait_seconds_min": "ranks",
    "perf/wait_seconds_max": "ranks",
    "memory/max_allocated_gib": "cuda",
    "memory/max_resident_gib": "cpu",
    "val/loss": "evaluation",
    "val/perplexity": "evaluation of tokens",
    "val/bits_per_byte": "evaluation of tokens",
}
"""Name -> in which runs it can occur: the occasions that `occurring` knows."""


def occurring(config: Config, *, device: str, world_size: int, peak_known: bool) -> list[str]:
    """The names that rows of such a run can have, in a fixed order."""
    evaluates = config.eval.every > 0
    occasions = {
        "always": True,
        "peak": peak_known,
        "ranks": looks_at_ranks(config, world_size),
        "cuda": device != "cpu",
        "cpu": device == "cpu",
        "evaluation": evaluates,
        "evaluation of tokens": evaluates and isinstance(config.model, GPTConfig),
        "precision fp16": config.precision.compute == "fp16",
    }
    return [name for name, occasion in METRICS.items() if occasions[occasion]]


def looks_at_ranks(config: Config, world_size: int) -> bool:
    """Whether the ranks' times are ever compared."""
    return world_size > 1 and config.log.ranks_every > 0

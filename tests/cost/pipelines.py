"""One rank of a pipeline as train.py builds it, and what its steps do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.pipeline.execute import Pipeline
from megalite.train.batches import start_count
from megalite.train.config import Config
from megalite.train.model import build_pipeline, build_stages, build_zero
from megalite.train.spans import microbatches, spans_of
from megalite.zero import Zero
from tests.cost.test_activations import a_microbatch


@dataclass
class Rank:
    """This rank of a run. config: as `check` gives it; on several ranks of pp with a micro_batch_size."""

    config: Config
    mesh: Mesh
    stages: dict[int, nn.Module]
    zero: Zero
    pipeline: Pipeline

    @classmethod
    def build(cls, config: Config, around: Callable[[Any], AbstractContextManager[Any]] = nullcontext) -> Rank:
        mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp * config.layout.pp))
        stages = build_stages(config, mesh=mesh)
        zero = build_zero(config, stages, mesh=mesh, device="cpu")
        return cls(config, mesh, stages, zero, build_pipeline(config, stages, mesh=mesh, around=around))

    def backward(self) -> Tensor:
        """Forward and backward of all micro-batches of a step; the loss."""
        number = microbatches(self.config, spans_of(self.config)[0])
        batch = [a_microbatch(self.config)] * number
        count = start_count(batch, mesh=self.mesh, device="cpu")
        self.zero.begin(microbatches=number, in_turns=True)
        told = {"last_backward": self.zero.last_backward, "announce": self.zero.announce}
        loss = self.pipeline.step(batch, denominator=count, **told)
        return start_all_reduce(loss, self.mesh.data()).wait()

    def step(self) -> None:
        """All of it, with the update."""
        self.backward()
        self.zero.step(max_norm=1.0)

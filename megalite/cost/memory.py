"""Bytes that one rank holds from step to step and at the end of a backward, by stage of Zero and by recipe: exact.

With n parameters in a unit, k ranks that share it, n' = n padded to a multiple of k, and e, g, o bytes of a weight, a
gradient and each of the optimizer's moments:

| stage | weights  | masters, where e < 4 | gradients between steps | at the end of a backward | moments |
|-------|----------|----------------------|-------------------------|--------------------------|---------|
| 0     | n e      | 4 n                  | n g                     | n g                      | n o     |
| 1     | n' e     | 4 n'/k               | n' g                    | n' g                     | n o/k   |
| 2     | n' e     | 4 n'/k               | none                    | n' g/k                   | n o/k   |
| 3     | n' e/k   | 4 n'/k               | none                    | n' g/k                   | n o/k   |

(arXiv:1910.02054, section 5.) Padding has no moments, so the last of the k ranks may have a few less. What lies on top
within a step, activations among it, is in `megalite.cost.peak`.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.cost.weights import Cut, units_of
from megalite.models.config import GPTConfig, MLPConfig

GIB = 2**30


@dataclass(frozen=True)
class Recipe:
    """Bytes of a weight, of a gradient that is added up, and of each moment of the optimizer."""

    weights: int
    gradients: int
    moments: int

    @property
    def masters(self) -> int:
        """Of the fp32 copy behind half-precision weights; others are their own masters."""
        return 4 if self.weights < 4 else 0

    @property
    def wide(self) -> int:
        """Of what is updated."""
        return self.masters or self.weights

    def per_parameter(self, *, moments: int = 2) -> int:
        """All of it; moments: how many the optimizer keeps (AdamW 2)."""
        return self.weights + self.masters + self.gradients + moments * self.moments


RECIPES = {
    "bf16": Recipe(2, 4, 4),
    "bf16-16-bytes": Recipe(2, 2, 4),
    "bf16-12-bytes": Recipe(2, 2, 2),
    "fp32": Recipe(4, 4, 4),
    "fp64": Recipe(8, 8, 8),
}
"""Those of configs/precision/, by their names: 18, 16, 12, 16 and 32 bytes a parameter with AdamW."""


@dataclass(frozen=True)
class Sharing:
    """How data ranks share what they hold, and which of them this is.

    stage 0 to 3; over: so many neighbouring ranks share; None = all data_ranks. rank: of these. The rest as in
    `megalite.train.config.ZeroConfig`; reshard as `megalite.zero.Zero` names it.
    """

    stage: int = 0
    data_ranks: int = 1
    over: int | None = None
    rank: int = 0
    prefetch: int = 1
    reshard: str = "forward"
    offload: bool = False

    @property
    def shards(self) -> int:
        return 1 if self.stage == 0 else self.over or self.data_ranks

    @property
    def replicas(self) -> int:
        return self.data_ranks // self.shards

    @property
    def spreads_weights(self) -> bool:
        return self.stage == 3 and self.shards > 1

    def padded(self, numel: int) -> int:
        """A unit's entries with those that make the shards equal."""
        return -(-numel // self.shards) * self.shards

    def share(self, numel: int) -> int:
        """What one rank has of it, padding included."""
        return self.padded(numel) // self.shards

    def trained_share(self, numel: int) -> int:
        """What this rank has of it, without padding."""
        share = self.share(numel)
        return min(max(numel - self.rank * share, 0), share)


@dataclass(frozen=True)
class State:
    """Bytes of one rank, exact but for the optimizer's step counters of a few bytes.

    gradients: at the end of a step's last backward, when the sums are there; gradients_between: from step to step.
    masters, moments: on the device; host: those of `zero.offload`, in the CPU's memory.
    """

    weights: int
    masters: int
    gradients: int
    gradients_between: int
    moments: int
    host: int = 0

    @property
    def held(self) -> int:
        """On the device, at the end of the last backward."""
        return self.weights + self.masters + self.gradients + self.moments

    @property
    def between(self) -> int:
        """On the device, from step to step."""
        return self.held - self.gradients + self.gradients_between


def state(model: GPTConfig | MLPConfig, cut: Cut, sharing: Sharing, recipe: Recipe, *, moments: int) -> State:
    """moments: numbers that the optimizer keeps for each weight (AdamW 2, SGD with momentum 1)."""
    sizes = units_of(model, cut)
    padded = sum(sharing.padded(unit.numel) * unit.count for unit in sizes)
    share = sum(sharing.share(unit.numel) * unit.count for unit in sizes)
    trained = sum(sharing.trained_share(unit.numel) * unit.count for unit in sizes)
    masters, kept = share * recipe.masters, trained * moments * recipe.moments
    host = 0
    if sharing.offload:  # masters of their own even in fp32, which the CPU then updates
        host, masters, kept = share * recipe.wide + kept, 0, 0
    by_shard = sharing.stage >= 2
    return State(
        weights=(share if sharing.spreads_weights else padded) * recipe.weights,
        masters=masters,
        gradients=(share if by_shard else padded) * recipe.gradients,
        gradients_between=0 if by_shard else padded * recipe.gradients,
        moments=kept,
        host=host,
    )

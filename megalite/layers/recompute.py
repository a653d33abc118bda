"""Recompute: what a Block computes again in backward in place of storing it.

Nothing has to be restored around the second run: dropout is a pure function of its key, and no layer draws from a
generator. Collectives inside are run again too, by all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from torch.utils.checkpoint import checkpoint

T = TypeVar("T")
MODES = ("none", "selective", "full")
OPS = ("attention", "norm", "activation")


@dataclass(frozen=True)
class Recompute:
    """Which parts of which Blocks keep their input alone.

    mode: "none"; "full": a whole Block; "selective": the `ops` of it, of "attention" (scores, softmax, values: the part
    that grows with seq^2, arXiv:2205.05198 section 5), "norm" and "activation" (the MLP's nonlinearity); () means
    attention. every: in each every-th Block, from the first. Raises ValueError for other names.
    """

    mode: str
    ops: tuple[str, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"recompute={self.mode} is unknown; take one of {', '.join(MODES)}")
        for op in self.ops:
            if op not in OPS:
                raise ValueError(f"recompute_ops has {op}; take from {', '.join(OPS)}")
        if self.every < 1:
            raise ValueError(f"recompute_every={self.every} must be at least 1")

    def wraps(self, op: str, layer: int) -> bool:
        """Whether `op` ("block" or one of OPS) of this layer is computed again."""
        if layer % self.every or self.mode == "none":
            return False
        return op == "block" if self.mode == "full" else op in (self.ops or ("attention",))

    def call(self, op: str, layer: int, function: Callable[..., T], *args: object) -> T:
        """function(*args), storing nothing inside if it is to be computed again."""
        if not self.wraps(op, layer):
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)

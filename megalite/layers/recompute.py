"""What a block computes again in backward in place of storing it.

Recomputation trades work for memory. `full` keeps each block's input alone, for about a third more work; `selective`
does it for parts that are large and cheap, by default the core of attention, whose scores grow with the square of the
sequence (Korthikanti et al., arXiv:2205.05198, section 5). A fused attention kernel stores no scores: with it, norm and
activation are the better choice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

MODES = ("none", "selective", "full")
OPS = ("norm", "attention", "activation", "mlp")
DEFAULT_OPS = ("attention",)
BLOCK = "block"


def _same(x: Tensor) -> Tensor:
    return x


@dataclass(frozen=True)
class Recompute:
    """Which parts of which layers are computed again.

    mode: "none"; "selective", the `ops` (default attention); "full", whole blocks. every: in layers 0, every, 2 every,
    and so on.
    ops: norm, the norms before a sublayer; attention, its core from q, k, v to the values (scores, softmax, dropout,
    product); activation, the nonlinearity of the MLP with its gate; mlp, all of the MLP, its projections and their
    collectives included, so that it contains activation.
    Raises ValueError for what is unknown or does not go together.
    """

    mode: str = "none"
    ops: tuple[str, ...] = ()
    every: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "ops", tuple(self.ops))
        if self.mode not in MODES:
            raise ValueError(f"recompute={self.mode} is unknown; take one of {', '.join(MODES)}")
        if self.mode != "selective" and self.ops:
            raise ValueError(f"recompute={self.mode} takes no recompute_ops, and has {list(self.ops)}; take selective")
        unknown = [op for op in self.ops if op not in OPS]
        if unknown:
            raise ValueError(f"recompute_ops has {unknown[0]}, which is unknown; take from {', '.join(OPS)}")
        if {"mlp", "activation"} <= set(self.ops):
            raise ValueError("recompute_ops has both mlp and activation, and mlp contains activation; take one")
        if self.every < 1:
            raise ValueError(f"recompute_every={self.every} must be at least 1")

    def wraps(self, op: str, layer: int) -> bool:
        """Whether `op` of this layer, one of OPS or "block", is computed again."""
        assert op in (*OPS, BLOCK), f"no block has the op {op}"
        chosen = {"none": (), "selective": self.ops or DEFAULT_OPS, "full": (BLOCK,)}[self.mode]
        return op in chosen and layer % self.every == 0

    def call(
        self, op: str, layer: int, function: Callable[..., Tensor], *args: Any, into: Callable[[Tensor], Tensor] = _same
    ) -> Tensor:
        """into(function(*args)); if `wraps(op, layer)`, function is computed again in backward. The same bits.

        What function stored is not stored, and if `into` (a projection that follows a norm) stores function's result,
        neither is that, at the price of computing function once more. Its arguments are. `into` itself is not repeated.
        The function may communicate, since each rank repeats the same, and must depend on nothing that changes before
        backward. The state of random generators is not kept: dropout is a pure function (`megalite.layers.dropout`).
        """
        if not self.wraps(op, layer):
            return into(function(*args))
        y = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
        place = _place(y)

        def pack(stored: Tensor) -> Tensor | None:
            return None if _place(stored) == place else stored

        @torch.no_grad()
        def unpack(stored: Tensor | None) -> Tensor:
            return function(*args) if stored is None else stored

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            return into(y)  # y lives until here, so nothing else can have been at its place


def _place(x: Tensor) -> tuple[Any, ...]:
    """Tells tensors apart while they live, without keeping them alive."""
    return x.data_ptr(), x.dtype, x.shape, x.stride()

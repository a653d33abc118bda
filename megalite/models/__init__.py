"""Models: their shapes (`config`, no torch), what one backward pass works on (`microbatch`), GPT and deep MLP."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.models.config import GPTConfig, MLPConfig, RopeScaling
    from megalite.models.gpt import GPT
    from megalite.models.microbatch import Microbatch, VectorMicrobatch
    from megalite.models.mlp import MLP

__all__ = ["GPT", "MLP", "GPTConfig", "MLPConfig", "Microbatch", "RopeScaling", "VectorMicrobatch"]

_HOME = {
    "GPT": "gpt",
    "MLP": "mlp",
    "GPTConfig": "config",
    "MLPConfig": "config",
    "Microbatch": "microbatch",
    "RopeScaling": "config",
    "VectorMicrobatch": "microbatch",
}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: the configs alone cost no import of torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

"""Models: their shapes (`config`, no torch), what one backward pass works on (`microbatch`), GPT and deep MLP,
whole or as the stages of a pipeline (`part`, no torch; `build`)."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.models.build import stages
    from megalite.models.config import GPTConfig, MLPConfig, RopeScaling
    from megalite.models.gpt import GPT
    from megalite.models.microbatch import Microbatch, VectorMicrobatch
    from megalite.models.mlp import MLP
    from megalite.models.part import Part

__all__ = ["GPT", "MLP", "GPTConfig", "MLPConfig", "Microbatch", "Part", "RopeScaling", "VectorMicrobatch", "stages"]

_HOME = {
    "GPT": "gpt",
    "MLP": "mlp",
    "GPTConfig": "config",
    "MLPConfig": "config",
    "Microbatch": "microbatch",
    "Part": "part",
    "RopeScaling": "config",
    "VectorMicrobatch": "microbatch",
    "stages": "build",
}


def __getattr__(name: str) -> object:
    """Import what is asked for when it is asked for: the configs alone cost no import of torch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

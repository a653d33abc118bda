"""megalite: write the model once; the layout is a flag.

The public names, each imported when it is first asked for (PEP 562), so that `import megalite` itself costs no import
of torch: what needs only sizes and config keys, such as `--help` and the planner, stays fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from megalite.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
        SequenceParallelLayerNorm,
        SequenceParallelRMSNorm,
        VocabParallelEmbedding,
        vocab_parallel_cross_entropy,
    )
    from megalite.layers.defer import defer
    from megalite.mesh import Axis, Layout, Mesh
    from megalite.models.config import GPTConfig, MLPConfig
    from megalite.models.gpt import GPT
    from megalite.models.mlp import MLP
    from megalite.pipeline.execute import Pipeline
    from megalite.spec import Init, ParallelModule, ParamSpec, init_parameters, param_specs
    from megalite.styles import parallelize
    from megalite.weight_grad import WeightGradStore
    from megalite.zero import Zero

__all__ = [
    "GPT",
    "MLP",
    "Axis",
    "ColumnParallelLinear",
    "GPTConfig",
    "Init",
    "Layout",
    "MLPConfig",
    "Mesh",
    "ParallelModule",
    "ParamSpec",
    "Pipeline",
    "RowParallelLinear",
    "SequenceParallelLayerNorm",
    "SequenceParallelRMSNorm",
    "VocabParallelEmbedding",
    "WeightGradStore",
    "Zero",
    "defer",
    "init_parameters",
    "parallelize",
    "param_specs",
    "vocab_parallel_cross_entropy",
]

_HOME = {
    "megalite.layers": (
        "ColumnParallelLinear",
        "RowParallelLinear",
        "SequenceParallelLayerNorm",
        "SequenceParallelRMSNorm",
        "VocabParallelEmbedding",
        "vocab_parallel_cross_entropy",
    ),
    "megalite.layers.defer": ("defer",),
    "megalite.mesh": ("Axis", "Layout", "Mesh"),
    "megalite.models.config": ("GPTConfig", "MLPConfig"),
    "megalite.models.gpt": ("GPT",),
    "megalite.models.mlp": ("MLP",),
    "megalite.pipeline.execute": ("Pipeline",),
    "megalite.spec": ("Init", "ParallelModule", "ParamSpec", "init_parameters", "param_specs"),
    "megalite.styles": ("parallelize",),
    "megalite.weight_grad": ("WeightGradStore",),
    "megalite.zero": ("Zero",),
}


def __getattr__(name: str) -> object:
    """Import the module that holds `name` and keep what it gives, so this runs once a name."""
    for module, names in _HOME.items():
        if name in names:
            value = getattr(import_module(module), name)
            globals()[name] = value
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

"""Data parallelism: `Zero` owns the gradients, the master weights and the optimizer of the modules that it is given.

partition (modules -> units), unit (one flat buffer), agreement (the replicas before the first step), norm, verify,
watch (parameters between steps), zero (hooks, order, step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.zero.zero import Zero

__all__ = ["Zero"]


def __getattr__(name: str) -> object:
    """`Zero`, imported when it is first asked for, so that `import megalite.zero` costs no import of torch."""
    if name != "Zero":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalite.zero.zero import Zero

    return Zero

"""Data parallelism: `Zero` owns the gradients, the master weights and the optimizer of the modules that it is given.

partition, making (modules -> units), unit (one flat buffer, shared out by stage), flat, guard (weights that are not
whole), passes (backward passes), reductions (which unit is summed when), gathering (which is whole when), agreement
(the replicas before the first step), norm, verify, update (the optimizer), matrix, matrix_update (optimizers that see
whole matrices), muon, adafactor, watch (parameters between steps), zero (hooks and the step).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.zero.adafactor import Adafactor
    from megalite.zero.muon import Muon
    from megalite.zero.update import Moments
    from megalite.zero.zero import Zero

__all__ = ["Adafactor", "Moments", "Muon", "Zero"]


def __getattr__(name: str) -> object:
    """Imported when it is first asked for, so that `import megalite.zero` costs no import of torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megalite.zero import adafactor, muon, update, zero

    homes = {"Adafactor": adafactor, "Moments": update, "Muon": muon, "Zero": zero}
    return getattr(homes[name], name)

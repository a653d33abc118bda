"""Between steps: are the modules' parameters still those that `Zero` trains?

The optimizer updates flat buffers and modules compute with views of them. `model.double()`, or a load with
`assign=True`, cuts that tie: the loss comes from one set of weights, the updates go to another, and no error tells.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megalite.zero.partition import Held
from megalite.zero.unit import Slot


@dataclass(eq=False, slots=True)
class _Seen:
    """A parameter as it was when its gradients were first listened to.

    owners: where modules have it, held weakly. version: torch's count of writes, None if they reach the masters.
    """

    name: str
    owners: list[tuple[weakref.ref[nn.Module], str]]
    identity: int
    storage: int
    dtype: torch.dtype
    trained: bool
    version: int | None


class Watch:
    """Remembers every parameter, trained or not; `require_unchanged` compares. Some dictionary look-ups each, no sync.

    Parameters are known by `id` and not held: a weak reference to one would forbid torch to swap its contents.
    """

    def __init__(self, held: Sequence[Held], slots: Sequence[Slot]) -> None:
        by_name = {slot.name: slot for slot in slots}
        self._seen: list[_Seen] = []
        for one in held:
            parameter, slot = one.parameter, by_name.get(one.name)
            in_vain = slot is not None and _storage(slot.unit.masters) != _storage(slot.unit.weights.tensor)
            self._seen.append(
                _Seen(
                    one.name,
                    [(weakref.ref(module), attribute) for module, attribute in one.owners],
                    id(parameter),
                    _storage(parameter),
                    parameter.dtype,
                    slot is not None,
                    parameter._version if in_vain else None,
                )
            )

    def require_unchanged(self) -> None:
        """Raises RuntimeError, by name, for a parameter that was moved, frozen, unfrozen, or written in vain.

        A write through `parameter.data` is counted by nobody and not seen here.
        """
        for seen in self._seen:
            for owner, attribute in seen.owners:
                module = owner()
                if module is not None and (fault := _fault(seen, module._parameters.get(attribute))):
                    raise RuntimeError(f"parameter {seen.name} {fault}")


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _fault(seen: _Seen, now: nn.Parameter | None) -> str:
    """What has become of a parameter that it must not; empty if nothing."""
    if not seen.trained:
        if now is None or not now.requires_grad:
            return ""
        return "was frozen when Zero was built and is trainable now: call requires_grad_() before Zero is built"
    if now is None or id(now) != seen.identity or _storage(now) != seen.storage or now.dtype != seen.dtype:
        return (
            "is no longer a view of the flat weights that Zero updates, so that it would not be trained: convert, move "
            "and replace parameters (.to(), .double(), load_state_dict(assign=True)) before Zero is built"
        )
    if not now.requires_grad:
        return (
            "was trainable when Zero was built and is frozen now, yet momentum and weight decay would still move it: "
            "call requires_grad_(False) before Zero is built"
        )
    if seen.version is not None and now._version != seen.version:
        return (
            f"was written in {now.dtype} after Zero was built, and that is undone from its master weights: load "
            "weights before Zero is built"
        )
    return ""

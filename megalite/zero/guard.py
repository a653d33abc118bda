"""Reading a parameter whose weights are not whole: waited for while they are on their way, refused while released.

torch would read memory that is still being written, or crash the process on memory that is gone, without an error. So
such a parameter changes its class for one that is told of every torch function it is handed to. Views that somebody
else keeps cannot be guarded, nor can what hands a parameter to torch's C++ without asking it: torch.tensor(parameter),
new_tensor, and torch.func's transforms of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from megalite.zero.unit import Unit

_UNIT = "_megalite_unit"
_CLASS = "_megalite_class"


def guard(parameter: nn.Parameter, unit: Unit) -> None:
    """From here on a read of the parameter asks the unit first."""
    if not isinstance(parameter, _Guarded):
        parameter.__dict__[_UNIT], parameter.__dict__[_CLASS] = unit, type(parameter)
        parameter.__class__ = _guarded_class(type(parameter))


def unguard(parameter: nn.Parameter) -> None:
    """The parameter is what it was before."""
    if isinstance(parameter, _Guarded):
        parameter.__class__ = parameter.__dict__.pop(_CLASS)
        del parameter.__dict__[_UNIT]


class _Guarded(nn.Parameter):
    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _HARMLESS:
            for value in (*args, *(kwargs or {}).values()):
                for one in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(one, _Guarded):
                        one.__dict__[_UNIT].require_whole()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    # nn.Parameter's own look up the class of what they copy before they read it.
    def __deepcopy__(self, memo: Any) -> Any:
        self.__dict__[_UNIT].require_whole()
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.__dict__[_UNIT].require_whole()
        return self.__reduce_ex__(protocol)


def _guarded_class(kind: type) -> type:
    """A guarded class that is a subclass of the parameter's own, so that isinstance goes on holding."""
    if kind is nn.Parameter:
        return _Guarded
    return _CLASSES.setdefault(kind, type(f"Guarded{kind.__name__}", (_Guarded, kind), {}))


_CLASSES: dict[type, type] = {}

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "grad", "_version")
_FLAGS = ("is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_mkldnn", "itemsize", "nbytes")
_METHODS = (
    *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "data_ptr"),
    *("untyped_storage", "is_floating_point", "is_complex", "requires_grad_", "register_hook", "__len__"),
    *("register_post_accumulate_grad_hook", "_is_view", "retain_grad", "__hash__"),
)
_HARMLESS = {
    *(getattr(torch.Tensor, name).__get__ for name in (*_PROPERTIES, *_FLAGS)),
    *(getattr(torch.Tensor, name).__set__ for name in ("requires_grad", "grad")),
    *(getattr(torch.Tensor, name).__delete__ for name in ("grad",)),
    *(getattr(torch.Tensor, name) for name in _METHODS),
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.autograd.backward,  # of a weight gradient that was put off: it reads no weight
}

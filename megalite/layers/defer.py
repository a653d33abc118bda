"""`defer`: linears of torch whose weight gradients a `WeightGradStore` can put off, as those of megalite's layers."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.layers.linear import parallel_linear
from megalite.mesh import Axis

_ALONE = Axis("alone")


class DeferringLinear(nn.Linear):
    """nn.Linear, bit for bit, that looks for an open store in its backward. `defer` makes it; it is never built."""

    weight: nn.Parameter

    def forward(self, input: Tensor) -> Tensor:
        if input.is_meta:  # shapes alone, where autocast is unknown
            return super().forward(input)
        return parallel_linear(input, self.weight, self.bias, tp=_ALONE, enter="whole", leave="cut")


def defer(module: nn.Module) -> nn.Module:
    """Turns every plain nn.Linear of a module, itself included, into one that defers; in place, and returns it.

    For pipelines that split backward: what puts no weight gradient off has all of its work in B, and W is empty.
    Parameters, names in state_dict, hooks and bits stay as they are (but under autocast, gradients of several uses of
    one linear meet in its own precision, where torch adds them in half). Only the class changes, so a second call
    changes nothing; `parallelize` comes before. Left as they are: subclasses of nn.Linear, whose forward is their own
    (nn.MultiheadAttention's out_proj is one, and read rather than called), linears whose weight is computed from others
    (parametrisations, spectral and weight norm), and complex ones. A tensor hook on a weight is also called, by None,
    when its gradient is put off. What defers gives first derivatives only, none to torch.func.
    Raises ValueError if there is no plain nn.Linear.
    """
    linears = (one for one in module.modules() if type(one) is nn.Linear and "weight" in one._parameters)
    plain = [one for one in linears if not one.weight.is_complex()]
    if not plain and not any(isinstance(one, DeferringLinear) for one in module.modules()):
        raise ValueError(
            f"{type(module).__name__} has no plain nn.Linear whose weight gradient could be put off; megalite's own "
            "layers do so without defer()"
        )
    for one in plain:
        one.__class__ = DeferringLinear
    return module

"""What the styles of inputs do when a module is called, and what the first step must show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megalite import comm
from megalite.layers.rows import SEQUENCE_DIM
from megalite.mesh import Axis
from megalite.styles.sites import Site, Style

Hook = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def input_hook(path: str, style: Style, tp: Axis) -> Hook:
    """A forward pre-hook that brings the hidden states in: the first floating-point tensor among the arguments, in the
    order of the call, (..., seq, features). Its result is contiguous, as the module's own code may expect."""

    def enter(x: Tensor) -> Tensor:
        if style.word == "copy":
            return comm.copy(x, tp)
        if style.word == "gather_seq":
            return comm.all_gather(x, tp, SEQUENCE_DIM).contiguous()
        if style.word == "join_seq":
            return comm.gather(x, tp, SEQUENCE_DIM).contiguous()
        seq = x.shape[SEQUENCE_DIM]
        if seq % tp.size:
            raise ValueError(
                f"{path} ({style}): {seq} tokens cannot be cut over {tp.name}={tp.size}: "
                f"take a length that is a multiple of {tp.size}"
            )
        return comm.split(x, tp, SEQUENCE_DIM)

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        for place, value in enumerate(args):
            if _is_hidden(value):
                return (*args[:place], enter(value), *args[place + 1 :]), kwargs
        for name, value in kwargs.items():
            if _is_hidden(value):
                return args, kwargs | {name: enter(value)}
        raise ValueError(f"{path} ({style}): no argument is a floating-point tensor (..., seq, features)")

    return hook


def _is_hidden(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1


class FirstStep:
    """Watches the first forward of the whole module, then goes.

    Every site must be called, since a module whose weight somebody reads instead would be used in part for the whole;
    and where the sequence is cut must be as the order of registration has it. RuntimeError, naming the modules.
    """

    def __init__(self, module: nn.Module, sites: Sequence[Site]) -> None:
        self._missing = {site.path: site for site in sites}
        self._is_cut = False
        self._handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._begin, prepend=True),
            module.register_forward_hook(self._end),
        ]

    def watch(self, site: Site, module: nn.Module) -> None:
        """module: what stands at the site now. To be called before another hook of the site is registered."""
        self._handles.append(module.register_forward_pre_hook(lambda *_: self._call(site)))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._is_cut = False

    def _call(self, site: Site) -> None:
        self._missing.pop(site.path, None)
        if self._is_cut != site.was_cut:
            states = {True: "cut", False: "whole"}
            raise RuntimeError(
                f"{site} was called where the sequence is {states[self._is_cut]}, and by the order in which modules "
                f"are registered it is {states[site.was_cut]} there: register modules in the order of their use"
            )
        self._is_cut = site.stays_cut

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._missing:
            names = ", ".join(str(site) for site in self._missing.values())
            raise RuntimeError(
                f"not called in the first forward: {names}; whoever reads such a module's weight gets this rank's part "
                "of it for the whole: leave out its style"
            )
        for handle in self._handles:
            handle.remove()

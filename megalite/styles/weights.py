"""What is put in the place of a user's linears and embeddings, and how their parameters are cut.

A parameter keeps its logical name and shape: what a rank holds is told as a region of it, several where `column:N` cuts
each chunk of a fused weight (`megalite.spec.PartOf`). So a checkpoint is the same for every size of tp, 1 included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from megalite import comm
from megalite.layers.embedding import VocabParallelEmbedding, padded_size
from megalite.layers.linear import Enter, Leave, parallel_linear
from megalite.layers.rows import SEQUENCE_DIM
from megalite.mesh import Axis
from megalite.spec import ParallelModule, ParamSpec, PartOf
from megalite.styles.sites import Site, Style


class Region(NamedTuple):
    """A part of a user's parameter: the name that it is held under in place of the parameter's, and its spec."""

    name: str
    spec: ParamSpec


Regions = dict[str, list[Region]]  # by the name of the user's parameter


class LinearShape(NamedTuple):
    """transposed: the weight is stored (in, out), as by transformers' Conv1D, and not (out, in)."""

    in_features: int
    out_features: int
    transposed: bool


class CutLinear(ParallelModule):
    """y = x @ W.T + b with W cut along its outputs (column) or inputs (row), in the memory order of the module before.

    x: (..., seq, in), whole, or with enter="all_gather" (..., seq/tp, in); for a row (..., seq, in/tp) -> y:
    (..., seq, out/tp); with `gathers` and for a row (..., seq, out), or leaving by "reduce_scatter" (..., seq/tp, out).
    y is contiguous and may be written into, as that of a plain linear: the code around it may do either.
    """

    def __init__(self, shape: LinearShape, *, tp: Axis, enter: Enter, leave: Leave, gathers: bool) -> None:
        super().__init__()
        self.in_features, self.out_features, self.transposed = shape
        self.tp, self.enter, self.leave, self.gathers = tp, enter, leave, gathers
        self.parts: list[tuple[str, str | None]] = []  # names of the weight and bias of each chunk

    def hold(self, held: dict[str, list[nn.Parameter]], regions: Regions) -> None:
        for name, parts in regions.items():
            for region, parameter in zip(parts, held[name], strict=True):
                self.register_parameter(region.name, parameter)
                self.specs[region.name] = region.spec
        weights = [region.name for region in regions["weight"]]
        biases: list[str | None] = [region.name for region in regions.get("bias", [])]
        self.parts = list(zip(weights, biases or [None] * len(weights), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        enter = self.enter
        if len(self.parts) > 1 and enter != "whole":  # once for all chunks
            x = comm.copy(x, self.tp) if enter == "copy" else comm.all_gather(x, self.tp, SEQUENCE_DIM)
            enter = "whole"
        ys = [self._product(x, weight, bias, enter) for weight, bias in self.parts]
        y = ys[0] if len(ys) == 1 else torch.cat(ys, dim=-1)
        if self.gathers:
            y = comm.gather(y, self.tp, -1)[..., : self.out_features]
        y = y.contiguous()
        # The same memory, but no view to autograd, which forbids to write into a view that a function of ours has made;
        # nobody has stored y, so an activation in place is as right as after a plain linear.
        return torch.ops.aten._unsafe_view(y, y.shape)

    def _product(self, x: Tensor, weight: str, bias: str | None, enter: Enter) -> Tensor:
        matrix = self._parameters[weight]
        assert matrix is not None
        matrix = cast(nn.Parameter, matrix.t()) if self.transposed else matrix
        offset = None if bias is None else self._parameters[bias]
        return parallel_linear(x, matrix, offset, tp=self.tp, enter=enter, leave=self.leave)

    def extra_repr(self) -> str:
        chunks = f", chunks={len(self.parts)}" if len(self.parts) > 1 else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}{chunks}, enter={self.enter}, "
            f"leave={'gather' if self.gathers else self.leave}, {self.tp.name}={self.tp.size}"
        )


class CutEmbedding(VocabParallelEmbedding):
    """`VocabParallelEmbedding` in place of an nn.Embedding; with a padding_idx, that row gets no gradient from here."""

    def __init__(self, plain: nn.Embedding, *, tp: Axis) -> None:
        weight = plain.weight
        super().__init__(plain.num_embeddings, plain.embedding_dim, tp=tp, device="meta", dtype=weight.dtype)
        self.padding_idx = plain.padding_idx

    def hold(self, held: dict[str, list[nn.Parameter]], regions: Regions) -> None:
        (self.weight,), ((_, self.specs["weight"]),) = held["weight"], regions["weight"]

    def forward(self, ids: Tensor) -> Tensor:
        y = super().forward(ids)
        if self.padding_idx is None:
            return y
        return torch.where((ids == self.padding_idx).unsqueeze(-1), y.detach(), y)


def plan(site: Site, tp: Axis) -> Regions:
    """How the parameters of a site are cut. Raises ValueError if its style does not fit its type, or tp its sizes."""
    assert site.weights is not None
    word = site.weights.word
    if word in ("norm", "head_norm"):
        return _plan_norm(site, tp, is_partial=word == "head_norm" or site.is_cut or site.entered)
    if word == "embedding":
        return _plan_embedding(site, tp)
    shape = linear_shape(site)
    own = {name: parameter for name, parameter in site.module._parameters.items() if parameter is not None}
    if word == "row":
        _require_divisible(site, "inputs", shape.in_features, tp)
        partial = (tp,) if site.is_cut else ()  # each rank adds the bias to its own tokens
        regions = {name: [Region(name, _whole(parameter, partial))] for name, parameter in own.items()}
        weight = regions["weight"][0].spec
        regions["weight"] = [Region("weight", replace(weight, partial=(), cut={tp: 0 if shape.transposed else 1}))]
        return regions
    if word == "column":
        _require_chunks(site, shape, site.weights, tp)
    dims = {"weight": 1 if shape.transposed else 0, "bias": 0}
    pads = word == "column_gather"
    return {name: _along(name, p, dims[name], tp, site.weights.chunks, pads=pads) for name, p in own.items()}


def build(site: Site, tp: Axis) -> CutLinear | CutEmbedding:
    """The module that takes the place of a linear or embedding, without parameters yet."""
    assert site.weights is not None
    if site.weights.word == "embedding":
        return CutEmbedding(cast(nn.Embedding, site.module), tp=tp)
    is_row = site.weights.word == "row"
    enter: Enter = "whole" if is_row or site.entered else "all_gather" if site.is_cut else "copy"
    leave: Leave = "cut" if not is_row else "reduce_scatter" if site.is_cut else "reduce"
    gathers = site.weights.word == "column_gather"
    return CutLinear(linear_shape(site), tp=tp, enter=enter, leave=leave, gathers=gathers)


@torch.no_grad()
def take(parameter: nn.Parameter, regions: Sequence[Region]) -> list[nn.Parameter]:
    """This rank's part of each region, copied, so that the whole can go; the parameter itself if nothing cuts it."""
    parts: list[nn.Parameter] = []
    for region in regions:
        if region.spec.cut:
            _, _, box = region.spec.logical(region.name)
            part = parameter.detach().new_zeros(region.spec.local_shape)
            part[region.spec.valid_box()] = parameter[box]
            parts.append(nn.Parameter(part, requires_grad=parameter.requires_grad))
        else:
            parts.append(parameter)
    return parts


def linear_shape(site: Site) -> LinearShape:
    """ValueError if the module is no plain nn.Linear, nor transformers' Conv1D, known by its name and shapes."""
    module = site.module
    shapes = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
    weight = shapes.get("weight", ())
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward and weight:
        _require_plain(site)
        return LinearShape(module.in_features, module.out_features, transposed=False)
    if type(module).__name__ == "Conv1D" and len(weight) == 2 and shapes.get("bias") == weight[1:]:
        _require_plain(site)
        return LinearShape(weight[0], weight[1], transposed=True)
    raise ValueError(f"{site}: a {type(module).__name__} is no plain nn.Linear or transformers Conv1D")


def _plan_embedding(site: Site, tp: Axis) -> Regions:
    module: Any = site.module
    if not isinstance(module, nn.Embedding) or type(module).forward is not nn.Embedding.forward:
        raise ValueError(f"{site}: a {type(module).__name__} is no plain nn.Embedding")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(module, option):
            raise ValueError(f"{site}: {option}={getattr(module, option)} is not kept when the rows are cut over tp")
    if site.is_cut or site.entered:
        raise ValueError(f"{site}: the ids of an embedding are whole; it stands where the sequence is cut or gathered")
    _require_plain(site)
    return {"weight": _along("weight", module.weight, 0, tp, 1, pads=True)}


def _plan_norm(site: Site, tp: Axis, *, is_partial: bool) -> Regions:
    module = site.module
    if not type(module).__name__.lower().endswith(("layernorm", "rmsnorm")):
        raise ValueError(f"{site}: a {type(module).__name__} is no layer norm or RMS norm, by the end of its name")
    if hasattr(module, "specs"):
        raise ValueError(f"{site}: it has an attribute `specs` already, so says itself how its parameters are held")
    own = module.named_parameters(recurse=False)
    summed = (tp,) if is_partial else ()
    return {name: [Region(name, replace(_whole(parameter, summed), matrices=None))] for name, parameter in own}


def _whole(parameter: Tensor, partial: tuple[Axis, ...] = ()) -> ParamSpec:
    """The spec that a plain parameter counts as having, but for `partial`."""
    return ParamSpec(tuple(parameter.shape), None, partial=partial, decay=parameter.ndim > 1)


def _along(name: str, parameter: Tensor, dim: int, tp: Axis, chunks: int, *, pads: bool) -> list[Region]:
    whole = _whole(parameter)
    size = whole.shape[dim] // chunks
    spec = replace(whole, cut={tp: dim})
    if pads:  # a vocabulary, whose rows are words and no matrix
        spec = replace(spec, pad={dim: padded_size(size, tp.size)}, matrices=None)
    if chunks == 1:
        return [Region(name, spec)]
    shape = (*whole.shape[:dim], size, *whole.shape[dim + 1 :])
    starts = [tuple(chunk * size if d == dim else 0 for d in range(len(shape))) for chunk in range(chunks)]
    return [
        Region(f"{name}_{chunk}", replace(spec, shape=shape, part_of=PartOf(name, whole.shape, start)))
        for chunk, start in enumerate(starts)
    ]


def _require_chunks(site: Site, shape: LinearShape, style: Style, tp: Axis) -> None:
    if shape.out_features % style.chunks:
        raise ValueError(f"{site}: its {shape.out_features} outputs are no {style.chunks} equal chunks")
    size = shape.out_features // style.chunks
    _require_divisible(site, "outputs" if style.chunks == 1 else f"outputs of each of {style.chunks} chunks", size, tp)
    head_dim = getattr(site.owners[0][0], "head_dim", None)
    if isinstance(head_dim, int) and head_dim > 0 and size % head_dim == 0 and size // head_dim % tp.size:
        raise ValueError(
            f"{site}: {size} outputs are {size // head_dim} heads of head_dim={head_dim}, which cannot be cut over "
            f"{tp.name}={tp.size}: take a tp that divides the heads"
        )


def _require_divisible(site: Site, what: str, size: int, tp: Axis) -> None:
    if size % tp.size:
        raise ValueError(f"{site}: {size} {what} cannot be cut over {tp.name}={tp.size}: take a tp that divides {size}")


def _require_plain(site: Site) -> None:
    module = site.module
    if module._buffers or module._modules or set(module._parameters) - {"weight", "bias"}:
        raise ValueError(f"{site}: it has buffers, parameters or modules of its own, which would be lost")

"""`ParamSpec`: what a parameter is, whatever the layout, and how it is cut; said once, where the weight is made.

Attributes on nn.Parameter are lost by deepcopy, by to_empty and by load_state_dict(assign=True), so the annotation is
plain data on the module, by parameter name. Its readers (initialisation, gradient sums, norm, checkpoints, planner)
know no layer by name.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from megalite.mesh import Axis

TILE_ROWS, TILE_COLUMNS = 64, 1024


@dataclass(frozen=True)
class Init:
    """How a weight begins. kind: "normal" (mean 0, deviation `scale`), "uniform" (-scale to scale), "constant"."""

    kind: str
    scale: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in ("normal", "uniform", "constant"):
            raise ValueError(f"init kind {self.kind!r} is none of normal, uniform, constant")


def normal(std: float) -> Init:
    return Init("normal", std)


def uniform(bound: float) -> Init:
    return Init("uniform", bound)


zeros = Init("constant", 0.0)
ones = Init("constant", 1.0)


@dataclass(frozen=True)
class PartOf:
    """The logical tensor that a parameter is a region of: its `name` in the same module, `shape`, and `start` there.

    So a layer may hold one logical weight as two parameters where a layout asks for it, and the law still holds.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class ParamSpec:
    """What a parameter is, independent of the layout, and how the axes cut it.

    shape: logical, what one process alone would hold. init: None keeps the values the parameter has.
    cut: axis -> the tensor dim it divides; several axes may cut one dim, outermost first.
    pad: dim -> padded size (a vocabulary that tp does not divide): padding is zero, gets zero gradient, is never saved.
    partial: axes over which the local gradient is only one summand, as each rank saw only its tokens or its heads.
    expert: it lives on the expert view of the mesh. decay: weight decay applies.
    part_of: the larger logical tensor that it is a region of; None = it is a logical tensor itself.
    matrices: for optimizers that see whole matrices, (outputs, inputs) with the inputs as the last dim: dim -> sizes of
    the parts along it where several lie in one tensor, {} = it is one; None = it maps nothing to nothing, as the rows
    of an embedding or a head, one for each word. What has fewer than two dims is none in any case.
    """

    shape: tuple[int, ...]
    init: Init | None
    cut: Mapping[Axis, int] = field(default_factory=dict)
    pad: Mapping[int, int] = field(default_factory=dict)
    partial: tuple[Axis, ...] = ()
    expert: bool = False
    decay: bool = True
    part_of: PartOf | None = None
    matrices: Mapping[int, tuple[int, ...]] | None = field(default_factory=dict)

    @property
    def padded_shape(self) -> tuple[int, ...]:
        return tuple(self.pad.get(dim, size) for dim, size in enumerate(self.shape))

    def box(self) -> tuple[slice, ...]:
        """This rank's part in the padded logical tensor, a slice per dim. ValueError where an axis does not divide."""
        bounds = [(0, size) for size in self.padded_shape]
        for axis, dim in self.cut.items():
            start, stop = bounds[dim]
            if (stop - start) % axis.size:
                raise ValueError(
                    f"shape {self.padded_shape}: dim {dim} of {stop - start} cannot be cut over axis {axis.name} of "
                    f"size {axis.size}; take a size that divides {stop - start}"
                )
            share = (stop - start) // axis.size
            bounds[dim] = (start + axis.rank * share, start + (axis.rank + 1) * share)
        return tuple(slice(start, stop) for start, stop in bounds)

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.box())

    def valid_box(self) -> tuple[slice, ...]:
        """The part of the local tensor, in local indices, that is not padding."""
        return tuple(
            slice(0, max(0, min(part.stop, size) - part.start))
            for part, size in zip(self.box(), self.shape, strict=True)
        )

    def logical(self, name: str) -> tuple[str, tuple[int, ...], tuple[slice, ...]]:
        """Name and shape of the logical tensor that parameter `name` belongs to, and this rank's valid box in it."""
        box = tuple(
            slice(part.start, max(part.start, min(part.stop, size)))
            for part, size in zip(self.box(), self.shape, strict=True)
        )
        if self.part_of is None:
            return name, self.shape, box
        path, dot, _ = name.rpartition(".")
        starts = zip(box, self.part_of.start, strict=True)
        box = tuple(slice(part.start + start, part.stop + start) for part, start in starts)
        return path + dot + self.part_of.name, self.part_of.shape, box

    def copies(self, view: Iterable[Axis]) -> int:
        """How many ranks hold the same element, over the axes of `view` and of `partial`.

        An axis that cuts the parameter makes no copies; of one whose sub-axis cuts it, what the sub-axis leaves.
        """
        axes = dict.fromkeys((*view, *(axis for axis in self.partial if axis.parent is None)))
        held = math.prod(axis.size for axis in axes)
        return held // math.prod(axis.size for axis in self.cut if axis in axes or axis.parent in axes)

    @property
    def numel(self) -> int:
        """Logical elements, padding left out."""
        return math.prod(self.shape)


class ParallelModule(nn.Module):
    """An nn.Module whose parameters carry a ParamSpec each; see `declare`."""

    specs: dict[str, ParamSpec]

    def __init__(self) -> None:
        super().__init__()
        self.specs = {}

    def declare(
        self,
        name: str,
        spec: ParamSpec,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> nn.Parameter:
        """Registers this rank's part of a parameter. ValueError with both numbers if the axes cannot cut it.

        Off the meta device it is drawn at once, from torch's global generator as nn.Linear does, yet equal for every
        cut: ranks that seed alike hold parts of one tensor. `init_parameters` draws again by (seed, logical name).
        """
        parameter = nn.Parameter(torch.empty(spec.local_shape, device=device, dtype=dtype))
        self.register_parameter(name, parameter)
        self.specs[name] = spec
        if not parameter.is_meta:
            seed = int(torch.randint(2**62, ()))
            draw_(parameter, spec, seed=seed, name=name)
        return parameter


def param_specs(module: nn.Module) -> dict[str, ParamSpec]:
    """Logical name -> spec of every parameter, each shared parameter once. A plain parameter counts as replicated.

    A plain parameter of one dim or none is not decayed (norms, biases); it keeps the values it has. One of two dims is
    a matrix, but in torch's embeddings; in its nn.MultiheadAttention three are one parameter.
    """
    return {name: spec for name, _, spec in _walk(module)}


def _walk(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, ParamSpec]]:
    owners = dict(module.named_modules(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        path, _, leaf = name.rpartition(".")
        declared = getattr(owners[path], "specs", {}).get(leaf)
        yield name, parameter, declared or _plain(parameter, leaf, owners[path])


def _plain(parameter: Tensor, leaf: str, owner: nn.Module) -> ParamSpec:
    shape = tuple(parameter.shape)
    matrices: dict[int, tuple[int, ...]] | None = {}
    if len(shape) != 2 or isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        matrices = None
    elif isinstance(owner, nn.MultiheadAttention) and leaf == "in_proj_weight":
        matrices = {0: (shape[0] // 3,) * 3}
    return ParamSpec(shape, None, decay=len(shape) > 1, matrices=matrices)


def init_parameters(module: nn.Module | Iterable[nn.Module], seed: int, *, device: torch.device | str = "cpu") -> None:
    """Draws every declared parameter from (seed, logical name): the same weights for every layout and precision.

    module: one, or the stages of one model. Parameters on the meta device are made on `device` first, shared ones
    staying shared, between stages too. Plain parameters keep their values; a plain one on meta is a ValueError, since
    nothing says how it begins.
    """
    modules = [module] if isinstance(module, nn.Module) else list(module)
    made: dict[int, nn.Parameter] = {}
    walked: dict[int, tuple[str, nn.Parameter, ParamSpec]] = {}
    for found in (found for one in modules for found in _walk(one)):
        walked.setdefault(id(found[1]), found)
    for name, parameter, spec in walked.values():
        if parameter.is_meta:
            made[id(parameter)] = _materialise(parameter, device, name, spec)
            parameter = made[id(parameter)]
        if spec.init is not None:
            draw_(parameter, spec, seed=seed, name=name)
    for owner in (owner for one in modules for owner in one.modules()):
        for leaf, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in made:
                owner.register_parameter(leaf, made[id(parameter)])


def _materialise(parameter: nn.Parameter, device: torch.device | str, name: str, spec: ParamSpec) -> nn.Parameter:
    if spec.init is None:
        raise ValueError(f"parameter {name} is on the meta device and declares no ParamSpec to draw it from")
    return nn.Parameter(torch.empty_like(parameter, device=device), requires_grad=parameter.requires_grad)


@torch.no_grad()
def draw_(target: Tensor, spec: ParamSpec, *, seed: int, name: str) -> None:
    """Fills `target`, this rank's part, with its part of the logical tensor drawn from (seed, name).

    Drawn in float32 and converted, so that every precision starts from the same weights; padding becomes zero.
    """
    target.zero_()
    valid = target[spec.valid_box()]
    if spec.init is None or valid.numel() == 0:
        return
    if spec.init.kind == "constant":
        valid.fill_(spec.init.scale)
        return
    logical_name, shape, box = spec.logical(name)
    key = _key(seed, logical_name)
    runs = [_draw_rows(_as_matrix(shape), rows, columns, spec.init, key) for rows, columns in _matrix_runs(shape, box)]
    valid.copy_(torch.from_numpy(np.concatenate(runs)).view(valid.shape))


def _key(seed: int, name: str) -> int:
    """128 bits of (seed, name): torch's CPU generator keeps 32 bits of a seed, and rows of weights would collide."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")


def _as_matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Logical rows x columns: the last dim is the columns, all others are rows."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _matrix_runs(shape: tuple[int, ...], box: tuple[slice, ...]) -> list[tuple[range, range]]:
    """A box of a logical tensor as (rows, columns) of its matrix, in memory order, adjoining rows joined."""
    ranges = [range(part.start, part.stop) for part in box]
    if len(ranges) < 2:
        return [(range(1), ranges[0] if ranges else range(1))]
    *outer, inner, columns = ranges
    runs: list[range] = []
    for indices in itertools.product(*outer):
        row = 0
        for index, size in zip(indices, shape, strict=False):
            row = row * size + index
        start = row * shape[-2] + inner.start
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(range(start, row * shape[-2] + inner.stop))
    return [(run, columns) for run in runs]


def _draw_rows(shape: tuple[int, int], rows: range, columns: range, init: Init, key: int) -> np.ndarray:
    """Rows x columns of the logical matrix. Its tiles come each from a stream of its own, so a part costs its share.

    The generator is numpy's Philox with the key of the tensor and tile << 64 as counter: no two tiles share a stream.
    """
    out = np.empty((len(rows), len(columns)), np.float32)
    tiles_across = -(-shape[1] // TILE_COLUMNS)
    for top in range(rows.start // TILE_ROWS * TILE_ROWS, rows.stop, TILE_ROWS):
        for left in range(columns.start // TILE_COLUMNS * TILE_COLUMNS, columns.stop, TILE_COLUMNS):
            size = (min(TILE_ROWS, shape[0] - top), min(TILE_COLUMNS, shape[1] - left))
            tile = top // TILE_ROWS * tiles_across + left // TILE_COLUMNS
            values = _draw_tile(init, size, np.random.Generator(np.random.Philox(key=key, counter=tile << 64)))
            y, x = _overlap(rows, top, size[0]), _overlap(columns, left, size[1])
            out[y.start - rows.start : y.stop - rows.start, x.start - columns.start : x.stop - columns.start] = values[
                y.start - top : y.stop - top, x.start - left : x.stop - left
            ]
    return out


def _draw_tile(init: Init, size: tuple[int, int], generator: np.random.Generator) -> np.ndarray:
    draw: Callable[..., np.ndarray] = generator.standard_normal if init.kind == "normal" else generator.random
    values = draw(size, dtype=np.float32)
    if init.kind == "uniform":
        values = values * np.float32(2) - np.float32(1)
    return values * np.float32(init.scale)


def _overlap(wanted: range, start: int, length: int) -> range:
    return range(max(wanted.start, start), min(wanted.stop, start + length))

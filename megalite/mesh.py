"""The ranks and how they are cut: `Axis`, `Layout`, `Mesh`.

Words used everywhere:

- an *axis* is one named way to cut the ranks (data `dp`, context `cp`, tensor `tp`, pipeline `pp`, expert `ep`, expert
  tensor `etp`, expert data `edp`); a *dim* is of a tensor.
- the ranks that are not told apart by `pp` are seen in two *views*: dense weights see (dp, cp, tp), expert weights see
  (edp, ep, etp). Both cover the same ranks, so dp * cp * tp == edp * ep * etp.
- an axis of size 1 has no process group and is no special case: every function of `megalite.comm` is then the identity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from datetime import timedelta

    from torch.distributed import ProcessGroup

    from megalite.spec import ParamSpec

DENSE_AXES = ("tp", "cp", "dp")  # innermost first by default; Layout.order may say otherwise
EXPERT_AXES = ("etp", "ep", "edp")  # always in this order, innermost first


@dataclass(frozen=True, eq=False)
class Axis:
    """One way to cut the ranks, as one rank sees it: `name`, `size`, my `rank` in it, its process `group`.

    `ranks` are the global ranks along it, in order; `ranks[rank]` is this process. `parent` is the axis that a sub-axis
    is a part of (`Mesh.divide`). An axis deep-copies to itself, compares by name and ranks, and refuses to be pickled,
    since a process group lives in one process.
    """

    name: str
    size: int = 1
    rank: int = 0
    group: ProcessGroup | None = field(default=None, repr=False)
    ranks: tuple[int, ...] = ()
    parent: Axis | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(self.ranks) != self.size or not 0 <= self.rank < self.size:
            raise ValueError(f"axis {self.name}: size {self.size}, rank {self.rank} and ranks {self.ranks} disagree")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Axis) and (self.name, self.ranks) == (other.name, other.ranks)

    def __hash__(self) -> int:
        return hash((self.name, self.ranks))

    def __deepcopy__(self, memo: dict[int, Any]) -> Axis:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"axis {self.name} cannot be pickled: its process group lives in this process only")

    def part(self, length: int) -> slice:
        """This rank's equal share of `length` entries. Raises ValueError if the axis does not divide it."""
        if length % self.size:
            raise ValueError(f"{length} entries cannot be cut over axis {self.name} of size {self.size}")
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)


@dataclass(frozen=True)
class Layout:
    """The sizes of the axes and their order alone: plain arithmetic, no processes.

    Global rank r is read in mixed radix along `order`, innermost (fastest) first: with ("tp", "cp", "dp", "pp") the
    tensor axis joins neighbouring ranks. The expert view reads the same ranks, pp left out, as (etp, ep, edp).
    `edp` is derived. Raises ValueError, with the numbers, for what cannot be.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    order: tuple[str, ...] = ("tp", "cp", "dp", "pp")

    def __post_init__(self) -> None:
        object.__setattr__(self, "order", tuple(self.order))
        if sorted(self.order) != ["cp", "dp", "pp", "tp"]:
            raise ValueError(f"layout.order={list(self.order)} must name each of tp, cp, dp, pp once, innermost first")
        for name in ("dp", "cp", "tp", "pp", "ep", "etp"):
            size = getattr(self, name)
            if type(size) is not int or size < 1:
                raise ValueError(f"layout.{name}={size!r} must be a whole number of at least 1")
        if self.model_ranks % (self.ep * self.etp):
            raise ValueError(
                f"layout.ep x etp = {self.ep} x {self.etp} = {self.ep * self.etp} does not divide dp x cp x tp = "
                f"{self.dp} x {self.cp} x {self.tp} = {self.model_ranks}: experts are spread over those ranks"
            )

    @classmethod
    def fit(cls, world_size: int, *, dp: int | None = None, **sizes: Any) -> Layout:
        """The layout of `world_size` ranks with these sizes; dp=None takes what the others leave.

        Raises ValueError with the equation where the sizes do not multiply to the world.
        """
        rest = cls(**{name: size for name, size in sizes.items() if name not in ("ep", "etp")})
        equation = " x ".join(f"{name}={getattr(rest, name)}" for name in ("cp", "tp", "pp"))
        if dp is None and world_size % rest.world_size == 0:
            dp = world_size // rest.world_size
        if (dp or 1) * rest.world_size != world_size:
            factors = equation if dp is None else f"dp={dp} x {equation}"
            asked = (dp or 1) * rest.world_size
            running = "1 rank that is running" if world_size == 1 else f"{world_size} ranks that are running"
            fits = world_size % rest.world_size == 0
            others = " or a multiple of it" if dp is None else ", or take layout.dp=null" if fits else ""
            raise ValueError(
                f"layout {factors} = {asked} does not {'divide' if dp is None else 'equal'} the {running}; start "
                f"{asked} with torchrun --nproc-per-node={asked}{others}"
            )
        return cls(dp=dp or 1, **sizes)

    @property
    def model_ranks(self) -> int:
        """Ranks of one pipeline stage over all replicas: dp * cp * tp."""
        return self.dp * self.cp * self.tp

    @property
    def world_size(self) -> int:
        return self.model_ranks * self.pp

    @property
    def edp(self) -> int:
        """Replicas of each expert: what ep and etp leave of dp * cp * tp."""
        return self.model_ranks // (self.ep * self.etp)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size, for all seven axes."""
        return {name: getattr(self, name) for name in ("dp", "cp", "tp", "pp", "edp", "ep", "etp")}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Axis name -> position of global `rank` along it, in both views."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is outside of the layout's {self.world_size} ranks")
        at = _unravel(rank, self.order, self.sizes)
        dense = tuple(name for name in self.order if name != "pp")
        return at | _unravel(_ravel(at, dense, self.sizes), EXPERT_AXES, self.sizes)

    def ranks(self, names: tuple[str, ...], rank: int) -> tuple[int, ...]:
        """Global ranks, ascending, that differ from `rank` in the axes `names` of one view only.

        `names` may be one axis or several (a merged axis); all but pp must belong to the same view.
        """
        if not (set(names) <= {*DENSE_AXES, "pp"} or set(names) <= {*EXPERT_AXES, "pp"}):
            raise ValueError(
                f"axes {names} do not lie in one view: dense (dp, cp, tp, pp) or expert (edp, ep, etp, pp)"
            )
        view = EXPERT_AXES if set(names) & set(EXPERT_AXES) else DENSE_AXES
        fixed = [name for name in (*view, "pp") if name not in names]
        mine = self.coordinates(rank)
        others = ((other, self.coordinates(other)) for other in range(self.world_size))
        return tuple(other for other, at in others if all(at[name] == mine[name] for name in fixed))


def _unravel(index: int, order: tuple[str, ...], sizes: dict[str, int]) -> dict[str, int]:
    at = {}
    for name in order:
        index, at[name] = divmod(index, sizes[name])
    return at


def _ravel(at: dict[str, int], order: tuple[str, ...], sizes: dict[str, int]) -> int:
    index = 0
    for name in reversed(order):
        index = index * sizes[name] + at[name]
    return index


class Mesh:
    """All axes of one rank, with their process groups.

    `dp, cp, tp, pp, edp, ep, etp` are the axes of the layout; `world` joins all ranks, `stage` those of one place on
    pp. `data(spec)` and `view(spec)` give the axes by what a parameter is. Groups that `data` gives carry gradients and
    nothing else, so that they never interleave with a layer's own collectives.
    """

    dp: Axis
    cp: Axis
    tp: Axis
    pp: Axis
    edp: Axis
    ep: Axis
    etp: Axis
    world: Axis
    stage: Axis

    def __init__(self, layout: Layout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self._made: dict[tuple[str, tuple[int, ...]], Axis] = {}
        self._joined: dict[tuple[int, int], Axis] = {}
        for name in layout.sizes:
            setattr(self, name, self.merge(name))
        self.world = self.merge("dp", "cp", "tp", "pp", name="world")
        self.stage = self.world if layout.pp == 1 else self.merge("dp", "cp", "tp", name="stage")
        self._dense_data = self.merge("dp", "cp", name="dense_data")
        self._expert_data = self.merge("edp", name="expert_data")

    @classmethod
    def build(cls, layout: Layout | None = None) -> Mesh:
        """The mesh of this process. Every rank calls it, with the same layout: it makes the process groups.

        A layout of one rank needs no `init_process_group`. Raises ValueError if the processes do not match the layout.
        """
        layout = layout or Layout()
        import torch.distributed as dist  # here, so that Layout serves the planner and --help without torch

        started = dist.is_available() and dist.is_initialized()
        running = dist.get_world_size() if started else 1
        if running != layout.world_size:
            hint = "" if started else " (torch.distributed is not initialised)"
            raise ValueError(f"the layout has {layout.world_size} ranks, and {running} are running{hint}")
        return cls(layout, dist.get_rank() if started else 0)

    def merge(self, *names: str, name: str | None = None) -> Axis:
        """One axis over several of a view, e.g. merge("dp", "cp"): all ranks that differ in those only.

        Every rank must call it, in the same order (a process group is made); a second call gives the same axis.
        """
        return self._make(name or "_".join(names), self.layout.ranks(names, self.rank))

    def divide(self, axis: Axis, outer: int) -> tuple[Axis, Axis]:
        """Cuts `axis` in two: (outer, inner) sub-axes of sizes `outer` and size / outer; axis.rank = outer x inner.

        So a weight of fewer pieces than ranks is cut over the outer and whole on the inner. Every rank must call it.
        """
        if outer < 1 or axis.size % outer:
            raise ValueError(f"axis {axis.name} of size {axis.size} cannot be divided into {outer} parts")
        inner = axis.size // outer
        of_outer = axis.ranks[axis.rank % inner :: inner]
        start = axis.rank // inner * inner
        return (
            self._make(f"{axis.name}_outer{outer}", of_outer, parent=axis),
            self._make(f"{axis.name}_inner{inner}", axis.ranks[start : start + inner], parent=axis),
        )

    def shards(self, axis: Axis, size: int) -> tuple[Axis, Axis, Axis]:
        """A data axis cut for sharding over `size` neighbouring ranks: (replicas, shards, gathers).

        Weights are cut over the shards' ranks, axis.rank = replicas x shards. gathers: the same ranks as the shards',
        in a group of its own: gathers of weights must not queue behind reductions. Every rank must call it. Raises
        ValueError if size does not divide the axis.
        """
        if size < 1 or axis.size % size:
            raise ValueError(f"{axis.size} data ranks cannot be cut into shards over {size} of them")
        start = axis.rank // size * size
        neighbours, replicas = axis.ranks[start : start + size], axis.ranks[axis.rank % size :: size]

        def make(name: str, ranks: tuple[int, ...]) -> Axis:
            return self._make(f"{axis.name}_{name}{size}", ranks, parent=axis)

        return (
            axis if size == 1 else make("replicas", replicas),
            axis if size == axis.size else make("shards", neighbours),
            make("gathers", neighbours),
        )

    def joins(self, first: int, last: int) -> Axis:
        """The axis "tie" of two ranks of pp, given by their places on it; of size 1 where this rank is neither.

        Over it weights are tied that two stages hold. Every rank must call it, also those that are left out.
        """
        ends = (min(first, last), max(first, last))
        if not 0 <= ends[0] <= ends[1] < self.pp.size:
            raise ValueError(f"ranks {first} and {last} of axis pp, of size {self.pp.size}, cannot be joined")
        if ends not in self._joined:
            joined = tuple(dict.fromkeys(self.pp.ranks[place] for place in ends))
            ranks = joined if self.rank in joined else (self.rank,)
            group = make_group(ranks, "tie") if len(joined) > 1 else None
            self._joined[ends] = Axis("tie", len(ranks), ranks.index(self.rank), group, ranks)
        return self._joined[ends]

    def data(self, spec: ParamSpec | None = None) -> Axis:
        """The axis over which gradients of such a parameter are summed: dp x cp if dense, edp if expert."""
        return self._expert_data if spec is not None and spec.expert else self._dense_data

    def view(self, spec: ParamSpec | None = None) -> tuple[Axis, ...]:
        """The axes that a parameter can be cut or copied over: (dp, cp, tp) if dense, (edp, ep, etp) if expert."""
        return (self.edp, self.ep, self.etp) if spec is not None and spec.expert else (self.dp, self.cp, self.tp)

    def _make(self, name: str, ranks: tuple[int, ...], *, parent: Axis | None = None) -> Axis:
        key = (name, ranks)
        if key not in self._made:
            group = make_group(ranks, name) if len(ranks) > 1 else None
            self._made[key] = Axis(name, len(ranks), ranks.index(self.rank), group, ranks, parent)
        return self._made[key]

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={size}" for name, size in self.layout.sizes.items() if size > 1)
        return f"Mesh(rank {self.rank} of {self.layout.world_size}: {sizes or 'every axis is 1'})"


def make_group(ranks: tuple[int, ...], name: str) -> ProcessGroup:
    """The process group of these ranks, which alone call this. One rank is legal.

    torch names a group by its ranks and by how many its process has made so far: where some ranks are in no group, they
    make one of themselves alone, so that all have made equally many; unequal numbers hang.
    """
    import torch.distributed as dist

    return dist.new_group(list(ranks), timeout=_timeout(), use_local_synchronization=True, group_desc=name)


def _timeout() -> timedelta | None:
    """How long the default group waits: torch would give a new group a default of its own. None if it doesn't say."""
    import torch.distributed as dist

    default = dist.group.WORLD
    assert default is not None
    options = getattr(default._get_backend(default._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)

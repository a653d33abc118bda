"""Modules to units: which parameters share one flat buffer, in the order in which forward meets them.

A unit is what is reduced together: small enough that its reduction starts while backward still has work to hide it
under, large enough that it is not all latency.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import nn

from megalite.mesh import Axis, Mesh
from megalite.spec import ParamSpec, param_specs

Kinds = tuple[type, ...]
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


@dataclass(eq=False)
class Held:
    """One parameter as this rank holds it.

    name: logical, the first one if it has several. owners: every (module, attribute) that has it; several if tied.
    """

    name: str
    parameter: nn.Parameter
    spec: ParamSpec
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    def replace(self, parameter: nn.Parameter) -> None:
        """Puts `parameter` in the place of the present one, wherever that is; what is tied stays tied."""
        self.parameter = parameter
        for module, attribute in self.owners:
            module.register_parameter(attribute, parameter)


def held_parameters(stages: Sequence[nn.Module]) -> list[Held]:
    """Every parameter of the stages once, in registration order. ValueError if two of them have one name."""
    held: dict[int, Held] = {}
    names: dict[str, int] = {}
    for number, stage in enumerate(stages):
        specs = param_specs(stage)
        for name, parameter in stage.named_parameters():
            if id(parameter) in held:
                continue
            if name in names:
                raise ValueError(
                    f"stages {names[name]} and {number} both have a parameter {name}, and not the same one: a logical "
                    "name is one parameter, so number the layers through, e.g. by an nn.ModuleDict in each stage"
                )
            names[name] = number
            held[id(parameter)] = Held(name, parameter, specs[name])
        for module in stage.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                owner = (module, attribute)
                if owner not in held[id(parameter)].owners:
                    held[id(parameter)].owners.append(owner)
    return list(held.values())


def ties(spec: ParamSpec, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes over which a parameter is tied between pipeline stages: those of `partial` that lead out of this one."""
    return tuple(axis for axis in spec.partial if axis.size > 1 and not set(axis.ranks) <= set(mesh.stage.ranks))


class Part(NamedTuple):
    """What becomes a unit: its name, its parameters, and the modules whose forward uses them; () for a root unit's."""

    name: str
    held: list[Held]
    modules: tuple[nn.Module, ...]


class _Group(NamedTuple):
    """A unit before tied weights are taken out: keys are ids of parameters."""

    name: str
    keys: list[int]
    modules: tuple[nn.Module, ...]


def partition(
    stages: Sequence[nn.Module], held: Sequence[Held], kinds: Kinds, *, alone: Collection[str] = ()
) -> list[Part]:
    """The units in forward order.

    Units are the outermost modules of `kinds`; then each other module below the containers, a norm joining what follows
    it (final norm + head). A weight tied between several units is a unit alone, where forward first meets it. What
    belongs to none, a stage's own parameters, is that stage's root unit; it comes first, so it is reduced last.
    alone: names that are a unit each in any case: a weight tied to another rank's stage, so that it lies at the same
    place in its unit's shards there, whatever else that stage has.
    """
    by_id = {id(one.parameter): one for one in held}
    groups = [group for stage in stages for group in _groups(stage, kinds)]
    homes: dict[int, list[_Group]] = defaultdict(list)
    for group in groups:
        for key in group.keys:
            homes[key].append(group)
    placed: set[int] = set()
    parts: list[Part] = []
    for group in groups:
        mine: list[Held] = []
        for key in (key for key in group.keys if key not in placed):
            placed.add(key)
            if len(homes[key]) > 1 or by_id[key].name in alone:
                parts.append(Part(by_id[key].name, [by_id[key]], _users(homes[key], {key})))
            else:
                mine.append(by_id[key])
        if mine:
            parts.append(Part(group.name, mine, _users([group], {id(one.parameter) for one in mine})))
    return parts


def _users(groups: Sequence[_Group], keys: set[int]) -> tuple[nn.Module, ...]:
    """The modules that use these parameters; () where one of them is a stage's root, which may use them at any time."""
    if not all(group.modules for group in groups):
        return ()
    modules = dict.fromkeys(module for group in groups for module in group.modules)
    return tuple(module for module in modules if any(id(parameter) in keys for parameter in module.parameters()))


def _groups(stage: nn.Module, kinds: Kinds) -> list[_Group]:
    """The root unit, then each unit of a stage."""
    if isinstance(stage, kinds):
        return [_Group(type(stage).__name__, [id(parameter) for parameter in stage.parameters()], (stage,))]
    groups: list[_Group] = []
    waiting: list[tuple[str, nn.Module]] = []  # modules of vectors alone, until one of matrices follows
    for path, module, chosen in _candidates(stage, "", kinds):
        if chosen and waiting:
            groups.append(_join(waiting))
            waiting = []
        waiting.append((path, module))
        if chosen or any(parameter.ndim > 1 for parameter in module.parameters()):
            groups.append(_join(waiting))
            waiting = []
    if waiting:
        groups.append(_join(waiting))
    inside = {key for group in groups for key in group.keys}
    return [_Group("root", [id(p) for p in stage.parameters() if id(p) not in inside], ()), *groups]


def _candidates(module: nn.Module, path: str, kinds: Kinds) -> Iterator[tuple[str, nn.Module, bool]]:
    """(path, module, whether it is one of `kinds`) for what can be a unit, containers opened."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if isinstance(child, kinds):
            yield below, child, True
        elif isinstance(child, _CONTAINERS) or any(isinstance(inner, kinds) for inner in child.modules()):
            yield from _candidates(child, below, kinds)
        else:
            yield below, child, False


def _join(modules: Sequence[tuple[str, nn.Module]]) -> _Group:
    with_parameters = [(path, module) for path, module in modules if any(True for _ in module.parameters())]
    name = " + ".join(path for path, _ in with_parameters)
    keys = dict.fromkeys(id(parameter) for _, module in with_parameters for parameter in module.parameters())
    return _Group(name, list(keys), tuple(module for _, module in with_parameters))

"""A user's own module, cut over the tensor axis by styles that are given to modules by name: `parallelize`.

How weights are held:

| style           | fits                | x -> y over tp, and what becomes of it                       |
|-----------------|---------------------|--------------------------------------------------------------|
| `column`        | nn.Linear, Conv1D   | whole -> cut features: weight and bias cut along the outputs |
| `column:N`      | the same            | the outputs are N chunks (q, k and v): each chunk is cut     |
| `column_gather` | the same            | whole -> whole: y is gathered; any size (the output layer)   |
| `row`           | the same            | cut features -> whole: cut along the inputs; bias added once |
| `embedding`     | nn.Embedding        | ids -> whole: cut along the vocabulary, any size             |
| `norm`          | layer and RMS norms | stays as it is, and knows if its gradient is a summand       |
| `head_norm`     | the same            | stays; of each head, between column and row: a summand       |

What becomes of a module's input, (..., seq, features), when it is called:

| style        | x before -> after     | for                                                                |
|--------------|-----------------------|--------------------------------------------------------------------|
| `copy`       | whole -> whole        | all columns within share one all-reduce in backward                |
| `split_seq`  | whole -> cut sequence | begins sequence parallelism, for all that is registered later      |
| `gather_seq` | cut sequence -> whole | one gather for all columns within; the row at their end cuts again |
| `join_seq`   | cut sequence -> whole | ends it: what follows is computed alike on all ranks               |

Conv1D is transformers'. Where the sequence is cut, a column that no gather_seq encloses gathers for itself, and a
`column_gather` ends that part. Megatron-LM, arXiv:1909.08053; sequence parallelism, arXiv:2205.05198.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import nn

from megalite.mesh import Axis, Mesh
from megalite.styles.inputs import FirstStep, input_hook
from megalite.styles.sites import Site, find_sites, matches
from megalite.styles.weights import Region, Regions, build, plan, take

__all__ = ["parallelize"]

Module = TypeVar("Module", bound=nn.Module)


def parallelize(
    module: Module,
    styles: Mapping[str, str],
    mesh: Mesh,
    *,
    attributes: Mapping[str, str | Sequence[str]] | None = None,
) -> Module:
    """Cuts `module` over mesh.tp, in place, and gives it back: the same function, and the same training.

        model = parallelize(model, {"*.q_proj": "column", "*.o_proj": "row", ...}, mesh)
        zero = Zero(model, mesh, stage=3, units=(DecoderLayer,), optimizer=...)

    styles: pattern -> style, see the tables above. A pattern is compared with a module's whole path, * standing for
    anything, dots too. A module may have a style for its weights and one for its input; two of a kind are an error.
    attributes: pattern -> names of whole numbers of those modules that tp divides: heads of a rank, or a split size.
    Weights, dtype, device, requires_grad, ties and hooks are kept; an optimizer is made afterwards. Over tp=1 no linear
    or embedding is replaced, so every number keeps its bits. Dropout stays the user's own: under split_seq the ranks
    should draw differently.

    Raises ValueError, before anything is changed, for a pattern that matches nothing, a style that is unknown or does
    not fit a module, a size or attribute that tp does not divide, a tie that would be broken, and for torch's own
    MultiheadAttention and TransformerEncoderLayer. The first forward of `module` raises RuntimeError if a module with a
    style was not called.
    """
    tp = mesh.tp
    sites = find_sites(module, styles)
    planned = [(site, plan(site, tp)) for site in sites if site.weights is not None]
    _require_ties(module, planned)
    divided = _divided(module, attributes or {}, planned, tp)

    taken: dict[int, list[nn.Parameter]] = {}
    for site, regions in planned:
        if site.weights is not None and site.weights.word in ("norm", "head_norm"):
            site.module.specs = {name: region.spec for name, (region,) in regions.items()}  # type: ignore[assignment]
        elif tp.size > 1:  # alone the plain module is the whole, and its own arithmetic keeps its bits
            _replace(site, regions, tp, taken)
    first = FirstStep(module, sites)
    for site in sites:
        first.watch(site, site.module)
        if site.inputs is not None:
            site.module.register_forward_pre_hook(input_hook(site.path, site.inputs, tp), with_kwargs=True)
    for owner, name, value in divided:
        setattr(owner, name, value)
    return module


def _replace(site: Site, regions: Regions, tp: Axis, taken: dict[int, list[nn.Parameter]]) -> None:
    """Puts the parallel module where the plain one was. taken: the parts of parameters, so that ties stay ties."""
    new = build(site, tp)
    held: dict[str, list[nn.Parameter]] = {}
    for name, parts in regions.items():
        parameter = site.module._parameters[name]
        assert parameter is not None
        if id(parameter) not in taken:
            taken[id(parameter)] = take(parameter, parts)
        held[name] = taken[id(parameter)]
    new.hold(held, regions)
    new.train(site.module.training)
    # Shared and not copied, so that the handles that somebody has still take their hooks away.
    vars(new).update({name: value for name, value in vars(site.module).items() if "_hook" in name})
    for parent, leaf in site.owners:
        setattr(parent, leaf, new)
    site.module = new


def _require_ties(module: nn.Module, planned: Sequence[tuple[Site, Regions]]) -> None:
    """A parameter that several modules hold is cut alike in all of them."""
    told = {(id(site.module), name): (site, parts) for site, regions in planned for name, parts in regions.items()}
    firsts: dict[int, tuple[str, list[Region] | None]] = {}
    for path, inner in module.named_modules():
        for name, parameter in inner.named_parameters(recurse=False):
            site, parts = told.get((id(inner), name), (None, None))
            here = (path if site is None else str(site), parts)
            other, before = firsts.setdefault(id(parameter), here)
            if before != parts:
                raise ValueError(
                    f"{other} and {here[0]} share one parameter, {name}, and would not cut it alike: "
                    "give both a style that does (embedding and column_gather do)"
                )


def _divided(
    module: nn.Module, attributes: Mapping[str, str | Sequence[str]], planned: Sequence[tuple[Site, Regions]], tp: Axis
) -> list[tuple[nn.Module, str, int]]:
    """(module, attribute, its new value) for each attribute that is to be divided."""
    named = dict(module.named_modules(remove_duplicate=False))
    replaced = {id(site.module) for site, _ in planned}
    found: dict[tuple[int, str], tuple[nn.Module, str, int]] = {}
    for pattern, names in attributes.items():
        for path in matches(pattern, named):
            owner = named[path]
            for name in [names] if isinstance(names, str) else names:
                value = getattr(owner, name, None)
                what = f"{path}.{name} (attributes, pattern {pattern!r})"
                if id(owner) in replaced:
                    raise ValueError(f"{what}: the style of {path} sees to its sizes; leave it out of attributes")
                if type(value) is not int:
                    raise ValueError(f"{what} is {value!r} and must be a whole number that {path} has")
                if value % tp.size:
                    raise ValueError(f"{what}={value} cannot be divided by tp={tp.size}: take a tp that divides it")
                found[id(owner), name] = (owner, name, value // tp.size)
    return list(found.values())

"""Odd models and orders of passes by name, and the law that they train as in one process, whatever the options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import nn

from megalite.mesh import Layout, Mesh
from tests.ranks import run
from tests.zero import odd
from tests.zero.training import Passes, Record, assert_equals_one_process, one_by_one, reference, train


class Case(NamedTuple):
    """A model, told its number of micro-batches, and how it is used."""

    build: Callable[[int], nn.Module]
    units: tuple[type, ...] = ()
    passes: Passes = one_by_one


CASES = {
    "parameters of 0, 1 and 3 entries": Case(lambda m: odd.OddSizes()),
    "checkpointed by the user": Case(lambda m: odd.Checkpointed(reentrant=False)),
    "checkpointed by the user, reentrant": Case(lambda m: odd.Checkpointed(reentrant=True)),
    "checkpointed in one unit": Case(lambda m: odd.Checkpointed(reentrant=True), units=(odd.Checkpointed,)),
    "tied within and between units": Case(lambda m: odd.TiedInside(), units=(odd.Outer,)),
    "tied within small units": Case(lambda m: odd.TiedInside(), units=(nn.Linear,)),
    "keywords, tuples, dicts, dataclasses": Case(lambda m: odd.Containers()),
    "the root's parameters everywhere": Case(lambda m: odd.Rooted()),
    "modules that come again in another order": Case(odd.Wandering),
    "a loss aside": Case(lambda m: odd.Aside()),
    "frozen units": Case(lambda m: odd.Frozen()),
    "all forwards first": Case(lambda m: odd.Nudged(), passes=odd.forwards_first),
    "backwards in reverse": Case(lambda m: odd.Nudged(), passes=odd.last_in_first_out),
    "evaluation in between": Case(lambda m: odd.Nudged(), passes=odd.with_looks),
    "backward twice": Case(lambda m: odd.Nudged(), passes=odd.backward_twice),
    "backward twice of one unit": Case(lambda m: odd.Nudged(), units=(odd.Nudged,), passes=odd.backward_twice),
    "a forward that raised": Case(lambda m: odd.Nudged(), passes=odd.after_an_error),
}


def built(case: Case, microbatches: int) -> Callable[[Mesh], nn.Module]:
    return lambda mesh: case.build(microbatches)


def trained(
    names: Sequence[str], layout: Layout, microbatches: int, options: Sequence[dict[str, Any]]
) -> dict[tuple[str, int], Record]:
    """Each case with each set of options, one after the other in one group of ranks."""
    mesh = Mesh.build(layout)
    records = {}
    for name in names:
        case = CASES[name]
        for number, chosen in enumerate(options):
            given = {"units": case.units} | chosen
            records[name, number] = train(built(case, microbatches), mesh, microbatches, given, case.passes)
    return records


def assert_all_equal_one_process(
    names: Sequence[str], layout: Layout, microbatches: int, options: Sequence[dict[str, Any]]
) -> None:
    by_rank = run(trained, layout.world_size, names, layout, microbatches, options, timeout=120, checked=False)
    for name in names:
        one = reference(built(CASES[name], 1))
        for number, chosen in enumerate(options):
            try:
                assert_equals_one_process([records[name, number] for records in by_rank], one)
            except AssertionError as error:
                raise AssertionError(f"{name} with {chosen}: {error}") from error

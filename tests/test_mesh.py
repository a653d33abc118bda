"""Axes, layouts and meshes: arithmetic first, then the groups that really join the ranks."""

from __future__ import annotations

import copy
import itertools
import pickle

import pytest
import torch
import torch.distributed as dist

from megalite.mesh import Axis, Layout, Mesh
from megalite.spec import ParamSpec, zeros
from tests.ranks import run

LAYOUTS = [
    Layout(),
    Layout(dp=4),
    Layout(dp=2, tp=2),
    Layout(dp=2, cp=2, tp=2, pp=2),
    Layout(dp=2, cp=2, tp=2, pp=2, ep=4, etp=2),
    Layout(dp=3, cp=2, tp=2, ep=6),
    Layout(dp=2, tp=4, pp=3, ep=4, order=("tp", "cp", "pp", "dp")),
    Layout(dp=2, cp=2, tp=2, pp=2, ep=2, etp=2, order=("pp", "dp", "cp", "tp")),
]
VIEWS = [("dp", "cp", "tp", "pp"), ("edp", "ep", "etp", "pp")]


def _name(layout: Layout) -> str:
    sizes = [f"{name}{size}" for name, size in layout.sizes.items() if size > 1]
    return "-".join([*sizes, *(layout.order if layout.order != Layout().order else ())]) or "one rank"


def test_the_tensor_axis_joins_neighbours_and_the_pipeline_the_farthest_by_default():
    layout = Layout(dp=2, cp=2, tp=2, pp=2)
    dense = [{name: layout.coordinates(rank)[name] for name in VIEWS[0]} for rank in (0, 1, 2, 4, 8, 15)]
    assert dense == [
        {"dp": 0, "cp": 0, "tp": 0, "pp": 0},
        {"dp": 0, "cp": 0, "tp": 1, "pp": 0},
        {"dp": 0, "cp": 1, "tp": 0, "pp": 0},
        {"dp": 1, "cp": 0, "tp": 0, "pp": 0},
        {"dp": 0, "cp": 0, "tp": 0, "pp": 1},
        {"dp": 1, "cp": 1, "tp": 1, "pp": 1},
    ]
    assert layout.ranks(("tp",), 6) == (6, 7)
    assert layout.ranks(("cp",), 6) == (4, 6)
    assert layout.ranks(("dp",), 6) == (2, 6)
    assert layout.ranks(("pp",), 6) == (6, 14)
    assert layout.ranks(("dp", "cp"), 6) == (0, 2, 4, 6)


def test_with_the_pipeline_inside_of_data_the_stages_stand_closer_than_the_replicas():
    layout = Layout(dp=2, tp=2, pp=2, order=("tp", "cp", "pp", "dp"))
    assert layout.ranks(("tp",), 5) == (4, 5)
    assert layout.ranks(("pp",), 5) == (5, 7)
    assert layout.ranks(("dp",), 5) == (1, 5)


def test_the_expert_view_reads_the_same_ranks_with_expert_tensor_innermost():
    layout = Layout(dp=2, cp=2, tp=2, pp=2, ep=2, etp=2)
    assert layout.edp == 2
    assert layout.ranks(("etp",), 11) == (10, 11)
    assert layout.ranks(("ep",), 11) == (9, 11)
    assert layout.ranks(("edp",), 11) == (11, 15)
    # pipeline inside of data: a stage's ranks are not consecutive, and the expert view runs along them all the same
    layout = Layout(dp=2, tp=2, pp=2, ep=2, order=("tp", "cp", "pp", "dp"))
    assert layout.ranks(("ep", "edp"), 0) == layout.ranks(("dp", "tp"), 0) == (0, 1, 4, 5)
    assert layout.ranks(("ep",), 4) == (4, 5)
    assert layout.ranks(("edp",), 4) == (0, 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
@pytest.mark.parametrize("view", VIEWS, ids="_".join)
def test_each_set_of_axes_of_a_view_partitions_the_ranks(layout, view):
    everyone = range(layout.world_size)
    places = {tuple(layout.coordinates(rank)[name] for name in view) for rank in everyone}
    assert places == set(itertools.product(*(range(layout.sizes[name]) for name in view)))
    for count in range(len(view) + 1):
        for names in itertools.combinations(view, count):
            sets = {layout.ranks(names, rank) for rank in everyone}
            size = 1
            for name in names:
                size *= layout.sizes[name]
            assert sorted(itertools.chain(*sets)) == list(everyone)
            assert all(len(ranks) == size and list(ranks) == sorted(ranks) for ranks in sets)
            assert all(rank in layout.ranks(names, rank) for rank in everyone)


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
def test_along_a_single_axis_the_ranks_stand_in_the_order_of_their_coordinate(layout):
    for name, rank in itertools.product(layout.sizes, range(layout.world_size)):
        along = layout.ranks((name,), rank)
        assert [layout.coordinates(other)[name] for other in along] == list(range(layout.sizes[name]))


@pytest.mark.parametrize("layout", LAYOUTS, ids=_name)
def test_a_stage_has_the_same_ranks_in_both_views(layout):
    for rank in range(layout.world_size):
        assert layout.ranks(("dp", "cp", "tp"), rank) == layout.ranks(("edp", "ep", "etp"), rank)


def test_what_the_sizes_leave_of_the_world_is_data_parallel():
    assert Layout.fit(8, tp=2).dp == 4
    assert Layout.fit(8, tp=2, pp=2, cp=2).dp == 1
    assert Layout.fit(8, dp=2, tp=4) == Layout(dp=2, tp=4)
    assert Layout.fit(8, tp=2, ep=4) == Layout(dp=4, tp=2, ep=4)
    assert Layout.fit(8, tp=2, ep=4).edp == 2
    assert Layout.fit(1) == Layout()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Layout.fit(4, tp=3), r"cp=1 x tp=3 x pp=1 = 3 does not divide the 4 ranks"),
        (lambda: Layout.fit(6, dp=2, tp=4), r"dp=2 x cp=1 x tp=4 x pp=1 = 8 does not equal the 6 .*-node=8$"),
        (lambda: Layout.fit(4, dp=1, tp=2), r"dp=1 x cp=1 x tp=2 x pp=1 = 2 .* the 4 .*, or take layout.dp=null$"),
        (lambda: Layout.fit(2, tp=2, pp=2), r"cp=1 x tp=2 x pp=2 = 4 does not divide the 2 ranks"),
        (lambda: Layout.fit(4, ep=3), r"ep x etp = 3 x 1 = 3 does not divide dp x cp x tp = 4 x 1 x 1 = 4"),
        (lambda: Layout(dp=2, tp=2, pp=2, ep=8), r"8 x 1 = 8 does not divide dp x cp x tp = 2 x 1 x 2 = 4"),
        (lambda: Layout(dp=0), r"layout.dp=0 must be a whole number of at least 1"),
        (lambda: Layout(tp=-2), r"layout.tp=-2 must be"),
        (lambda: Layout(pp=2.0), r"layout.pp=2.0 must be"),
        (lambda: Layout(cp=True), r"layout.cp=True must be"),
        (lambda: Layout(order=("tp", "dp", "pp")), r"layout.order=\['tp', 'dp', 'pp'\] must name each of"),
        (lambda: Layout(order=("tp", "tp", "dp", "pp")), r"layout.order=\['tp', 'tp', 'dp', 'pp'\] must name"),
        (lambda: Layout(dp=4).ranks(("dp", "ep"), 0), r"\('dp', 'ep'\) do not lie in one view"),
        (lambda: Layout(dp=4).coordinates(4), r"rank 4 is outside of the layout's 4 ranks"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_an_axis_is_its_name_and_ranks_and_stays_itself():
    axis = Axis("tp", 2, 1, ranks=(4, 6))
    assert axis == Axis("tp", 2, 0, ranks=(4, 6)), "its rank is who looks, not what it is"
    assert hash(axis) == hash(Axis("tp", 2, 0, ranks=(4, 6)))
    assert axis not in (Axis("dp", 2, 1, ranks=(4, 6)), Axis("tp", 2, 1), "tp")
    assert copy.deepcopy([axis])[0] is axis
    with pytest.raises(TypeError, match="axis tp cannot be pickled"):
        pickle.dumps(axis)


def test_an_axis_gives_equal_parts_or_refuses():
    assert [Axis("tp", 3, rank).part(12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]
    with pytest.raises(ValueError, match="10 entries cannot be cut over axis tp of size 3"):
        Axis("tp", 3, 0).part(10)
    for wrong in ({"size": 2, "rank": 2}, {"size": 2, "ranks": (0, 1, 2)}, {"size": 0}):
        with pytest.raises(ValueError, match="disagree"):
            Axis("tp", **wrong)


def test_one_process_needs_no_process_group():
    assert not dist.is_initialized()
    mesh = Mesh.build()
    names = (*mesh.layout.sizes, "world")
    assert [(axis.size, axis.rank, axis.group) for axis in map(mesh.__getattribute__, names)] == [(1, 0, None)] * 8
    with pytest.raises(ValueError, match=r"the layout has 2 ranks, and 1 are running \(torch.distributed is not init"):
        Mesh.build(Layout(tp=2))


def _members(axis: Axis) -> tuple[int, ...]:
    """Who answers on the axis's own group, in the order of the group."""
    answers = [torch.zeros(1, dtype=torch.int64) for _ in range(axis.size)]
    dist.all_gather(answers, torch.tensor([dist.get_rank()]), group=axis.group)
    return tuple(int(answer) for answer in answers)


def _groups(layout: Layout) -> None:
    mesh, rank = Mesh.build(layout), dist.get_rank()
    dense, expert = ParamSpec((1,), zeros), ParamSpec((1,), zeros, expert=True)
    axes = {name: getattr(mesh, name) for name in layout.sizes}
    for name, axis in axes.items():
        assert axis.ranks == layout.ranks((name,), rank)
        assert axis.rank == layout.coordinates(rank)[name]
    axes |= {"world": mesh.world, "merged": mesh.merge("cp", "tp"), "data": mesh.data(), "edata": mesh.data(expert)}
    for axis in axes.values():
        assert axis.ranks[axis.rank] == rank
        if axis.size > 1:
            assert _members(axis) == axis.ranks
    assert mesh.world.size == layout.world_size
    assert mesh.merge("cp", "tp") is axes["merged"]
    assert mesh.data(dense) is mesh.data()
    assert mesh.data().ranks == layout.ranks(("dp", "cp"), rank)
    assert mesh.data(expert).ranks == mesh.edp.ranks
    assert mesh.view(dense) == mesh.view() == (mesh.dp, mesh.cp, mesh.tp)
    assert mesh.view(expert) == (mesh.edp, mesh.ep, mesh.etp)
    groups = [axis.group for axis in (*map(axes.get, layout.sizes), mesh.data(), mesh.data(expert)) if axis.group]
    assert len(set(groups)) == len(groups), "gradients never share a group with a layer's collectives"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=4),
        Layout(dp=2, tp=2, ep=2, etp=2),
        Layout(dp=2, pp=2, ep=2, order=("tp", "cp", "pp", "dp")),
        Layout(cp=2, tp=2, ep=4),
    ],
    ids=_name,
)
def test_the_groups_of_four_ranks_join_the_ranks_that_the_layout_names(layout):
    run(_groups, 4, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, cp=2, tp=2, ep=2, etp=2),
        Layout(dp=2, tp=2, pp=2, ep=4, order=("tp", "cp", "pp", "dp")),
        Layout(cp=2, tp=2, pp=2, ep=2),
    ],
    ids=_name,
)
def test_the_groups_of_eight_ranks_join_the_ranks_that_the_layout_names(layout):
    run(_groups, 8, layout)


def _divided() -> None:
    mesh = Mesh.build(Layout(tp=4))
    outer, inner = mesh.divide(mesh.tp, 2)
    assert (outer.size, inner.size) == (2, 2)
    assert outer.rank * inner.size + inner.rank == mesh.tp.rank
    assert _members(outer) == outer.ranks
    assert _members(inner) == inner.ranks
    assert outer.parent is inner.parent is mesh.tp
    assert all(a is b for a, b in zip(mesh.divide(mesh.tp, 2), (outer, inner), strict=True))
    whole, none = mesh.divide(mesh.tp, 4)
    assert (whole.ranks, none.size, none.group) == (mesh.tp.ranks, 1, None)
    with pytest.raises(ValueError, match="axis tp of size 4 cannot be divided into 3 parts"):
        mesh.divide(mesh.tp, 3)


def test_an_axis_divides_into_an_outer_and_an_inner_one():
    run(_divided, 4)


def _joined() -> None:
    mesh = Mesh.build(Layout(pp=4))
    place = mesh.pp.rank
    ends, others = mesh.joins(0, 3), mesh.joins(1, 3)
    assert ends.name == others.name == "tie"
    assert ends.ranks == ((0, 3) if place in (0, 3) else (place,))
    assert others.ranks == ((1, 3) if place in (1, 3) else (place,))
    assert mesh.joins(3, 0) is ends
    # Of four ranks two have made a group for each axis, and the next group that joins unlike ranks does not come about
    # unless the two others have made as many.
    halves = mesh.divide(mesh.pp, 2)
    for axis in (ends, others, *halves, mesh.merge("dp", "pp")):
        assert _members(axis) == axis.ranks if axis.group else axis.size == 1
    alone = mesh.joins(2, 2)
    assert (alone.name, alone.size, alone.group) == ("tie", 1, None)
    with pytest.raises(ValueError, match="ranks 1 and 4 of axis pp, of size 4, cannot be joined"):
        mesh.joins(1, 4)


def test_two_ranks_of_the_pipeline_are_joined_and_all_make_equally_many_groups():
    run(_joined, 4)


def _joined_columns() -> tuple[int, ...]:
    return Mesh.build(Layout(tp=2, pp=2)).joins(0, 1).ranks


def test_each_column_of_stages_is_joined_by_itself():
    assert run(_joined_columns, 4) == [(0, 2), (1, 3), (0, 2), (1, 3)]


def _wrong_world() -> None:
    with pytest.raises(ValueError, match=r"the layout has 4 ranks, and 2 are running$"):
        Mesh.build(Layout(tp=4))


def test_a_layout_of_other_ranks_than_run_is_refused():
    run(_wrong_world, 2)


def _timeouts() -> set[float]:
    mesh = Mesh.build(Layout(dp=2))
    groups = [dist.group.WORLD, mesh.dp.group, mesh.data().group]
    return {group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups}


def test_every_group_waits_as_long_as_the_default_one():
    (seconds,) = run(_timeouts, 2, timeout=45, checked=False)[0]
    assert seconds == 90  # of ranks.run: twice its own timeout

"""Lanes: each message comes to its reader, in the order of its lane and no other; opening them stops nobody."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megalite.comm import LaneKey, open_lanes, start_receive, start_send
from megalite.comm.lanes import _rounds
from megalite.mesh import Axis, Layout, Mesh, make_group
from tests.counting import count
from tests.pipeline.stages import end_waits_after
from tests.ranks import run

KINDS = ("activation", "gradient")
LINE = [(rank + back, rank + 1 - back, KINDS[back]) for rank in range(3) for back in (0, 1)]
RING = [*LINE, (3, 0, "activation"), (0, 3, "gradient")]
V = [(a, b, kind) for rank in range(3) for a, b in ((rank, rank + 1), (rank + 1, rank)) for kind in KINDS]
UNEVEN: list[LaneKey] = [(0, 1, "activation"), (2, 1, "activation"), (1, 2, "gradient"), (3, 0, "gradient")]
PLACEMENTS = {"line": LINE, "ring": RING, "v": V, "uneven": UNEVEN, "none": []}

ranks = st.integers(0, 5)
lanes_of_any_ranks = st.sets(st.tuples(ranks, ranks, st.sampled_from(KINDS)).filter(lambda key: key[0] != key[1]))


@given(lanes_of_any_ranks)
def test_no_rank_stands_twice_in_a_round_and_each_lane_is_in_one(lanes):
    rounds = _rounds(lanes)
    for pairs in rounds:
        assert max(Counter(rank for pair in pairs for rank in pair).values()) == 1
        for pair, keys in pairs.items():
            assert all(tuple(sorted(key[:2])) == pair for key in keys)
    assert sorted(key for pairs in rounds for keys in pairs.values() for key in keys) == sorted(lanes)


def exchanged(lanes: list[LaneKey], unequal: bool) -> tuple[list[LaneKey], dict[LaneKey, list[float]]]:
    """All messages of all lanes: sent in one order, read in another; and what was opened."""
    axis = Mesh.build(Layout(pp=4)).pp
    for _ in range(axis.rank % 3 if unequal else 0):
        make_group((axis.rank,), "alone")
    opened = open_lanes(axis, lanes)
    messages = {key: [torch.full((3,), 100.0 * number + turn) for turn in range(3)] for number, key in enumerate(lanes)}
    sends = [
        start_send(messages[key][turn], lane)
        for turn in range(3)
        for key, lane in sorted(opened.items(), reverse=True)
        if lane.rank == 0
    ]
    read: dict[LaneKey, list[float]] = {}
    for key, lane in sorted(opened.items()):
        if lane.rank == 1:
            received = [start_receive(torch.empty(3), lane) for _ in range(3)]
            read[key] = [one.wait()[0].item() for one in received]
    for send in sends:
        send.wait()
    return list(opened), read


@pytest.mark.parametrize("unequal", [False, True])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_each_message_comes_to_its_reader_in_the_order_of_its_lane(name, unequal):
    """Both kinds in both directions between the same two ranks, too; and where some ranks have made more groups before,
    by whose number torch names the next."""
    lanes = PLACEMENTS[name]
    for rank, (opened, read) in enumerate(run(exchanged, 4, lanes, unequal, checked=False)):
        assert sorted(opened) == sorted(key for key in lanes if rank in key[:2])
        wanted = {key: [100.0 * n + turn for turn in range(3)] for n, key in enumerate(lanes) if key[1] == rank}
        assert read == wanted


def groups_made(lanes: list[LaneKey]) -> int:
    axis = Mesh.build(Layout(pp=4)).pp
    before = len(dist.distributed_c10d._world.pg_map)
    open_lanes(axis, lanes)
    return len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize(("name", "groups"), [("line", 4), ("ring", 4), ("v", 8), ("uneven", 3), ("none", 0)])
def test_all_ranks_make_equally_many_groups(name, groups):
    """Two rounds, and in each as many as its busiest pair has lanes: with its partner, or alone."""
    assert run(groups_made, 4, PLACEMENTS[name], checked=False) == [groups] * 4


def sizes() -> str:
    end_waits_after(2)
    axis = Mesh.build(Layout(pp=2)).pp
    ((_, lane),) = open_lanes(axis, [(0, 1, "activation")]).items()
    try:
        if lane.rank == 0:
            start_send(torch.ones(20), lane).wait()
        else:
            start_receive(torch.zeros(10), lane).wait()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_message_of_another_size_than_its_place_ends_in_an_error_and_not_the_process():
    for text in run(sizes, 2, checked=False):
        assert re.search("[Tt]imed out", text), text


def counted() -> list[tuple[str, str, int, float]]:
    axis = Mesh.build(Layout(pp=2)).pp
    opened = open_lanes(axis, [(0, 1, "activation"), (1, 0, "gradient")])
    x = torch.zeros(5, 3, dtype=torch.bfloat16)
    with count() as seen:
        for lane in opened.values():
            (start_receive if lane.rank else start_send)(x, lane).wait()
    return [(call.kind, call.group, call.bytes, call.sent) for call in seen.record]


def test_what_is_counted_of_a_message_is_its_bytes_where_it_is_sent():
    there, back = (("send", 30, 30), ("recv", 30, 0))
    first, second = run(counted, 2, checked=False)
    assert [(kind, size, sent) for kind, _, size, sent in first] == [there, back]
    assert [(kind, size, sent) for kind, _, size, sent in second] == [back, there]
    assert [group for _, group, *_ in first] == ["activation lane", "gradient lane"]


def test_the_wrong_end_of_a_lane_is_an_error():
    lane = Axis("pp_activation", 2, 1)
    with pytest.raises(AssertionError, match="the reader of a lane sends nothing"):
        start_send(torch.zeros(1), lane)

"""Lanes: messages from one rank to another, in order.

A *lane* carries one kind of message in one direction between two ranks of an axis. Each has a process group of its own:
NCCL has no tags, so two kinds of message in one group would be taken for each other wherever the two ranks issue them
in different orders, without an error if their shapes agree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.comm.collectives import Pending, issue, start_all_reduce
from megalite.mesh import Axis, make_group

LaneKey = tuple[int, int, str]
"""(from, to, kind): ranks along the axis."""


def open_lanes(axis: Axis, lanes: Iterable[LaneKey]) -> dict[LaneKey, Axis]:
    """The lanes that this rank is an end of, each as an axis of two: the sender is its rank 0, the reader its rank 1.

    Every rank of every such axis calls it with the same lanes. Groups are made in rounds; in each, every rank makes one
    for each lane of a pair, with its partner or alone (see `make_group`). The first message of a group makes what the
    backend needs for it and may stop both ends until it is there, so it goes through here, in one order on all ranks.
    """
    _make_groups_even(axis)
    opened: dict[LaneKey, Axis] = {}
    for pairs in _rounds(lanes):
        for place in range(max(map(len, pairs.values()))):
            mine = next((keys for pair, keys in pairs.items() if axis.rank in pair), ())
            if place >= len(mine):
                make_group((axis.ranks[axis.rank],), "no lane")
                continue
            source, target, kind = key = mine[place]
            ends = axis.ranks[source], axis.ranks[target]
            # The group is named by its ranks in rising order; the axis keeps the direction.
            group = make_group(tuple(sorted(ends)), f"{kind} lane")
            rank = int(axis.rank == target)
            opened[key] = lane = Axis(f"{axis.name}_{kind}", 2, rank, group, ends, parent=axis)
            (start_receive if rank else start_send)(torch.zeros(1, device=_device(lane)), lane).wait()
    return opened


def _make_groups_even(axis: Axis) -> None:
    """Whoever has made fewer groups than others of the axis makes some alone: torch names the next by their number."""
    if axis.size > 1:
        made = len(dist.distributed_c10d._world.pg_names)
        most = start_all_reduce(torch.tensor([made], device=_device(axis)), axis, op="max").wait()
        for _ in range(int(most) - made):
            make_group((axis.ranks[axis.rank],), "no lane")


def _device(axis: Axis) -> str:
    """Where what its backend sends lies."""
    return "cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"


def _rounds(lanes: Iterable[LaneKey]) -> list[dict[tuple[int, int], Sequence[LaneKey]]]:
    """Pairs of ranks with their lanes, dealt to rounds in which no rank stands twice (an edge colouring)."""
    pairs: dict[tuple[int, int], list[LaneKey]] = defaultdict(list)
    for source, target, kind in sorted(set(lanes)):
        pairs[min(source, target), max(source, target)].append((source, target, kind))
    rounds: list[dict[tuple[int, int], Sequence[LaneKey]]] = []
    for pair, keys in sorted(pairs.items()):
        free = (one for one in rounds if not any(rank in other for other in one for rank in pair))
        if (into := next(free, None)) is None:
            rounds.append(into := {})
        into[pair] = keys
    return rounds


def start_send(x: Tensor, lane: Axis) -> Pending[None]:
    """Sends x, contiguous, along a lane; `wait()` returns once the reader takes it, and x may be written again."""
    assert lane.rank == 0, "the reader of a lane sends nothing on it"
    x = x.cpu() if _through_host(x, lane) else x
    start = partial(dist.isend, x, lane.ranks[1], lane.group, tag=size_tag(x))
    flight = issue("send", lane, [x], start)

    def finish(held: Tensor = x) -> None:  # x must outlive the transfer
        return None

    return Pending(finish, flight)


def start_receive(into: Tensor, lane: Axis) -> Pending[Tensor]:
    """Takes the next message of a lane into a contiguous tensor of its size and dtype."""
    assert lane.rank == 1, "the sender of a lane reads nothing from it"
    place = torch.empty_like(into, device="cpu") if _through_host(into, lane) else into
    start = partial(dist.irecv, place, lane.ranks[0], lane.group, tag=size_tag(place))
    return Pending(lambda: into if place is into else into.copy_(place), issue("receive", lane, [place], start))


def _through_host(x: Tensor, lane: Axis) -> bool:
    """Gloo reads and writes messages by the processor's addresses, whatever device they are of."""
    return x.device.type != "cpu" and dist.get_backend(lane.group) == "gloo"


def size_tag(x: Tensor) -> int:
    """A tag that is the message's size. Gloo, which matches by tag, dies of a message that is longer than its place and
    fills a longer one in part; ends that disagree in it miss one another until the timeout, which is an error."""
    return x.nbytes % 2**31

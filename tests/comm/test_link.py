"""A link takes the time that its bandwidth and latency say, no processor, and changes no number."""

from __future__ import annotations

import time

import pytest
import torch

from megalite.comm import (
    Call,
    Observer,
    observe,
    ring_shift,
    start_all_gather,
    start_all_reduce,
    start_all_to_all,
    start_broadcast,
    start_reduce_scatter,
)
from megalite.comm.link import Link, Wire, transfer_seconds
from megalite.comm.observe import seen
from megalite.comm.timeline import Timeline
from megalite.mesh import Axis, Layout, Mesh
from tests.counting import count
from tests.ranks import run

FAST = 1e15  # bytes per second: the latency is all there is
LATE_SECONDS = 0.03  # how much later than asked a busy machine may wake a sleeper


def start(call: Call) -> None:
    with seen(call, "issuing", "issued"):
        pass


def wait(call: Call) -> None:
    with seen(call, "waiting", "waited"):
        pass


def reduction(axis: str, payload_bytes: int = 0, *, parent: Axis | None = None) -> Call:
    return Call("all_reduce", Axis(axis, 2, parent=parent), payload_bytes)


def seconds_of(link: Link, *calls: Call) -> float:
    """From the issue of all, one after the other, to the results of all."""
    with observe(link):
        began = time.perf_counter()
        for call in calls:
            start(call)
        for call in calls:
            wait(call)
        return time.perf_counter() - began


def test_a_collective_takes_latency_plus_what_a_rank_sends_over_the_bandwidth():
    """An all-reduce of b bytes over 2 ranks sends 2 (n-1)/n b = b."""
    call = reduction("tp", 3000)
    assert transfer_seconds(call, Wire(1e5, 0.02)) == pytest.approx(0.05)
    assert 0.05 <= seconds_of(Link({"tp": (1e5, 0.02)}), call) <= 0.05 + LATE_SECONDS


def _sent(n: int) -> list[tuple[float, float]]:
    axis, timeline, x = Mesh.build(Layout(tp=n)).tp, Timeline(), torch.ones(12, 3)
    with observe(Link({"tp": (1e6, 0.0)}, timeline=timeline)), count() as counted:
        for pending in (
            start_all_reduce(x.clone(), axis),
            start_all_gather(x, axis, dim=1),
            start_reduce_scatter(x, axis),
            start_all_to_all(x, axis),
            start_broadcast(x.clone(), axis, source=axis.size - 1),
        ):
            pending.wait()
    took = [event.end - event.start for event in timeline.events]
    return [(1e6 * seconds, call.sent) for seconds, call in zip(took, counted.record, strict=True)]


@pytest.mark.parametrize("n", [2, 3])
def test_the_bytes_of_each_operation_are_those_that_a_ring_sends(n):
    """Counted where torch is called, on the rank that sends most: a broadcast's last rank sends nothing."""
    ranks = run(_sent, n, n, checked=False)
    for place in range(5):
        assert ranks[0][place][0] == pytest.approx(max(rank[place][1] for rank in ranks))


def _shifted() -> list[float]:
    axis, timeline = Mesh.build(Layout(tp=2)).tp, Timeline()
    with observe(Link({"tp": (1e4, 0.0)}, timeline=timeline)):
        began = time.perf_counter()
        received = ring_shift([torch.full((25,), float(axis.rank))], axis).wait()
        seconds = time.perf_counter() - began
    return [seconds, received[0][0].item()]


def test_a_shift_sends_all_that_is_handed_over_and_what_arrives_is_right():
    for rank, (seconds, received) in enumerate(run(_shifted, 2, checked=False)):
        assert seconds >= 100 / 1e4
        assert received == 1 - rank


def test_transfers_of_one_axis_queue_and_those_of_two_do_not():
    link = Link({"tp": (FAST, 0.04), "dp": (FAST, 0.04)})
    assert 0.08 <= seconds_of(link, reduction("tp"), reduction("tp")) <= 0.08 + LATE_SECONDS
    assert 0.04 <= seconds_of(link, reduction("tp"), reduction("dp")) <= 0.04 + LATE_SECONDS


def test_what_is_part_of_an_axis_shares_its_wire():
    """Gathers of weights and sums of gradients have groups of their own, and one network."""
    data = Axis("dense_data", 2)
    calls = reduction("dense_data"), reduction("dense_data_gathers2", parent=data)
    assert 0.08 <= seconds_of(Link({"dp": (FAST, 0.04)}), *calls) <= 0.08 + LATE_SECONDS


@pytest.mark.parametrize(
    ("wire", "slow", "fast"),
    [
        ("dp", ("dp", "dense_data", "world"), ("tp", "cp", "pp", "expert_data")),
        ("cp", ("cp", "dense_data", "world"), ("dp", "tp")),
        ("tp", ("tp", "world"), ("dense_data", "pp", "etp")),
        ("edp", ("edp", "expert_data", "world"), ("ep", "dense_data")),
    ],
)
def test_an_axis_slows_all_that_crosses_it_and_nothing_else(wire, slow, fast):
    link = Link({wire: (FAST, 0.05)})
    for axis in slow:
        assert seconds_of(link, reduction(axis)) >= 0.05
    assert seconds_of(link, *map(reduction, fast)) < 0.05


def test_work_between_issue_and_wait_hides_the_transfer_unless_overlap_is_off():
    for overlap, seconds in ((True, 0.06), (False, 0.11)):
        call = reduction("tp")
        with observe(Link({"tp": (FAST, 0.05)}, overlap=overlap)):
            began = time.perf_counter()
            start(call)
            time.sleep(0.06)
            wait(call)
            took = time.perf_counter() - began
        assert seconds <= took <= seconds + LATE_SECONDS


def test_a_link_takes_no_processor():
    before = time.process_time()
    assert seconds_of(Link({"tp": (FAST, 0.2)}), reduction("tp")) >= 0.2
    assert time.process_time() - before < 0.02


class Stopwatch(Observer):
    def waiting(self, call: Call) -> None:
        self.since = time.perf_counter()

    def waited(self, call: Call) -> None:
        self.seconds = time.perf_counter() - self.since


def test_other_observers_see_its_time_as_the_collectives_whoever_came_first():
    before, after = Stopwatch(), Stopwatch()
    with observe(before), observe(Link({"tp": (FAST, 0.05)})), observe(after):
        call = reduction("tp")
        start(call)
        wait(call)
    assert min(before.seconds, after.seconds) > 0.04  # the issue itself took a little of it


@pytest.mark.parametrize(
    ("wires", "says"),
    [
        ({"dense": (1.0, 0.0)}, "a link of axis dense is unknown; take one of dp, cp, tp"),
        ({"tp": (0.0, 0.0)}, "bytes_per_second > 0"),
        ({"tp": (1.0, -1.0)}, "latency_seconds >= 0"),
    ],
)
def test_a_link_that_cannot_be_is_refused(wires, says):
    with pytest.raises(ValueError, match=says):
        Link(wires)

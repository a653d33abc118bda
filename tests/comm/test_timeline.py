"""A timeline shows each event where it belongs, as text and as a picture."""

from __future__ import annotations

import time

import pytest

from megalite.comm import Call, observe
from megalite.comm.link import Link
from megalite.comm.observe import seen
from megalite.comm.timeline import Timeline
from megalite.mesh import Axis

MARGIN = len("other transfers ")


def example() -> Timeline:
    timeline = Timeline()
    for event in (
        ("compute", "F0", 5.00, 5.02),
        ("compute", "B0", 5.04, 5.10),
        ("waits", "", 5.02, 5.04),
        ("gathers", "all_gather over dp", 5.00, 5.04),
        ("gathers", "all_gather over dp", 5.09, 5.10),
    ):
        timeline.add(*event)
    return timeline


def test_a_bar_begins_and_ends_in_its_place():
    scale, gathers, compute, waits = example().text(width=10).splitlines()
    assert scale.endswith("100 ms")
    assert gathers[MARGIN:] == "1===     2"
    assert compute[MARGIN:] == "F0  B0####"
    assert waits[MARGIN:] == "  .."
    assert (gathers.split()[0], compute.split()[0], waits.split()[0]) == ("gathers", "compute", "waits")


def test_the_shortest_event_has_a_bar_and_no_bar_leaves_the_picture():
    timeline = example()
    timeline.add("reductions", "all_reduce over dp", 5.10, 5.10)
    assert timeline.text(width=10).splitlines()[-1].endswith(" 1")
    assert all(len(line) <= MARGIN + 10 for line in timeline.text(width=10).splitlines())


def test_a_part_has_what_begins_within_it():
    assert [event.name for event in example().between(5.0, 5.04).events] == ["F0", "", "all_gather over dp"]


def test_nothing_is_no_error():
    assert Timeline().text() == "(nothing happened)"


def test_it_is_drawn_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    example().draw(tmp_path / "timeline.png", title="an example")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("overlap", [True, False])
def test_a_link_notes_what_travels_and_the_timeline_what_waits(overlap):
    timeline, call = Timeline(), Call("all_gather", Axis("dp", 2), 0)
    with observe(Link({"dp": (1.0, 0.05)}, timeline=timeline, overlap=overlap)), observe(timeline):
        with seen(call, "issuing", "issued"):
            pass
        with timeline.range("F0"):
            time.sleep(0.02)
        with seen(call, "waiting", "waited"):
            pass
    lanes = {event.lane: event for event in timeline.events}
    assert sorted(lanes) == ["compute", "gathers", "waits"]
    assert lanes["gathers"].end - lanes["gathers"].start == pytest.approx(0.05)
    assert (lanes["waits"].start < lanes["compute"].start) != overlap  # without overlap the rank waits at issue

"""What a rank knows of itself: its collectives, counted by axis, what it waits for, and where it stands."""

from __future__ import annotations

import re
import threading

import pytest

from megalite.comm.observe import Call, observe, seen
from megalite.mesh import Axis
from megalite.train.progress import RECENT, Progress, State, place_of_main


class Mark:
    passed = False

    def query(self) -> bool:
        return self.passed


def call(name: str = "tp") -> Call:
    return Call("all_reduce", Axis(name, 2), 8)


def test_collectives_are_counted_by_axis_and_a_wait_begins_anew_with_each():
    progress = Progress()
    with observe(progress):
        one, two, other = call(), call(), call("dp")
        for each in (one, two, other):
            with seen(each, "issuing", "issued"):
                issuing = progress.longest_wait()
                assert issuing is not None and issuing.axis == each.axis.name
        assert progress.longest_wait() is None
        with seen(one, "waiting", "waited"):
            waiting = progress.longest_wait()
            assert waiting is not None and (waiting.number, waiting.ranks) == (1, (0, 1))
            assert progress.in_collective()
    state = State.loads(progress.state(3).dumps())
    assert (state.rank, state.counts, state.waits_in) == (3, {"tp": 2, "dp": 1}, "")
    assert state.operation("tp", 2) == "all_reduce" and state.operation("tp", 3) is None
    assert not progress.in_collective()


def test_what_raised_in_a_collective_is_known_by_its_thread():
    progress = Progress()
    with observe(progress), pytest.raises(RuntimeError), seen(call(), "issuing", "issued"):
        raise RuntimeError
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(progress.in_collective()))
    thread.start()
    thread.join()
    assert progress.in_collective() and elsewhere == [False]


def test_only_the_last_names_of_an_axis_are_kept():
    progress = Progress()
    for _ in range(RECENT + 5):
        progress.issuing(call())
    state = progress.state(0)
    assert state.counts == {"tp": RECENT + 5} and len(state.recent["tp"]) == RECENT
    assert state.operation("tp", 5) is None and state.operation("tp", 6) == "all_reduce"


def test_on_a_device_a_collective_waits_until_its_mark_is_passed():
    """Where wait() returns at once: the oldest mark that the device has not passed is what hangs."""
    marks: list[Mark] = []

    def mark() -> Mark:
        marks.append(Mark())
        return marks[-1]

    progress = Progress(mark)
    with observe(progress):
        for name in ("tp", "dp", "tp"):
            each = call(name)
            with seen(each, "issuing", "issued"):
                pass
            with seen(each, "waiting", "waited"):
                pass
    waits = []
    for each in marks:
        waiting = progress.longest_wait()
        assert waiting is not None
        waits.append((waiting.axis, waiting.number))
        each.passed = True
    assert waits == [("tp", 1), ("dp", 1), ("tp", 2)] and progress.longest_wait() is None


def test_a_place_is_a_line_of_ones_own_and_not_of_torch():
    assert re.fullmatch(
        r".*test_progress.py:\d+ in test_a_place_is_a_line_of_ones_own_and_not_of_torch", place_of_main()
    )

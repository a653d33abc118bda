"""Observers see every collective of a rank, in order, and cost nothing once they are gone."""

from __future__ import annotations

import pytest
import torch

from megalite.comm import all_gather, reduce, start_all_reduce
from megalite.comm.observe import Call, Observer, observe, seen
from megalite.mesh import Axis, Layout, Mesh
from tests.ranks import run


class Notes(Observer):
    """Writes down what it is told, under a name of its own."""

    def __init__(self, name: str = "", into: list[str] | None = None) -> None:
        self.name, self.notes, self.calls = name, [] if into is None else into, set()

    def _note(self, event: str, call: Call) -> None:
        self.notes.append(f"{self.name}{event} {call} {call.payload_bytes}")
        self.calls.add(call)

    def issuing(self, call: Call) -> None:
        self._note("issuing", call)

    def issued(self, call: Call) -> None:
        self._note("issued", call)

    def waiting(self, call: Call) -> None:
        self._note("waiting", call)

    def waited(self, call: Call) -> None:
        self._note("waited", call)


def _watched_pair() -> tuple[list[str], int, list[str]]:
    tp = Mesh.build(Layout(tp=2)).tp
    notes = Notes()
    with observe(notes):
        first = start_all_reduce(torch.ones(3, dtype=torch.float64), tp)
        second = start_all_reduce(torch.ones(1, dtype=torch.float32), tp)
        second.wait()
        first.wait()
        first.wait()  # the result is there: nobody waits
    start_all_reduce(torch.ones(1), tp).wait()
    passed = Notes()
    x = torch.ones(2, 4, dtype=torch.float64, requires_grad=True)
    with observe(passed):
        all_gather(reduce(x, tp), tp, 0).sum().backward()
    return notes.notes, len(notes.calls), [note for note in passed.notes if note.startswith("issuing")]


def test_each_collective_is_seen_from_issue_to_result_and_none_outside_of_the_block():
    notes, calls, passed = run(_watched_pair, 2)[1]
    assert notes == [
        *("issuing all_reduce over tp 24", "issued all_reduce over tp 24"),
        *("issuing all_reduce over tp 4", "issued all_reduce over tp 4"),
        *("waiting all_reduce over tp 4", "waited all_reduce over tp 4"),
        *("waiting all_reduce over tp 24", "waited all_reduce over tp 24"),
    ]
    assert calls == 2  # one Call from issue to result, so that an observer may know it again
    assert [note.split()[1] for note in passed] == ["all_reduce", "all_gather", "reduce_scatter"]  # backward's too


def test_an_axis_of_one_rank_has_nothing_to_see():
    notes = Notes()
    with observe(notes):
        start_all_reduce(torch.ones(2), Axis("tp")).wait()
    assert notes.notes == []


def test_several_observers_nest_and_leave_the_one_who_left_out():
    heard: list[str] = []
    call = Call("all_reduce", Axis("tp"), 8)
    with observe(Notes("a ", heard)):
        with observe(Notes("b ", heard)), seen(call, "waiting", "waited"):
            pass
        with seen(call, "issuing", "issued"):
            pass
    with seen(call, "issuing", "issued"):
        pass
    order = [note.rsplit(" all_reduce", 1)[0] for note in heard]
    assert order == ["a waiting", "b waiting", "b waited", "a waited", "a issuing", "a issued"]


def test_what_raises_is_not_said_to_have_ended():
    notes = Notes()
    with observe(notes), pytest.raises(RuntimeError, match="lost"), seen(Call("x", Axis("tp"), 0), "waiting", "waited"):
        raise RuntimeError("lost")
    assert notes.notes == ["waiting x over tp 0"]

"""A hang's report leads to its cause and stays short."""

from __future__ import annotations

from megalite.train import report
from megalite.train.progress import State, Waiting

WAITING = Waiting("all_reduce", "dp", (0, 2, 4), 64, 7, 0.0)


def reported(states: dict[int, State], processes: dict[int, str], size: int) -> list[str]:
    text = report.hang(
        WAITING, states, processes, rank=0, size=size, seconds=9.0, timeout_seconds=5.0, folder="run/hang"
    )
    return [line.split(";")[0].strip() for line in text.splitlines()[1:-2]]


def test_a_report_begins_with_those_nearest_to_the_cause():
    states = {
        0: State(0, 5, {"dp": 7}, {"dp": ["all_reduce"]}, "all_reduce over dp, number 7", "a:1 in f"),
        1: State(1, 5, {"tp": 3}, {}, "", "b:2 in g"),
        2: State(2, 5, {"dp": 6}, {}, "all_gather over tp, number 4", "a:1 in f"),
        3: State(3, 5, {"tp": 4}, {}, "all_gather over tp, number 4", "a:1 in f"),
    }
    assert reported(states, {4: "gone"}, 5) == [
        "rank 4 went away without a word: its process was killed (by a person, or for want of memory) or crashed",
        "rank 1 is not asked for: waits in no collective",  # rank 2 waits for it elsewhere
        "rank 2 did not come: it has begun 6 over dp and waits in all_gather over tp, number 4",
        "rank 0 came and waits in all_reduce over dp, number 7",
        "rank 3 is not asked for: waits in all_gather over tp, number 4",
    ]


def test_a_report_on_many_ranks_stays_short():
    states = {rank: State(rank, 5, {"dp": 7}, {"dp": ["all_reduce"]}) for rank in range(1000) if rank != 4}
    lines = reported(states, {4: ""}, 1000)
    assert len(lines) == report.MOST_LINES + 1 and lines[0].startswith("rank 4 does not answer: its process, its mach")
    assert lines[-1] == f"and {1000 - report.MOST_LINES} more"
    assert report.shorten(range(1000)) == "0, 1, 2, 3, ... 999"


def test_the_lost_are_told_from_those_that_have_ended_their_run():
    line = report.lost({3: "gone", 1: "", 2: "running"}, [1])
    assert line == (
        "rank 1 has ended its run before the others; rank 2 does not answer, though its process is there; rank 3 went "
        "away without a word: its process was killed (by a person, or for want of memory) or crashed"
    )
    assert report.lost(dict.fromkeys(range(20), "gone"), []).endswith(f"; and {20 - report.MOST_LINES} more")

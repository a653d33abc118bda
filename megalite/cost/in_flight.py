"""What a rank of a pipeline holds of other passes while it works on one.

A pass is a micro-batch in a stage. From its F to its B or BW it holds what its forward kept, from B to W what the
products for weights still read. Beside them lie messages: on each lane a receive is posted ahead, what was sent is held
until its reader is known to have taken it, and what the next stage of the same rank reads until that begins.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from megalite.pipeline.schedule import Schedule, held


class Load(NamedTuple):
    """Bytes of one pass: kept from F to B or BW, deferred from B to W; read from the stage before, given to the next.

    A gradient has the size of its activation.
    """

    kept: int
    deferred: int
    reads: int
    gives: int


def posted_receives(schedule: Schedule, rank: int, loads: Mapping[int, Load]) -> int:
    """Of all lanes that end at this rank: the largest of the messages of each."""
    lanes: dict[tuple[int, str], int] = {}
    for stage, load in loads.items():
        for other, kind, size in ((stage - 1, "activation", load.reads), (stage + 1, "gradient", load.gives)):
            if 0 <= other < schedule.stages and (source := schedule.rank_of[other]) != rank:
                lanes[source, kind] = max(lanes.get((source, kind), 0), size)
    return sum(lanes.values())


def beside(schedule: Schedule, rank: int, loads: Mapping[int, Load]) -> dict[tuple[str, int], int]:
    """(kind, stage) -> the most that is held as an action of this kind and stage begins, beside its own pass.

    loads: of each stage of the rank. What was sent to a rank counts until something is read from that rank, which
    mostly tells that it was taken: `megalite.pipeline.post`.
    """
    most: dict[tuple[str, int], int] = {}
    handed = 0
    sent: dict[int, int] = defaultdict(int)
    for (kind, stage, _), passes in zip(schedule.rows[rank], _held(schedule, rank, loads), strict=False):
        load = loads[stage]
        source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
        came, goes = (load.reads, load.gives) if kind == "F" else (load.gives, load.reads)
        if kind != "W" and 0 <= source < schedule.stages:
            if schedule.rank_of[source] == rank:
                handed -= came
            else:
                sent[schedule.rank_of[source]] = 0
        own = {"F": 0, "W": load.deferred}.get(kind, load.kept)
        most[kind, stage] = max(most.get((kind, stage), 0), passes - own + handed + sum(sent.values()))
        if kind != "W" and 0 <= target < schedule.stages:
            if schedule.rank_of[target] == rank:
                handed += goes
            else:
                sent[schedule.rank_of[target]] += goes
    return most


def most_in_flight(schedule: Schedule, rank: int, loads: Mapping[int, Load]) -> int:
    """The most that passes hold together, messages aside."""
    return max(_held(schedule, rank, loads))


def _held(schedule: Schedule, rank: int, loads: Mapping[int, Load]) -> Iterator[int]:
    """What passes hold before the first action of the rank and after each."""
    return held(schedule.rows[rank], lambda stage: (loads[stage].kept, loads[stage].deferred))

"""Schedules of two stages a rank, laid in a V: rank r of p holds stages r and 2p - 1 - r, so rank 0 has both ends.

They are told in one of two ways:

- in phases: so many rounds, and what one round does (zb_v, dualpipe_v). Their shape takes some number of micro-batches;
  with fewer, it is made whole and the missing ones are left out, for which none of the others waits;
- by the moments at which a micro-batch passes a rank, the same for all, some time apart (v_half, v_min).

With p ranks and m micro-batches; F, B, W those of one stage, half of what a rank does; activations in whole-stage
micro-batches, two stages' to one:

| schedule   | idle_span                                     | most held on any rank               |
|------------|-----------------------------------------------|-------------------------------------|
| zb_v       | 2 (p-1) (B-W), m >= 2p - 1, W <= F <= B       | min(m, p), on all from m = 2p - 1   |
| dualpipe_v | (p-1) (F+B-W), m >= 2p, W <= B <= F <= B + W  | min(m, p + 1/2), on all from m = 2p |
| v_half     | at most 3 (p-1) at F=B=W=1, m >= (p + 2) // 2 | min(m, (p + 2) // 2)                |
| v_min      | at most 4 (p-1) + 1 at F=B=W=1                | min(m, (p + 4) // 3)                |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

from megalite.pipeline.lower import needs
from megalite.pipeline.schedule import Action, Row, Schedule, held_at_most, in_a_v

Phases = Sequence[tuple[int, str]]
Moments = Mapping[str, int]


def zb_v(ranks: int, microbatches: int) -> Schedule:
    """No bubble where F=B=W and m >= 2p - 1, with the activations of 1F1B's first rank on all (arXiv:2401.10241,
    section 6). A micro-batch's forward ends, and its backward begins, on the rank where it started."""

    def phases(rank: int, of: int) -> Phases:
        after = ranks - 1 - rank
        return [
            (2 * after + 1, "F0"),
            (rank, "F1 F0"),
            (after + 1, "F1 B1 W"),
            (of - ranks - after, "F0 B0 W F1 B1 W"),
            (after, "B0 W F1 B1 W"),
            (rank, "B0 B1"),
            (after + 1, "B0 W"),
            (2 * rank, "W"),
        ]

    whole = max(microbatches, 2 * ranks - 1)
    rows, _ = _in_phases([phases(rank, whole) for rank in range(ranks)], microbatches)
    if microbatches < whole:  # those left out leave gaps at the end, for which W are better placed anew
        rows = _with_weight_gradients([_until_last_forward(row) for row in rows])
    return _schedule("zb_v", rows)


def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """A forward and a backward of different micro-batches in pairs, one's messages under the other's work: DualPipe
    (arXiv:2412.19437, section 3.2.1) folded in two, so that each stage lives once. Shaped for m >= 2p."""

    def phases(rank: int, of: int) -> Phases:
        after = ranks - 1 - rank
        half, odd = divmod(rank + 1, 2)
        # the last rank starts the way back: as a pair, its first round would make the others wait for both
        alone = 1 if after == 0 else 0
        return [
            (2 * after, "F0"),
            (rank + 1, "F0 F1"),
            (after, "B1 W F1"),
            (alone, "F0 BW1 F1&BW0"),
            (of - ranks - after - alone, "F0&BW1 F1&BW0"),
            (after, "BW1 F1&BW0"),
            (half, "BW1 BW0"),
            (odd, "BW1 B0"),
            (half, "B1 B0"),
            (after, "W B0"),
            (rank + 1, "W"),
        ]

    whole = max(microbatches, 2 * ranks)
    rows, paired = _in_phases([phases(rank, whole) for rank in range(ranks)], microbatches)
    return _schedule("dualpipe_v", rows, paired)


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the activations of 1F1B and about half its bubble, which does not grow with m while W + 2B >= 2F and
    W + 2F >= 2B (arXiv:2405.15362)."""
    p, gap = ranks, 0 if ranks % 2 else 3
    moments = [
        {"F0": 2 * r, "F1": 3 * p - 2 - r, "B1": 3 * p - 1 + gap + 2 * r, "B0": 6 * p - 2 + gap - r} for r in range(p)
    ]
    return _repeated("v_half", moments, microbatches)


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of the activations of 1F1B and about two thirds of its bubble (arXiv:2405.15362), which for a part of
    W >= max(F, B) alone does not grow with m."""
    p, gap = ranks, 0 if ranks % 3 else 2
    moments = [{"F0": r, "F1": 2 * p - 1 - r, "B1": 2 * p + gap + r, "B0": 4 * p - 1 + gap - r} for r in range(p)]
    return _repeated("v_min", moments, microbatches)


def _schedule(name: str, rows: Sequence[Row], paired: Iterable[Action] = ()) -> Schedule:
    return Schedule(name, tuple(rows), in_a_v(len(rows)), frozenset(paired), tuple(map(held_at_most, rows)))


def _in_phases(phases: Sequence[Phases], microbatches: int) -> tuple[list[Row], set[Action]]:
    """The rows of the micro-batches below `microbatches`, and the forwards that begin a pair.

    A word is an action on a rank's first stage (0) or its second (1), of the next micro-batch that has not had it; W
    is that of the oldest B without; F0&BW1 is a pair.
    """
    rows: list[Row] = []
    paired: set[Action] = set()
    for rank, rounds in enumerate(phases):
        row: list[Action] = []
        done: Counter[tuple[str, int]] = Counter()
        waiting: deque[Action] = deque()
        for word in (word for times, words in rounds for word in words.split() * times):
            if word == "W":
                row.append(waiting.popleft()._replace(kind="W"))
                continue
            for part in word.split("&"):
                kind, which = part[:-1], int(part[-1])
                stage = (rank, 2 * len(phases) - 1 - rank)[which]
                row.append(Action(kind, stage, done[kind[0], which]))
                done[kind[0], which] += 1
                if kind == "B":
                    waiting.append(row[-1])
            if "&" in word:
                paired.add(row[-2])
        rows.append(tuple(action for action in row if action.microbatch < microbatches))
    return rows, {action for action in paired if action.microbatch < microbatches}


_INTERVAL = 6  # a rank's six passes of one micro-batch, at F=B=W=1


def _repeated(name: str, moments: Sequence[Moments], microbatches: int) -> Schedule:
    rows = [_in_slots(rank, len(moments), moments[rank], microbatches) for rank in range(len(moments))]
    return _schedule(name, _with_weight_gradients(rows))


def _in_slots(rank: int, ranks: int, moments: Moments, microbatches: int) -> Row:
    """A rank's actions by their moments, those of each micro-batch an interval after the one before; in the slots
    between, W, oldest first, as long as new micro-batches come."""
    stages = (rank, 2 * ranks - 1 - rank)
    slots = {
        first + _INTERVAL * each: Action(word[0], stages[int(word[1])], each)
        for word, first in moments.items()
        for each in range(microbatches)
    }
    row: list[Action] = []
    waiting: deque[Action] = deque()
    for time in range(max(slots) + 1):
        if time in slots:
            row.append(slots[time])
            if slots[time].kind == "B":
                waiting.append(slots[time]._replace(kind="W"))
        elif waiting and time < moments["F0"] + _INTERVAL * (microbatches - 1):
            row.append(waiting.popleft())
    return tuple(row)


def _until_last_forward(row: Row) -> Row:
    """A row without the W that come after its last forward."""
    last = max(at for at, action in enumerate(row) if action.kind == "F")
    return tuple(action for at, action in enumerate(row) if action.kind != "W" or at < last)


def _with_weight_gradients(rows: Sequence[Row]) -> list[Row]:
    """Puts the W that rows lack, oldest first, where at F=B=W their rank would wait, and the rest at its end."""
    left = [deque(row) for row in rows]
    waiting: list[deque[Action]] = [deque() for _ in rows]
    stated = {action for row in rows for action in row if action.kind == "W"}
    whole: list[list[Action]] = [[] for _ in rows]
    done: set[Action] = set()
    while any(left) or any(waiting):
        now: list[Action] = []
        for rank, row in enumerate(left):
            if row and done.issuperset(needs(row[0], 2 * len(rows))):
                now.append(row.popleft())
            elif waiting[rank]:
                now.append(waiting[rank].popleft())
            else:
                continue
            whole[rank].append(now[-1])
            later = now[-1]._replace(kind="W")
            if now[-1].kind == "B" and later not in stated:
                waiting[rank].append(later)
        assert now, "rows of F and B that wait in a circle"
        done.update(now)
    return [tuple(row) for row in whole]

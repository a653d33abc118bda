"""Schedules of two stages a rank, laid in a V: rank r of p holds stages r and 2p - 1 - r, so rank 0 has both ends.

What a rank does with its forwards and backwards is told in one of two ways:

- in phases: so many rounds, and what one round does (zb_v, dualpipe_v). Their shape takes some number of micro-batches;
  with fewer, it is made whole and the missing ones are left out, for which none of the others waits;
- by the moments at which the first micro-batch passes a rank, repeated with every micro-batch (v_half, v_min).

The W go, oldest first, where their rank would wait, or where without them it would hold too much (all but dualpipe_v,
which says in its phases where). With p ranks and m micro-batches, in whole-stage micro-batches:

| schedule   | most held on any rank | that much on every rank |
|------------|-----------------------|-------------------------|
| zb_v       | min(m, p)             | m >= 2p - 1             |
| dualpipe_v | min(m, (2p + 1) / 2)  | m >= 2p                 |
| v_half     | min(m, (p + 2) // 2)  |                         |
| v_min      | min(m, (p + 4) // 3)  |                         |
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence

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
            (after + 1, "F1 B1"),
            (of - ranks - after, "F0 B0 F1 B1"),
            (after, "B0 F1 B1"),
            (rank, "B0 B1"),
            (after + 1, "B0"),
        ]

    whole = max(microbatches, 2 * ranks - 1)
    orders, _ = _in_phases([phases(rank, whole) for rank in range(ranks)], microbatches)
    return _schedule("zb_v", _with_weight_gradients(orders, limit=2 * ranks))


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
    """Half the activations of 1F1B and about half its bubble (arXiv:2405.15362). The bubble does not grow with m while
    W + 2B >= 2F and W + 2F >= 2B."""
    p, gap = ranks, 0 if ranks % 2 else 3
    moments = [
        {"F0": 2 * r, "F1": 3 * p - 2 - r, "B1": 3 * p - 1 + gap + 2 * r, "B0": 6 * p - 2 + gap - r} for r in range(p)
    ]
    orders = [_in_order(rank, ranks, of, microbatches) for rank, of in enumerate(moments)]
    return _schedule("v_half", _with_weight_gradients(orders, limit=2 * ((p + 2) // 2)))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """A third of the activations of 1F1B and about two thirds of its bubble, at F=B=W (arXiv:2405.15362)."""
    p, gap = ranks, 0 if ranks % 3 else 2
    moments = [{"F0": r, "F1": 2 * p - 1 - r, "B1": 2 * p + gap + r, "B0": 4 * p - 1 + gap - r} for r in range(p)]
    orders = [_in_order(rank, ranks, of, microbatches) for rank, of in enumerate(moments)]
    return _schedule("v_min", _with_weight_gradients(orders, limit=2 * ((p + 4) // 3)))


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


def _in_order(rank: int, ranks: int, moments: Moments, microbatches: int) -> Row:
    """A rank's forwards and backwards by their moments, those of each micro-batch an interval after the one before."""
    stages = (rank, 2 * ranks - 1 - rank)
    timed = [
        (first + _INTERVAL * each, Action(word[0], stages[int(word[1])], each))
        for word, first in moments.items()
        for each in range(microbatches)
    ]
    return tuple(action for _, action in sorted(timed))


def _with_weight_gradients(orders: Sequence[Row], *, limit: int) -> list[Row]:
    """Puts the W into rows of F and B, oldest first: where, at F=B=W, a rank would wait for what it reads, or holds
    `limit` activations before a forward; the rest at the end."""
    last = 2 * len(orders) - 1
    left = [deque(order) for order in orders]
    waiting: list[deque[Action]] = [deque() for _ in orders]
    rows: list[list[Action]] = [[] for _ in orders]
    held = [0] * len(orders)
    done: set[Action] = set()
    while any(left) or any(waiting):
        now: list[Action] = []
        for rank, order in enumerate(left):
            full = held[rank] == limit and bool(order) and order[0].kind == "F"
            if order and not full and _reads(order[0], last) <= done:
                now.append(order.popleft())
            elif waiting[rank]:
                now.append(waiting[rank].popleft()._replace(kind="W"))
            else:
                continue
            rows[rank].append(now[-1])
            held[rank] += {"F": 1, "B": 0, "W": -1}[now[-1].kind]
            if now[-1].kind == "B":
                waiting[rank].append(now[-1])
        assert now, f"{limit} activations a rank are too few for this order: nothing moves"
        done.update(now)
    return [tuple(row) for row in rows]


def _reads(action: Action, last: int) -> set[Action]:
    """What must be done before a forward or a B; `last` is the last stage."""
    kind, stage, microbatch = action
    if kind == "F":
        return {Action("F", stage - 1, microbatch)} if stage else set()
    above = {Action("B", stage + 1, microbatch)} if stage < last else set()
    return above | {Action("F", stage, microbatch)}

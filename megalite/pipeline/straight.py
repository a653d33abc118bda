"""Schedules of one stage a rank, and the one pattern that they and the looped ones share.

A row is told by two numbers: how many forwards come before the first backward (`warm_up`), and how many backwards W
stays behind its B (`lag`). With p ranks, rank r from 0, and m micro-batches:

| schedule   | warm_up     | lag  | idle_span                      | most held      |
|------------|-------------|------|--------------------------------|----------------|
| naive      | 1           | BW   | (p-1) m (F+B+W)                | 1              |
| gpipe      | m           | BW   | (p-1) (F+B+W)                  | m              |
| 1f1b       | p - r       | BW   | (p-1) (F+B+W)                  | min(m, p-r)    |
| eager_1f1b | 2(p-r) - 1  | BW   | (p-1) (F+B+W)                  | 2(p-r) - 1     |
| zb_h1      | p - r       | r    | (p-1) (F+B-W), m >= p          | p              |
| zb_h2      | 2(p-r) - 1  | 2 r  | (p-1) (F+B-2W), m >= 2p - 1    | 2p - 1         |

What a warm-up of p - r costs where messages take time, and one of 2(p-r) - 1 does not, `simulate` shows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megalite.pipeline.schedule import Action, Row, Schedule, in_line

Pass = tuple[int, int]  # stage, micro-batch


def in_turns(forwards: Sequence[Pass], backwards: Sequence[Pass], *, warm_up: int, lag: int | None = None) -> Row:
    """`warm_up` forwards, then a backward and a forward in turn while there are any.

    lag None writes each backward as BW; a number, as B, with the W of the backward that many before it right after; the
    W left over end the row. Holds min(forwards, warm_up + lag) activations at most.
    """
    row = [Action("F", *each) for each in forwards[:warm_up]]
    for turn, each in enumerate(backwards):
        row.append(Action("BW" if lag is None else "B", *each))
        if lag is not None and turn >= lag:
            row.append(Action("W", *backwards[turn - lag]))
        row += [Action("F", *later) for later in forwards[warm_up + turn : warm_up + turn + 1]]
    if lag:
        row += [Action("W", *each) for each in backwards[-lag:]]
    return tuple(row)


def _straight(
    name: str,
    ranks: int,
    microbatches: int,
    *,
    warm_up: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> Schedule:
    rows, peaks = [], []
    for rank in range(ranks):
        passes = [(rank, microbatch) for microbatch in range(microbatches)]
        behind = lag(rank) if lag else None
        rows.append(in_turns(passes, passes, warm_up=warm_up(rank), lag=behind))
        peaks.append(min(microbatches, warm_up(rank) + (behind or 0)))
    return Schedule(name, tuple(rows), in_line(ranks), peaks=tuple(peaks))


def naive(ranks: int, microbatches: int) -> Schedule:
    """One micro-batch at a time, layer by layer: a rank works 1/ranks of the time, however many micro-batches."""
    return _straight("naive", ranks, microbatches, warm_up=lambda rank: 1)


def gpipe(ranks: int, microbatches: int) -> Schedule:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    return _straight("gpipe", ranks, microbatches, warm_up=lambda rank: microbatches)


def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """1F1B: as many forwards as there are stages from here to the end, then backwards as they come
    (arXiv:1806.03377, its flushing form arXiv:2104.04473)."""
    return _straight("1f1b", ranks, microbatches, warm_up=lambda rank: ranks - rank)


def eager_1f1b(ranks: int, microbatches: int) -> Schedule:
    """1F1B with forwards so far ahead that a message may take as long as a pass without anybody's waiting for it
    (arXiv:2211.05322), for nearly twice the activations."""
    return _straight("eager_1f1b", ranks, microbatches, warm_up=lambda rank: 2 * (ranks - rank) - 1)


def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """1F1B whose W wait, r of them on rank r, so that the B above are sooner: a third of the bubble where F=B=W, with
    the activations of 1F1B's first rank on all (arXiv:2401.10241, section 2.1). Its law asks W <= F."""
    return _straight("zb_h1", ranks, microbatches, warm_up=lambda rank: ranks - rank, lag=lambda rank: rank)


def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """No bubble where F=B=W, with nearly twice the activations of 1F1B (arXiv:2401.10241, section 2.1). Its law asks
    W <= F and 2W <= F + B."""
    return _straight(
        "zb_h2", ranks, microbatches, warm_up=lambda rank: 2 * (ranks - rank) - 1, lag=lambda rank: 2 * rank
    )

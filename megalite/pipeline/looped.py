"""Schedules of several stages a rank, dealt around and around: stage s on rank s mod p (arXiv:2104.04473).

Micro-batches go in groups: a rank takes a group through its first stage, then its second, and so on, before the next
group. Told, as in `straight`, by warm_up and lag, in stages: p ranks, rank r from 0, v stages a rank, groups of g.

| schedule       | g         | warm_up                 | lag | idle_span at m >= p  | most held, in stages     |
|----------------|-----------|-------------------------|-----|----------------------|--------------------------|
| interleaved    | about p   | (v-1) g + 2(p-1-r) + 1  | BW  | (p-1) (F+B+W) / v    | min(m v, warm_up)        |
| bfs            | m         | m v                     | BW  | (p-1) (F+B+W) / v    | m v                      |
| interleaved_zb | about p   | (v-1) g + (p-1-r) + 1   | r   | (p-1) (F+B-W) / v    | min(m v, warm_up + lag)  |

with F, B, W those of a whole rank. The last row's law is for W <= F.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from megalite.pipeline.schedule import Schedule, in_loops
from megalite.pipeline.straight import in_turns


def groups_of(microbatches: int, group: int) -> list[range]:
    """The micro-batches in as many groups of at least `group` as there are, sizes as even as can be, larger ones first.

    Fewer than `group` are one group. A short group would starve the ranks at its end, and for v > 2 hang; uneven ones
    cost activations alone: the idle time of m micro-batches, any m >= p, is the formula's.
    """
    groups = max(1, microbatches // group)
    least, more = divmod(microbatches, groups)
    starts = [index * least + min(index, more) for index in range(groups + 1)]
    return [range(*bounds) for bounds in pairwise(starts)]


def _looped(
    name: str,
    ranks: int,
    microbatches: int,
    virtual_stages: int,
    *,
    group: int,
    ahead: Callable[[int], int],
    lag: Callable[[int], int] | None = None,
) -> Schedule:
    """ahead: forwards before the first backward, besides those of the first group on all but the last stage."""
    groups = groups_of(microbatches, group)
    rows, peaks = [], []
    for rank in range(ranks):
        stages = range(rank, ranks * virtual_stages, ranks)
        forwards = [(stage, each) for some in groups for stage in stages for each in some]
        backwards = [(stage, each) for some in groups for stage in reversed(stages) for each in some]
        warm_up = (virtual_stages - 1) * len(groups[0]) + ahead(rank)
        behind = lag(rank) if lag else None
        rows.append(in_turns(forwards, backwards, warm_up=warm_up, lag=behind))
        peaks.append(min(len(forwards), warm_up + (behind or 0)))
    return Schedule(name, tuple(rows), in_loops(ranks, virtual_stages), peaks=tuple(peaks))


def interleaved(ranks: int, microbatches: int, virtual_stages: int, group: int | None = None) -> Schedule:
    """Interleaved 1F1B: the bubble of 1F1B over v, for v times the messages (arXiv:2104.04473, section 2.2).

    group: least micro-batches that pass a stage before the next stage; at least ranks, which is the default. Larger
    ones hold more, and give every message that much more time.
    """
    return _looped(
        "interleaved",
        ranks,
        microbatches,
        virtual_stages,
        group=ranks if group is None else group,
        ahead=lambda rank: 2 * (ranks - 1 - rank) + 1,
    )


def bfs(ranks: int, microbatches: int, virtual_stages: int) -> Schedule:
    """Looped breadth-first (arXiv:2211.05953): all micro-batches through a stage before the next stage.

    So weights that are gathered for each stage are gathered once a pass; all activations are held.
    """
    return _looped(
        "bfs", ranks, microbatches, virtual_stages, group=microbatches, ahead=lambda rank: microbatches * virtual_stages
    )


def interleaved_zb(ranks: int, microbatches: int, virtual_stages: int, group: int | None = None) -> Schedule:
    """`interleaved` whose W wait as those of zb_h1 do (arXiv:2401.10241): zb_h1 where virtual_stages is 1."""
    return _looped(
        "interleaved_zb",
        ranks,
        microbatches,
        virtual_stages,
        group=ranks if group is None else group,
        ahead=lambda rank: ranks - rank,
        lag=lambda rank: rank,
    )

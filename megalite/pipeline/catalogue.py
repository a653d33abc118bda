"""The schedules by name, and what each asks for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megalite.pipeline import looped, straight, v_shaped
from megalite.pipeline.schedule import Schedule, in_a_v, in_line, in_loops

MOST_PASSES = 2**18
"""Of micro-batches through stages in a step: each is several actions, which are written out and checked one by one, in
seconds. 64 ranks with 4 stages each have 1024 micro-batches so."""


@dataclass(frozen=True)
class Family:
    """What schedules have in common by where their stages lie.

    placement: ranks, stages a rank -> the rank of each stage. least, most: legal virtual stages (None, any number);
    least is what a schedule has where nobody says.
    """

    placement: Callable[[int, int], tuple[int, ...]]
    least: int
    most: int | None


STRAIGHT = Family(lambda ranks, virtual_stages: in_line(ranks), least=1, most=1)
LOOPED = Family(in_loops, least=2, most=None)
V_SHAPED = Family(lambda ranks, virtual_stages: in_a_v(ranks), least=2, most=2)


@dataclass(frozen=True)
class Entry:
    """One schedule. about: in a line, what it is for.

    build: (ranks, microbatches) -> Schedule; also takes virtual_stages of a looped one, and group where `grouped`.
    whole_from: ranks -> the smallest number of micro-batches from which the bubble and peaks of its file's table hold;
    each is right, and ends, with any number from 1. like: for looped ones, what they are at one stage a rank.
    """

    about: str
    build: Callable[..., Schedule]
    family: Family
    splits_backward: bool = False
    whole_from: Callable[[int], int] = lambda ranks: 1
    like: str = ""
    grouped: bool = False

    def placement(self, ranks: int, virtual_stages: int | None = None) -> tuple[int, ...]:
        """Stage -> the rank that holds it."""
        return self.family.placement(ranks, virtual_stages or self.family.least)


SCHEDULES: dict[str, Entry] = {
    "naive": Entry("one micro-batch at a time: 1/p of the work a time allows", straight.naive, STRAIGHT),
    "gpipe": Entry("all forwards, then all backwards", straight.gpipe, STRAIGHT),
    "1f1b": Entry("backwards as soon as they come: gpipe's bubble, p activations", straight.one_f_one_b, STRAIGHT),
    "eager_1f1b": Entry("1f1b further ahead: messages cost no time, 2p - 1 activations", straight.eager_1f1b, STRAIGHT),
    "interleaved": Entry(
        "1f1b on v stages a rank: the bubble over v, v times the messages",
        looped.interleaved,
        LOOPED,
        whole_from=lambda ranks: ranks,
        like="1f1b",
        grouped=True,
    ),
    "bfs": Entry(
        "gpipe on v stages a rank: each stage's weights are needed once a pass",
        looped.bfs,
        LOOPED,
        whole_from=lambda ranks: ranks,
        like="gpipe",
    ),
    "zb_h1": Entry(
        "1f1b with W put off: a third of its bubble, its activations",
        straight.zb_h1,
        STRAIGHT,
        splits_backward=True,
        whole_from=lambda ranks: ranks,
    ),
    "zb_h2": Entry(
        "no bubble at F=B=W, 2p - 1 activations",
        straight.zb_h2,
        STRAIGHT,
        splits_backward=True,
        whole_from=lambda ranks: 2 * ranks - 1,
    ),
    "interleaved_zb": Entry(
        "zb_h1 on v stages a rank: its bubble over v",
        looped.interleaved_zb,
        LOOPED,
        splits_backward=True,
        whole_from=lambda ranks: ranks,
        like="zb_h1",
        grouped=True,
    ),
    "zb_v": Entry(
        "no bubble at F=B=W, p activations",
        v_shaped.zb_v,
        V_SHAPED,
        splits_backward=True,
        whole_from=lambda ranks: 2 * ranks - 1,
    ),
    "v_half": Entry(
        "half of 1f1b's activations, about half its bubble",
        v_shaped.v_half,
        V_SHAPED,
        splits_backward=True,
        whole_from=lambda ranks: (ranks + 2) // 2,
    ),
    "v_min": Entry(
        "a third of 1f1b's activations, about two thirds of its bubble",
        v_shaped.v_min,
        V_SHAPED,
        splits_backward=True,
        whole_from=lambda ranks: (ranks + 4) // 3,
    ),
    "dualpipe_v": Entry(
        "a forward and a backward in pairs, one's messages under the other's work",
        v_shaped.dualpipe_v,
        V_SHAPED,
        splits_backward=True,
        whole_from=lambda ranks: 2 * ranks,
    ),
}


def make(
    name: str, *, ranks: int, microbatches: int, virtual_stages: int | None = None, group: int | None = None
) -> Schedule:
    """The schedule of that name.

    virtual_stages: stages a rank; None is what the schedule implies: 1, or 2 for looped and V ones. group: least
    micro-batches that go through a stage before a looped schedule turns to the rank's next; None is `ranks`.
    Raises ValueError for what does not fit, with the config key and the legal values.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"pipeline.schedule={name} is none of ours, and no file; take one of {', '.join(SCHEDULES)}, or a path"
        )
    entry = SCHEDULES[name]
    if ranks < 1:
        raise ValueError(f"layout.pp={ranks}: a pipeline has at least 1 rank")
    if microbatches < 1:
        raise ValueError(
            f"pipeline.schedule={name} has {microbatches} micro-batches a step; it runs from 1, and they are "
            "global_batch_size / (layout.dp x micro_batch_size)"
        )
    extra = _extra(name, entry, ranks=ranks, virtual_stages=virtual_stages, group=group)
    stages = ranks * (extra.get("virtual_stages") or entry.family.least)
    if stages * microbatches > MOST_PASSES:
        raise ValueError(
            f"pipeline.schedule={name} has {stages} stages x {microbatches} micro-batches a step, more passes than "
            f"{MOST_PASSES}; take a larger micro_batch_size or a smaller global_batch_size"
        )
    return entry.build(ranks, microbatches, **extra)


def _extra(
    name: str, entry: Entry, *, ranks: int, virtual_stages: int | None, group: int | None
) -> dict[str, int | None]:
    """What a looped schedule takes besides ranks and micro-batches."""
    least, most = entry.family.least, entry.family.most
    stages = least if virtual_stages is None else virtual_stages
    if stages < least or (most is not None and stages > most):
        legal = f"{least} or more" if most is None else f"{most}, or null"
        instead = f"; with one stage a rank it is {entry.like}" if entry.like and stages == 1 else ""
        raise ValueError(
            f"pipeline.virtual_stages={stages} does not fit pipeline.schedule={name}: take {legal}{instead}"
        )
    if group is not None and not entry.grouped:
        takes = ", ".join(other for other, each in SCHEDULES.items() if each.grouped)
        raise ValueError(f"pipeline.group={group} does not fit pipeline.schedule={name}, which has none: {takes} have")
    if group is not None and group < ranks:
        raise ValueError(
            f"pipeline.group={group} with layout.pp={ranks}: a shorter group than ranks starves the last; "
            f"take {ranks} or more, or null"
        )
    extra = {"virtual_stages": stages} if entry.family is LOOPED else {}
    return extra | ({"group": group} if entry.grouped else {})

"""The post carries every message to its place, holds little, and never waits for a receive that is yet to be posted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.pipeline import post as posts
from megalite.pipeline.catalogue import SCHEDULES, make
from megalite.pipeline.form import Forms
from megalite.pipeline.lower import ACTIVATION, Lowered, Message, check, lower_forward
from megalite.pipeline.post import Post, taken_by
from megalite.pipeline.schedule import in_a_v, in_line, in_loops
from tests.pipeline.rendezvous import Rendezvous, Sending, Stuck

CPU = torch.device("cpu")


class Watched(Post):
    """Counts what it holds, and settles only what has met its receive."""

    most = 0

    def send(self, message: Message, x: Tensor) -> None:
        super().send(message, x)
        self.most = max(self.most, len(self._sent))

    def settle(self, place: int) -> None:
        for message in self._due.get(place, ()):
            for pending in self._sent.get(message, ()):
                assert isinstance(pending, Sending) and pending.is_met(), f"{message} is settled too soon"
        super().settle(place)


def exchange(lowered: Lowered, lengths: Sequence[int], *, seed: int, passes: int = 2) -> list[list[int]]:
    """Every rank does the messages of its row, whose contents say which they are. The most that each held, by pass.

    lengths: of each micro-batch. In the first pass shapes are not known.
    """
    network = Rendezvous(lowered.schedule.ranks, seed=seed)
    forms: list[Forms] = [{} for _ in range(lowered.schedule.ranks)]

    def content(message: Message) -> Tensor:
        code = 1000 * message.stage + 2 * message.microbatch + (message.lane.kind == ACTIVATION)
        return torch.full((lengths[message.microbatch],), float(code))

    def work(rank: int) -> list[int]:
        most = []
        for _ in range(passes):
            how = {"lanes": {lane: lane for lane in lowered.lanes}, "forms": forms[rank], "device": CPU}
            post = Watched(lowered, rank, microbatches=list(lengths), **how)
            for place, step in enumerate(lowered.rows[rank]):
                if step.reads is not None:
                    assert torch.equal(post.take(step.reads), content(step.reads)), step
                post.settle(place)
                network.pause()
                if step.sends is not None:
                    post.send(step.sends, content(step.sends))
            post.close()
            assert not post._sent and not post._posted
            most.append(post.most)
        return most

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(posts, "start_send", network.start_send)
        patch.setattr(posts, "start_receive", network.start_receive)
        return network.run(work)


names = st.sampled_from(sorted(SCHEDULES))
some_lengths = st.lists(st.integers(0, 3), min_size=1, max_size=10)


@settings(max_examples=150)
@given(name=names, ranks=st.integers(1, 5), virtual=st.integers(2, 3), lengths=some_lengths, seed=st.integers(0, 999))
def test_every_message_comes_and_nothing_waits_in_a_circle_where_sends_wait_for_receives(
    name, ranks, virtual, lengths, seed
):
    """Of every schedule, with micro-batches of any lengths, whoever runs first; and what is settled has been taken."""
    looped = len(SCHEDULES[name].placement(2, None)) > 2 and not SCHEDULES[name].family.most
    how = {"virtual_stages": virtual if looped else None}
    exchange(check(make(name, ranks=ranks, microbatches=len(lengths), **how)), lengths, seed=seed)


@settings(max_examples=100)
@given(
    placement=st.sampled_from([in_line, in_a_v, lambda ranks: in_loops(ranks, 2), lambda ranks: in_loops(ranks, 3)]),
    ranks=st.integers(1, 5),
    lengths=some_lengths,
    seed=st.integers(0, 999),
)
def test_evaluation_ends_and_is_at_most_one_message_ahead_of_each_reader(placement, ranks, lengths, seed):
    rank_of = placement(ranks)
    for rank, most in enumerate(exchange(lower_forward(rank_of, len(lengths)), lengths, seed=seed)):
        assert max(most) <= sum(lane.source == rank for lane in lower_forward(rank_of, 1).lanes)


@pytest.mark.parametrize("lengths", [(2,), tuple(range(16))])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sends_are_dropped_in_passing_so_that_at_most_one_more_is_held_than_activations(name, lengths):
    """However many micro-batches there are, and where each brings a header too; the one may be a gradient."""
    for microbatches in (8, 16):
        schedule = make(name, ranks=4, microbatches=microbatches)
        found = exchange(check(schedule), [lengths[n % len(lengths)] for n in range(microbatches)], seed=0)
        for most, promised in zip(found, schedule.peaks, strict=True):
            assert max(most) <= promised + 1


def test_a_reply_tells_what_was_posted_before_it_was_sent():
    """1F1B on two ranks: activation k+1 has its receive when k is taken, so gradient k tells; the last but one tells of
    the last, and of gradients the next activation tells, if one comes."""
    lowered = check(make("1f1b", ranks=2, microbatches=3))
    told = {
        str(message): tuple(str(lowered.rows[0][at].action) if at < len(lowered.rows[0]) else "end" for at in places)
        for message, places in taken_by(lowered, 0).items()
    }
    assert told == {
        "micro-batch 0 for stage 1": ("BW0@0", "BW0@0"),
        "micro-batch 1 for stage 1": ("BW0@0", "BW1@0"),
        "micro-batch 2 for stage 1": ("BW1@0", "BW2@0"),
    }
    gradients = {message.microbatch: places for message, places in taken_by(lowered, 1).items()}
    rows = lowered.rows[1]
    assert [str(step.action) for step in rows] == ["F0@1", "BW0@1", "F1@1", "BW1@1", "F2@1", "BW2@1"]
    assert gradients == {0: (2, 4), 1: (4, 6), 2: (6, 6)}


def test_who_sends_before_it_posts_is_stuck_on_such_lanes():
    """What the test above would find."""
    network = Rendezvous(2, seed=0)

    def work(rank: int) -> None:
        network.start_send(torch.zeros(1), (rank, 1 - rank)).wait()
        network.start_receive(torch.zeros(1), (1 - rank, rank)).wait()

    with pytest.raises(Stuck):
        network.run(work)

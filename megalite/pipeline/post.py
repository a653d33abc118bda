"""`Post`: the messages of one rank in one pass over a schedule, as lanes carry them.

On each lane one receive is posted ahead, whose buffer is all that reading costs in memory. What is sent is held until
its reader takes it. The backend is not asked, which may not tell before it blocks: a message that the reader sent after
that says so (`taken_by`). Forward alone nothing comes back, so there each lane is one message ahead of its reader.

Shapes: a gradient has its activation's. The first activation that a boundary sees of micro-batches of some shapes is
preceded by a header with its `Form`; both ends remember it, so that later ones travel without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from megalite.comm import Pending, start_receive, start_send
from megalite.mesh import Axis
from megalite.pipeline.form import DTYPES, HEADER, MOST_DIMS, Form, Forms
from megalite.pipeline.lower import ACTIVATION, Lane, Lowered, Message, Step

T = TypeVar("T")


class Post:
    """Takes and sends this rank's messages, in the order of its row.

    lanes: those of this rank. forms: what is known of shapes, kept from step to step. microbatches: form of each.
    """

    def __init__(
        self,
        lowered: Lowered,
        rank: int,
        *,
        lanes: Mapping[Lane, Axis],
        forms: Forms,
        microbatches: Sequence[Any],
        device: torch.device,
    ) -> None:
        self._lanes, self._forms, self._microbatches, self._device = lanes, forms, microbatches, device
        self._coming = {lane: deque(messages) for lane, messages in lowered.incoming(rank).items()}
        self._posted: dict[Lane, Pending[Tensor]] = {}
        self._taken_by = taken_by(lowered, rank)
        self._sent: dict[Message, list[Pending[None]]] = {}
        self._due: dict[int, list[Message]] = defaultdict(list)  # place -> what has certainly been taken by then
        self._last: dict[Lane, Message] = {}
        self._forward_only = all(lane.kind == ACTIVATION for lane in lowered.lanes)
        for lane in self._coming:
            self._post(lane)

    def take(self, message: Message) -> Tensor:
        """The tensor of a message, once it is there; the next receive of its lane is posted."""
        lane, queue = message.lane, self._coming[message.lane]
        assert queue[0] == message, (message, queue[0])
        received, form = _meet(self._posted.pop(lane), message), self._form(message)
        if form is None:
            form = self._forms[self._key(message)] = Form.read(received)
            received = _meet(start_receive(form.empty(self._device), self._lanes[lane]), message)
        queue.popleft()
        self._post(lane)
        return form.unpacked(received)

    def send(self, message: Message, x: Tensor) -> None:
        """x is held until its reader takes it. Raises ValueError where its shape is not what it was before."""
        lane, pending = self._lanes[message.lane], []
        if message.lane.kind == ACTIVATION and self._is_new(message, Form.of(x)):
            pending.append(start_send(Form.of(x).header(self._device), lane))
            for back in self._coming:  # a gradient of this shape may be taken now
                self._post(back)
        if self._forward_only and message.lane in self._last:
            self._settle(self._last[message.lane])
        posted, taken = self._taken_by[message]
        self._due[taken if pending else posted].append(message)  # with a header, data is posted when that is read
        form = self._form(message)
        assert form is not None, "a gradient's is its activation's, which came before"
        pending.append(start_send(form.packed(x), lane))
        self._sent[message], self._last[message.lane] = pending, message

    def settle(self, place: int) -> None:
        """What this rank has read up to this place of its row tells which of its sends have been taken."""
        for message in self._due.pop(place, ()):
            self._settle(message)

    def close(self) -> None:
        """All sends have been taken."""
        for message in list(self._sent):
            self._settle(message)

    def _settle(self, message: Message) -> None:
        for pending in self._sent.pop(message, ()):
            _meet(pending, message)

    def _post(self, lane: Lane) -> None:
        """The next receive of a lane, unless it is posted already or a gradient's shape is not known yet."""
        if lane in self._posted or not self._coming[lane]:
            return
        form = self._form(self._coming[lane][0])
        if form is not None or lane.kind == ACTIVATION:
            self._posted[lane] = start_receive((form or HEADER).empty(self._device), self._lanes[lane])

    def _form(self, message: Message) -> Form | None:
        return self._forms.get(self._key(message))

    def _key(self, message: Message) -> tuple[int, Any]:
        """Of a boundary: a gradient's is the activation's that it belongs to."""
        reader = message.stage if message.lane.kind == ACTIVATION else message.stage + 1
        return reader, self._microbatches[message.microbatch]

    def _is_new(self, message: Message, form: Form) -> bool:
        """Whether an activation's form is news to its reader; it is remembered."""
        known, gave = self._form(message), f"stage {message.stage - 1} gave {form}"
        if form.dtype not in DTYPES or len(form.shape) > MOST_DIMS:
            legal = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
            raise ValueError(f"{gave}; between stages travel tensors of {legal}, with at most {MOST_DIMS} dims")
        if form != (known or form):
            raise ValueError(
                f"{gave} for micro-batch {message.microbatch}, and {known} before, for a micro-batch of the same "
                "shapes: what a stage gives must follow from the shapes in its micro-batch"
            )
        self._forms.setdefault(self._key(message), form)
        return known is None


def _meet(pending: Pending[T], message: Message) -> T:
    """Waits for the other end of a lane. Raises RuntimeError, by the message's name, if it does not come."""
    try:
        return pending.wait()
    except RuntimeError as error:
        kind, ends = message.lane.kind, f"rank {message.lane.source} to rank {message.lane.target} of pp"
        raise RuntimeError(f"the {kind} of {message} did not come from {ends}: {error}") from error


def taken_by(lowered: Lowered, rank: int) -> dict[Message, tuple[int, int]]:
    """Of each message that a rank sends, two places in its row: at which it has read what tells that the receive was
    posted, and that the message was taken; the row's length where nothing tells.

    A receive is posted when the one before it on its lane is taken; whatever the reader sends from then on says, when
    it comes, that it was. (A gradient's shape may come to be known later, but before there is that gradient.)
    """
    mine = lowered.rows[rank]
    read_at = {step.reads: place for place, step in enumerate(mine)}
    sent_at = {step.sends: place for place, step in enumerate(mine)}
    found: dict[Message, tuple[int, int]] = {}
    for lane, messages in lowered.outgoing(rank).items():
        theirs = lowered.rows[lane.target]
        taken_at = {step.reads: place for place, step in enumerate(theirs)}
        replies = _Replies(theirs, read_at, otherwise=len(mine))
        posted = -1
        for message in messages:
            taken, after = taken_at[message], sent_at[message] + 1
            found[message] = max(replies.tell(posted), after), max(replies.tell(taken), after)
            posted = taken
    return found


class _Replies:
    """What the reader of a lane sends to its sender, on whichever lanes. read_at: where the sender reads each."""

    def __init__(self, theirs: Sequence[Step], read_at: Mapping[Message | None, int], *, otherwise: int) -> None:
        places = [(place, step.sends) for place, step in enumerate(theirs) if step.sends is not None]
        sent = [(place, read_at[message]) for place, message in places if message in read_at]
        self._places = [place for place, _ in sent]
        self._first = [otherwise]  # of the replies from one on, where the first is read
        for _, at in reversed(sent):
            self._first.append(min(self._first[-1], at))
        self._first.reverse()

    def tell(self, place: int) -> int:
        """Where the sender has first read something that was sent at this place of the reader's row or later."""
        return self._first[bisect_left(self._places, place)]

"""`Post`: the messages of one rank in one pass over a schedule, as lanes carry them.

On each lane one receive is posted ahead, whose buffer is all that reading costs in memory. What is sent is held until
it is known that its reader takes it, without asking the backend, which may not tell before it blocks: a message from
that reader says so, if it was sent after the receive in question was posted (`taken_by`).

Shapes: a gradient has its activation's. The first activation that a boundary sees of micro-batches of some shapes is
preceded by a header of int64 with its dtype and dims; both ends remember it, so that later ones travel without.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.comm import Pending, start_receive, start_send
from megalite.mesh import Axis
from megalite.pipeline.lower import ACTIVATION, Lane, Lowered, Message
from megalite.pipeline.schedule import Action

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.complex128)
MOST_DIMS = 8


class Form(NamedTuple):
    """Of a tensor that crosses between two stages."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> Form:
        return cls(x.dtype, tuple(x.shape))

    def empty(self, device: torch.device) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def header(self, device: torch.device) -> Tensor:
        dims = [*self.shape, *[0] * (MOST_DIMS - len(self.shape))]
        return torch.tensor([DTYPES.index(self.dtype), len(self.shape), *dims], device=device)

    @classmethod
    def read(cls, header: Tensor) -> Form:
        code, count, *dims = header.tolist()
        return cls(DTYPES[code], tuple(dims[:count]))


HEADER = Form(torch.int64, (2 + MOST_DIMS,))

Forms = dict[tuple[int, Any], Form]
"""(the stage that reads, form of the micro-batch) -> of the activation, for all boundaries that a rank is an end of."""


def form_of(microbatch: Any) -> Any:
    """What of a micro-batch shapes depend on: dtypes and shapes of the tensors in it."""
    return tuple(map(Form.of, _tensors(microbatch)))


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(list(values.values()))
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif hasattr(values, "__dict__"):
        yield from _tensors(vars(values))


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
        microbatches: list[Any],
        device: torch.device,
    ) -> None:
        self._lanes, self._forms, self._microbatches, self._device = lanes, forms, microbatches, device
        self._coming = {lane: deque(messages) for lane, messages in lowered.incoming(rank).items()}
        self._posted: dict[Lane, Pending[Tensor]] = {}
        self._sent: dict[Message, list[Pending[None]]] = {}
        self._last: dict[Lane, Message] = {}
        self._taken_by = taken_by(lowered, rank)
        self._forward_only = not any(lane.kind != ACTIVATION for lane in lowered.lanes)
        for lane in self._coming:
            self._post(lane)

    def take(self, message: Message) -> Tensor:
        """The tensor of a message, once it is there; the next receive of its lane is posted."""
        lane, queue = message.lane, self._coming[message.lane]
        assert queue[0] == message, (message, queue[0])
        self._post(lane)
        received = self._posted.pop(lane).wait()
        if lane.kind == ACTIVATION and (form := self._form(message)) is None:
            form = self._forms[self._key(message)] = Form.read(received)
            received = start_receive(form.empty(self._device), self._lanes[lane]).wait()
        queue.popleft()
        self._post(lane)
        return received

    def send(self, message: Message, x: Tensor) -> None:
        """x is held until its reader takes it. Raises ValueError where its shape is not what it was before."""
        lane = self._lanes[message.lane]
        pending: list[Pending[None]] = []
        if message.lane.kind == ACTIVATION:
            mine, known = Form.of(x), self._form(message)
            if known is None:
                _require_sendable(mine, message)
                self._forms[self._key(message)] = mine
                pending.append(start_send(mine.header(self._device), lane))
                for back in self._coming:  # a gradient of this shape may be taken now
                    self._post(back)
            elif mine != known:
                raise ValueError(
                    f"stage {message.stage - 1} gave {mine.dtype} of shape {mine.shape} for micro-batch "
                    f"{message.microbatch}, and {known.dtype} of shape {known.shape} before, for tensors of the same "
                    "shapes: what a stage gives must follow from the shapes in its micro-batch"
                )
        if self._forward_only and (before := self._last.get(message.lane)) is not None:
            self._settle(before)  # nothing comes back that would tell: the reader may be one message behind
        pending.append(start_send(x.contiguous(), lane))
        self._sent[message], self._last[message.lane] = pending, message

    def settle(self, place: int) -> None:
        """What this rank has taken up to this place of its row tells which of its sends have been taken."""
        for message in self._taken_by.get(place, ()):
            if len(self._sent.get(message, ())) == 1:  # with a header, its data is posted late, when the header is read
                self._settle(message)

    def close(self) -> None:
        """All sends have been taken."""
        for message in list(self._sent):
            self._settle(message)

    def _settle(self, message: Message) -> None:
        for pending in self._sent.pop(message, ()):
            pending.wait()

    def _post(self, lane: Lane) -> None:
        """The next receive of a lane, unless it is posted already or a gradient's shape is not known yet."""
        if lane in self._posted or not self._coming[lane]:
            return
        message = self._coming[lane][0]
        form = self._form(message)
        if form is None and lane.kind != ACTIVATION:
            return
        into = (form or HEADER).empty(self._device)
        self._posted[lane] = start_receive(into, self._lanes[lane])

    def _form(self, message: Message) -> Form | None:
        return self._forms.get(self._key(message))

    def _key(self, message: Message) -> tuple[int, Any]:
        """Of a boundary: a gradient's is the activation's that it belongs to."""
        reader = message.stage if message.lane.kind == ACTIVATION else message.stage + 1
        return reader, self._microbatches[message.microbatch]


def _require_sendable(form: Form, message: Message) -> None:
    if form.dtype not in DTYPES or len(form.shape) > MOST_DIMS:
        raise ValueError(
            f"stage {message.stage - 1} gave {form.dtype} of {len(form.shape)} dims; between stages travel tensors of "
            f"{', '.join(map(str, DTYPES))} with at most {MOST_DIMS} dims"
        )


def taken_by(lowered: Lowered, rank: int) -> dict[int, list[Message]]:
    """Place in this rank's row -> its sends that have certainly been taken when it has read what it reads there.

    A receive is posted when the one before it on its lane is taken, a gradient's not before its own stage's forward.
    Whatever the reader sends from then on says, when it comes, that it was posted.
    """
    mine = lowered.rows[rank]
    read_at = {step.reads: place for place, step in enumerate(mine) if step.reads is not None}
    sent_at = {step.sends: place for place, step in enumerate(mine) if step.sends is not None}
    found: dict[int, list[Message]] = defaultdict(list)
    for lane, messages in lowered.outgoing(rank).items():
        theirs = lowered.rows[lane.target]
        replies = [(place, read_at[step.sends]) for place, step in enumerate(theirs) if step.sends in read_at]
        earliest = [at for _, at in replies]  # of those from a reply on, the first that this rank reads
        for number in range(len(earliest) - 2, -1, -1):
            earliest[number] = min(earliest[number], earliest[number + 1])
        places = {step.action: place for place, step in enumerate(theirs)}
        taken_at = {step.reads: place for place, step in enumerate(theirs) if step.reads is not None}
        posted = -1
        for message in messages:
            if lane.kind != ACTIVATION:
                posted = max(posted, places[Action("F", message.stage, message.microbatch)])
            reply = bisect_left(replies, (posted, -1))
            if reply < len(replies):
                found[max(earliest[reply], sent_at[message] + 1)].append(message)
            posted = taken_at[message]
    return dict(found)

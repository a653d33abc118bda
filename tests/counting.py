"""Counts collectives and the bytes they send, whoever issues them: our own functions, torch's, or an autograd backward.

Clocks on a shared machine say little, and bytes are exact: `with count() as c: step()`, then `c.calls("all_reduce")`
and `c.bytes_sent("all_reduce", group="tp")`. What is counted is the ideal of the operation that was asked for, by a
ring or a chain, not what the library makes of it (Gloo's own reduce-scatter sends twice the ideal).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.comm import Call as Issued
from megalite.comm import Observer, observe


class Call(NamedTuple):
    """One collective, as this rank issued it.

    op: torch's name (`allreduce_`); kind: the field's (`all_reduce`); numel and bytes: of the full tensor, i.e. what
    reduce-scatter takes and all-gather gives; sent: ideal bytes that this rank sends; ranks, group: the group's size
    and description (an axis's name).
    """

    op: str
    kind: str
    numel: int
    bytes: int
    sent: float
    dtype: torch.dtype | None
    ranks: int
    group: str


# torch's operator -> (kind, argument that holds the full tensor on this rank)
_OPS: Mapping[str, tuple[str, int]] = {
    "c10d.allreduce_": ("all_reduce", 0),
    "c10d.allreduce_coalesced_": ("all_reduce", 0),
    "c10d.allgather_": ("all_gather", 0),
    "c10d._allgather_base_": ("all_gather", 0),
    "c10d.allgather_coalesced_": ("all_gather", 0),
    "c10d.allgather_into_tensor_coalesced_": ("all_gather", 0),
    "c10d.reduce_scatter_": ("reduce_scatter", 1),
    "c10d._reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d.reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "c10d.alltoall_base_": ("all_to_all", 1),
    "c10d.alltoall_": ("all_to_all", 1),
    "c10d.broadcast_": ("broadcast", 0),
    "c10d.reduce_": ("reduce", 0),
    "c10d.gather_": ("gather", 1),
    "c10d.scatter_": ("scatter", 1),
    "c10d.send": ("send", 0),
    "c10d.recv_": ("recv", 0),
    "c10d.recv_any_source_": ("recv", 0),
    "c10d.barrier": ("barrier", 0),
    "c10d.monitored_barrier_": ("barrier", 0),
    "_c10d_functional.all_reduce": ("all_reduce", 0),
    "_c10d_functional.all_reduce_": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced": ("all_reduce", 0),
    "_c10d_functional.all_reduce_coalesced_": ("all_reduce", 0),
    "_c10d_functional.all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_out": ("all_gather", 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional.reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_out": ("reduce_scatter", 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "_c10d_functional.all_to_all_single": ("all_to_all", 0),
    "_c10d_functional.broadcast": ("broadcast", 0),
    "_c10d_functional.broadcast_": ("broadcast", 0),
    "_c10d_functional.isend": ("send", 0),
    "_c10d_functional.irecv": ("recv", 0),
}
_SILENT = {"c10d.check_for_nan", "_c10d_functional.wait_tensor", "_c10d_functional._wrap_tensor_autograd"}


class count(TorchDispatchMode, Observer):
    """Records every collective of `c10d` and `_c10d_functional` issued inside the `with`, in order, in `record`.

    What `megalite.comm` makes of messages between ranks is recorded as the one collective that it is: its bytes are
    those of the messages.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record: list[Call] = []
        self._messages: list[Call] | None = None  # of the collective that is being issued

    def __enter__(self) -> count:
        self._observing = observe(self)
        self._observing.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._observing.__exit__(*raised)

    def issuing(self, call: Issued) -> None:
        self._messages = [] if call.operation in ("all_gather", "reduce_scatter") else None

    def issued(self, call: Issued) -> None:
        messages, self._messages = self._messages, None
        if not messages:
            return
        sent, n = [message for message in messages if message.kind == "send"], call.axis.size
        numel, size = (sum(each) * n // (n - 1) for each in ([m.numel for m in sent], [m.bytes for m in sent]))
        kind, total = call.operation, sum(message.sent for message in sent)
        self.record.append(Call("send", kind, numel, size, total, sent[0].dtype, n, sent[0].group))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = f"{func.namespace}.{func._opname}"
        if func.namespace in ("c10d", "_c10d_functional") and name not in _SILENT:
            call = _call(name, args)
            is_message = self._messages is not None and call.kind in ("send", "recv")
            (self._messages if is_message else self.record).append(call)  # type: ignore[union-attr]
        return func(*args, **(kwargs or {}))

    def calls(self, name: str | None = None, *, group: str | None = None) -> int:
        """How many collectives of this op or kind, or of all, on groups of this description, or on all."""
        return len(self._chosen(name, group))

    def bytes_sent(self, name: str | None = None, *, group: str | None = None) -> float:
        """Ideal bytes that this rank sends in them: all-reduce 2 (n-1)/n of the full tensor, all-gather and
        reduce-scatter (n-1)/n, all-to-all what leaves the rank, send all of it."""
        return sum(call.sent for call in self._chosen(name, group))

    def _chosen(self, name: str | None, group: str | None) -> list[Call]:
        return [c for c in self.record if name in (None, c.op, c.kind) and group in (None, c.group)]


def _call(name: str, args: tuple[Any, ...]) -> Call:
    if name not in _OPS:
        raise AssertionError(f"tests/counting.py does not know the collective {name}: add it to its table")
    kind, full = _OPS[name]
    group = _group(args)
    tensors = list(_tensors(args[full])) if kind != "barrier" else []
    numel, size = sum(t.numel() for t in tensors), sum(t.numel() * t.element_size() for t in tensors)
    if name.startswith("_c10d_functional.all_gather"):  # the functional form shows its input, one share
        numel, size = numel * group.size(), size * group.size()
    if kind == "all_to_all":
        sent = _off_rank_bytes(name, args, tensors, group)
    else:
        sent = _SENT[kind](size, group.size(), _steps_from_root(name, args, group))
    dtype = tensors[0].dtype if tensors else None
    return Call(name.split(".")[1], kind, numel, size, sent, dtype, group.size(), group.group_desc)


# kind -> bytes that one rank sends of a full tensor of b bytes over n ranks; d: steps from the root along the chain
_SENT: Mapping[str, Callable[[int, int, int], float]] = {
    "all_reduce": lambda b, n, d: 2 * (n - 1) * b / n,
    "all_gather": lambda b, n, d: (n - 1) * b / n,
    "reduce_scatter": lambda b, n, d: (n - 1) * b / n,
    "broadcast": lambda b, n, d: b if d < n - 1 else 0,
    "reduce": lambda b, n, d: b if d > 0 else 0,
    "gather": lambda b, n, d: b if d > 0 else 0,
    "scatter": lambda b, n, d: (n - 1) * b / n if d == 0 else 0,
    "send": lambda b, n, d: b,
    "recv": lambda b, n, d: 0,
    "barrier": lambda b, n, d: 0,
}
# where the root's rank in the group stands among the arguments
_ROOT = {
    "c10d.broadcast_": 2,
    "c10d.reduce_": 3,
    "c10d.gather_": 3,
    "c10d.scatter_": 3,
    "_c10d_functional.broadcast": 1,
    "_c10d_functional.broadcast_": 1,
}


def _steps_from_root(name: str, args: tuple[Any, ...], group: dist.ProcessGroup) -> int:
    return (group.rank() - args[_ROOT[name]]) % group.size() if name in _ROOT else 0


def _off_rank_bytes(name: str, args: tuple[Any, ...], tensors: list[Tensor], group: dist.ProcessGroup) -> float:
    """What of the input goes to other ranks, by the split sizes if they are given."""
    n, me = group.size(), group.rank()
    if name == "c10d.alltoall_":
        return sum(t.numel() * t.element_size() for i, t in enumerate(tensors) if i != me)
    x = tensors[0]
    splits = args[4] if name == "c10d.alltoall_base_" else args[2]
    rows = list(splits) or [x.shape[0] // n] * n
    row_bytes = x.numel() // max(x.shape[0], 1) * x.element_size()
    return float((sum(rows) - rows[me]) * row_bytes)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    else:
        for item in value:
            yield from _tensors(item)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group among the arguments: an object for c10d, a name (the last argument) for its functional form."""
    for arg in args:
        if isinstance(arg, dist.ProcessGroup):
            return arg
        if isinstance(arg, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(arg)
            except (RuntimeError, TypeError):
                continue  # a ReduceOp
    names = [arg for arg in args if isinstance(arg, str)]
    return _resolve_process_group(names[-1])

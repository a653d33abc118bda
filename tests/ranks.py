"""Runs a function on n ranks and gives back what each of them returned.

The ranks are forks of the test's own process (a spawned one would import torch again, for seconds), with one thread
each, and find each other through a file, so two test runs at once never meet on a port. A rank that raises, dies or
hangs ends the test with what that rank has to say, and no process stays behind.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

# torch imports it at the first optimizer, checkpoint or dispatch mode: here once, instead of seconds in every rank.
import torch._dynamo
import torch.distributed as dist

# After a first failure, how long the others may go on, so that what failed at the same time is told too.
_GRACE_SECONDS = 0.5


class RanksFailed(RuntimeError):
    """A rank raised, died or hung; the message has that rank's traceback or stack, the earliest failure first."""


class _Outcome(NamedTuple):
    """How one rank ended: "returned" a value, "raised" a traceback, or "died" with an exit code, and when."""

    kind: str
    value: Any
    seconds: float


def run(
    fn: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    backend: str = "gloo",
    start: str | None = None,
    checked: bool = True,
) -> list[Any]:
    """Calls `fn(*args)` on n ranks of an initialised default group; the results, pickled on the way, in rank order.

    Raises RanksFailed if a rank raises, dies, or has not returned after `timeout` seconds. Every rank starts from seed
    0, so what is drawn first is equal on all of them. `checked` compares shapes and operation over the ranks before
    each collective and so names a mismatch, but makes each issue wait for the peers: switch it off where a test is
    about not waiting. `start` is "fork" for Gloo and "spawn", which needs an importable fn, for other backends, since
    CUDA does not survive a fork.
    """
    __tracebackhide__ = True
    if torch.get_num_threads() != 1:
        raise ValueError(
            f"torch runs {torch.get_num_threads()} threads here; a fork is safe only with 1 (see conftest.py)"
        )
    context: Any = multiprocessing.get_context(start or ("fork" if backend == "gloo" else "spawn"))
    deadline = time.monotonic() + timeout
    connections: list[Connection] = []
    processes: list[BaseProcess] = []
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(n):
                ours, theirs = context.Pipe()
                call = (fn, args, rank, n, backend, folder, timeout, checked, theirs)
                process = context.Process(target=_rank, args=call, name=f"rank {rank}", daemon=True)
                with warnings.catch_warnings():
                    # Python 3.12 warns of a fork where there are threads; of ours none matters to the child
                    warnings.simplefilter("ignore", DeprecationWarning)
                    process.start()
                theirs.close()  # a copy kept here, or in a later fork, would hide that the rank has died
                connections.append(ours)
                processes.append(process)
            outcomes = _collect(connections, processes, deadline)
            if any(outcome.kind != "returned" for outcome in outcomes.values()) or len(outcomes) < n:
                raise RanksFailed(_report(outcomes, processes, timeout, Path(folder)))
            return [outcomes[rank].value for rank in range(n)]
        finally:
            for process in processes:
                process.kill()
            for process, connection in zip(processes, connections, strict=True):
                process.join()
                connection.close()


def _rank(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    n: int,
    backend: str,
    folder: str,
    timeout: float,
    checked: bool,
    connection: Connection,
) -> None:
    """One rank's life: join the group, call fn, tell the outcome, and stay until it is ended.

    It stays, and leaves its sockets open, so that no peer fails only because this rank has finished or failed first.
    """
    with open(Path(folder, f"stack.{rank}"), "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if checked:
            dist.set_debug_level(dist.DebugLevel.DETAIL)
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank % torch.cuda.device_count())
            store = dist.FileStore(str(Path(folder, "rendezvous")), n)
            group_timeout = timedelta(seconds=2 * timeout)  # the later of the two, so that a hang is told by its stack
            dist.init_process_group(backend, store=store, rank=rank, world_size=n, timeout=group_timeout)
            payload = pickle.dumps(_Outcome("returned", fn(*args), time.monotonic()))
        except BaseException:
            payload = pickle.dumps(_Outcome("raised", traceback.format_exc(), time.monotonic()))
        sys.stdout.flush()
        sys.stderr.flush()
        # Not connection.send: torch has taught it to pass tensors by shared memory, which dies with this rank.
        connection.send_bytes(payload)
        connection.poll(None)


def _collect(connections: list[Connection], processes: list[BaseProcess], deadline: float) -> dict[int, _Outcome]:
    """Waits for the ranks until all have ended or the deadline has passed, or shortly after a first failure."""
    outcomes: dict[int, _Outcome] = {}
    open_ends = {connection: rank for rank, connection in enumerate(connections)}
    while open_ends and (ready := wait(list(open_ends), timeout=max(0.0, deadline - time.monotonic()))):
        for end in ready:
            assert isinstance(end, Connection)
            rank = open_ends.pop(end)
            try:
                outcomes[rank] = pickle.loads(end.recv_bytes())
            except (EOFError, OSError):
                processes[rank].join()
                outcomes[rank] = _Outcome("died", processes[rank].exitcode, time.monotonic())
            if outcomes[rank].kind != "returned":
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return outcomes


def _report(outcomes: dict[int, _Outcome], processes: list[BaseProcess], timeout: float, folder: Path) -> str:
    """Who failed and how, the dead first (an error elsewhere may be their doing), then by time; hung ranks' stacks."""
    n = len(processes)
    running = [rank for rank in range(n) if rank not in outcomes]
    failed = [rank for rank in outcomes if outcomes[rank].kind != "returned"]
    failed.sort(key=lambda rank: (outcomes[rank].kind != "died", outcomes[rank].seconds))
    lines = []
    for rank in failed:
        kind, value, _ = outcomes[rank]
        error = str(value).rstrip().rsplit("\n", 1)[-1]
        if kind == "raised" and any(error in line for line in lines):
            lines.append(f"rank {rank} of {n} ended alike: {error}")
        elif kind == "raised":
            lines.append(f"rank {rank} of {n} raised:\n{value}")
        else:
            cause = signal.Signals(-value).name if value < 0 else f"exit code {value}"
            lines.append(f"rank {rank} of {n} died of {cause}")
    if failed and running:
        lines.append(f"ranks {running} were still running and were ended")
    if not failed:
        lines.append(
            f"ranks {running} of {n} had not returned after {timeout:g} s; they stood here, newest call first:"
        )
        lines += [f"rank {rank}:\n{stack}" for rank, stack in _stacks(processes, running, folder).items()]
    return "\n".join(lines)


def _stacks(processes: list[BaseProcess], ranks: list[int], folder: Path) -> dict[int, str]:
    """Asks each of `ranks` for the stacks of its threads; faulthandler answers even from inside a blocked C call."""
    for rank in ranks:
        pid = processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGUSR1)
    files = [folder / f"stack.{rank}" for rank in ranks]
    sizes: list[int] = []
    for _ in range(20):  # until no file is empty and none still grows
        time.sleep(0.05)
        before, sizes = sizes, [file.stat().st_size if file.exists() else 0 for file in files]
        if sizes == before and all(sizes):
            break
    return {rank: file.read_text() if file.exists() else "" for rank, file in zip(ranks, files, strict=True)}

"""Processes that encode parts, one part at a time each.

They are started anew rather than forked: nothing of the parent's threads or of a library's state comes along. A worker
whose parent is gone finds its pipe closed and ends, so none outlives a parent that was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from megalite.data.encode import Counts, Job, encode_part
from megalite.data.errors import DataError
from megalite.data.inputs import Part

PATIENCE_SECONDS = 5.0


class WorkerError(RuntimeError):
    """A worker ended as none should: killed, or by an exception that is not of the data; its traceback is in it."""


@dataclass(frozen=True)
class Update:
    """What a worker has of its part so far. read_bytes: of the part's files. done: that is all of it."""

    number: int
    counts: Counts
    read_bytes: int
    done: bool


def encode_parts(parts: Mapping[int, tuple[Part, str]], job: Job, *, workers: int) -> Generator[Update, None, None]:
    """Encode numbered parts, each to its prefix, in that order over so many processes; tells how far each is.

    Raises the DataError that a worker raised, and WorkerError where one is lost. On every way out, also by an
    interrupt or where the iterator is closed, the processes are gone.
    """
    waiting = iter(parts.items())
    with _started(job, min(workers, len(parts))) as processes:
        busy: dict[Connection, int] = {}
        for connection in processes:
            _next(connection, waiting, busy)
        while busy:
            for ready in wait(list(busy)):
                connection = cast(Connection, ready)
                update = _receive(connection, processes[connection])
                yield update
                if update.done:
                    del busy[connection]
                    _next(connection, waiting, busy)


def _next(connection: Connection, waiting: Iterator[tuple[int, tuple[Part, str]]], busy: dict[Connection, int]) -> None:
    task = next(waiting, None)
    if task is not None:
        busy[connection] = task[0]
        with suppress(BrokenPipeError):  # what it said before it went, or that it went, is read next
            connection.send(task)


def _receive(connection: Connection, process: SpawnProcess) -> Update:
    try:
        message = connection.recv()
    except (EOFError, ConnectionResetError):
        process.join(PATIENCE_SECONDS)
        code = process.exitcode or 0
        how = f"was killed by signal {-code} (for want of memory? then take fewer --workers)" if code < 0 else "is gone"
        raise WorkerError(f"a worker {how}; the same command goes on where it stood") from None
    if isinstance(message, Exception):
        raise message
    return message


@contextmanager
def _started(job: Job, count: int) -> Iterator[dict[Connection, SpawnProcess]]:
    """So many workers by their pipes. An interrupt is the parent's to answer: they are born deaf to it."""
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, SpawnProcess] = {}
    try:
        in_main_thread = threading.current_thread() is threading.main_thread()  # no other may set a signal
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
        try:
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, job), daemon=True)
                process.start()
                theirs.close()
                processes[ours] = process
        finally:
            if heard is not None:
                signal.signal(signal.SIGINT, heard)
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for connection, process in processes.items():
            process.join(PATIENCE_SECONDS)
            if process.exitcode is None:
                process.kill()
                process.join()
            connection.close()


def _work(connection: Connection, job: Job) -> None:
    """A worker's life: parts until its pipe closes or something goes wrong, which it says first."""
    # Set for a library in a process of our own, before it is imported: its threads would share the cores with the
    # other workers.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        tokenizer = job.open()
        while True:
            number, (part, prefix) = connection.recv()

            def progress(counts: Counts, read_bytes: int, number: int = number) -> None:
                connection.send(Update(number, counts, read_bytes, done=False))

            counts = encode_part(part, job, tokenizer, prefix=prefix, progress=progress)
            size = sum(piece.size_bytes for piece in part)
            connection.send(Update(number, counts, size, done=True))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass  # the parent is gone
    except Exception as error:
        with suppress(BrokenPipeError):
            connection.send(_plain(error))


def _plain(error: Exception) -> Exception:
    """An error that is sure to come through the pipe, and says the same."""
    if isinstance(error, DataError):
        return DataError(str(error))
    if isinstance(error, OSError):  # Reader answers for those of the input
        return DataError(f"the output cannot be written ({error}); is there room, and may you write?")
    # The job was opened by the parent before, so nothing else is the user's.
    return WorkerError("".join(traceback.format_exception(error)))

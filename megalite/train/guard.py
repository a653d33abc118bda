"""The way out of a process that may be blocked: signals, deadlines, and an exit that nothing can hold up.

A signal's Python handler runs on the main thread, and not before a blocked call into C returns; a collective may never
return. So a thread of its own hears of signals through a pipe, keeps the deadlines and ends the process past them.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

T = TypeVar("T")

UNWIND_SECONDS = 5.0
"""How long a process that is asked to end may take to close its files and groups."""
SAME_SIGNAL_SECONDS = 1.0
"""A terminal signals every process and a launcher passes the signal on: what comes so soon is not a second one."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """A signal asked this process to end. Raised on the main thread, wherever it stands."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class Ended(BaseException):
    """This job is over with exit code `code`, and all has been said."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def within(seconds: float, fn: Callable[[], T]) -> T | None:
    """What fn returns, or None if it raises or has not returned in time: for calls that others may block."""
    result: list[T | None] = [None]

    def call() -> None:
        with contextlib.suppress(Exception):
            result[0] = fn()

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]


class Guard:
    """While it is open the first SIGINT or SIGTERM raises `Stopped`, once; a second one ends the process at once.

    unwinding: an end has begun, so no signal raises any more; if it is left so, both are ignored afterwards, since the
    process is to exit. on_tick: called a few times a second, on the guard's thread. on_exit: called, with little time,
    before the process ends without unwinding.
    """

    def __init__(self, *, tick_seconds: float = 0.2) -> None:
        self.unwinding = False
        self.stopped_by: int | None = None
        self.on_tick: list[Callable[[], None]] = []
        self.on_exit: list[Callable[[], None]] = []
        self._tick_seconds = tick_seconds
        self._first_signal = 0.0
        self._deadlines: dict[str, tuple[float, int]] = {}
        self._leaving = threading.Lock()

    def __enter__(self) -> Guard:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._run, name="guard", daemon=True)
        self._thread.start()
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {signum: signal.signal(signum, self._raise) for signum in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._old.items():
            # A signal that comes while the interpreter shuts down would put its own code in the place of the cause's.
            signal.signal(signum, signal.SIG_IGN if self.unwinding else handler)
        signal.set_wakeup_fd(self._old_fd)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def end_within(self, seconds: float, code: int) -> None:
        """This process ends with `code`, and by force if it has not ended by itself in time. Of several the soonest."""
        old = self._deadlines.get("end", (math.inf, code))[0]
        self._deadlines["end"] = (min(time.monotonic() + seconds, old), code)

    @contextmanager
    def limit(self, seconds: float, code: int) -> Iterator[None]:
        """What runs in the block may hang: past so many seconds the process ends with `code`."""
        self._deadlines["limit"] = (time.monotonic() + seconds, code)
        try:
            yield
        finally:
            del self._deadlines["limit"]

    def interrupt(self) -> None:
        """Raise `Stopped` on the main thread, unless its end has begun; a blocked call into C is not woken."""
        if not self.unwinding:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def end(self, code: int) -> None:
        """Ends the process now, whatever its main thread is doing. Does not return."""
        self._leaving.acquire()  # never released: of two threads that end the process one has its say
        for call in self.on_exit:
            within(2.0, call)
        within(1.0, _flush)
        os._exit(code)

    def _raise(self, signum: int, frame: Any) -> None:
        if not self.unwinding:
            self.unwinding = True
            raise Stopped(signum)

    def _run(self) -> None:
        while True:
            if select.select([self._read], [], [], self._tick_seconds)[0]:
                for signum in os.read(self._read, 64):
                    if signum == 0:
                        return
                    self._hear(signum)
            for deadline, code in list(self._deadlines.values()):
                if time.monotonic() > deadline:
                    self.end(code)
            for call in list(self.on_tick):
                call()

    def _hear(self, signum: int) -> None:
        if signum not in SIGNALS:
            return
        code = self._deadlines.get("end", (0.0, 128 + signum))[1]
        if self.stopped_by is None:
            self.stopped_by, self._first_signal = signum, time.monotonic()
            self.end_within(UNWIND_SECONDS, code)
        elif time.monotonic() - self._first_signal > SAME_SIGNAL_SECONDS:
            self.end(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            if stream.isatty():
                stream.write("\x1b[?25h")  # a live display hides the cursor and has had no time to show it again
            stream.flush()

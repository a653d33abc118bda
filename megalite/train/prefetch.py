"""Batches made ahead of the step that needs them, in a background thread.

One thread makes batch after batch, at most `ahead` of them at a time, and the training loop takes them in order. The
thread holds nothing that must be put away (a batch is a pure function of its step), so it may be left at any moment: it
is a daemon, told to stop by `close`, and no wait of either side outlives the other.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

PATIENCE_SECONDS = 1.0


class Prefetch(Generic[T]):
    """make(step) for rising steps, ahead of time.

    ahead: how many batches wait at most; 0 makes each when it is taken, in the caller's thread. last: the step after
    which nothing is made ahead. Taking another step than the next one starts over there. What make raises, take
    raises. waited_seconds: how long the last take took.
    """

    def __init__(self, make: Callable[[int], T], *, ahead: int, last: int) -> None:
        self._make, self._ahead, self._last = make, ahead, last
        self._worker: _Worker[T] | None = None
        self._next = 0
        self.waited_seconds = 0.0

    def take(self, step: int) -> T:
        """make(step)."""
        started = time.perf_counter()
        try:
            return self._take(step)
        finally:
            self.waited_seconds = time.perf_counter() - started

    def _take(self, step: int) -> T:
        if not self._ahead or step > self._last:
            return self._make(step)
        if self._worker is None or step != self._next:
            self.close()
            self._worker = _Worker(self._make, range(step, self._last + 1), most=self._ahead)
        try:
            batch = self._worker.take()
        except BaseException:
            self.close()
            raise
        self._next = step + 1
        return batch

    def close(self) -> None:
        """Let the thread end; what it has made is dropped. Taking again starts another."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.stop()


class _Worker(Generic[T]):
    def __init__(self, make: Callable[[int], T], steps: range, *, most: int) -> None:
        self._make, self._steps, self._most = make, steps, most
        self._changed = threading.Condition()
        self._made: deque[T] = deque()
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def take(self) -> T:
        with self._changed:
            self._changed.wait_for(lambda: self._made or self._error)
            if not self._made:
                assert self._error is not None
                raise self._error
            batch = self._made.popleft()
            self._changed.notify_all()
        return batch

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._made.clear()
            self._changed.notify_all()
        # A file system that hangs must not keep the run from ending; the thread is a daemon.
        self._thread.join(PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            for step in self._steps:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or len(self._made) < self._most)
                    if self._stopped:
                        return
                batch = self._make(step)
                with self._changed:
                    if self._stopped:
                        return
                    self._made.append(batch)
                    self._changed.notify_all()
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

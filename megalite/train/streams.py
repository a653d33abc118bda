"""Standard output and error of a rank: dropped while it has nothing to say, and where nobody listens any more.

What a run says is for whoever looks on; metrics.jsonl has all of it. So a reader that goes away (`| head`, a pager, a
terminal that was closed) and a stream that was closed from the beginning (`>&-`) do not end the run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast


class Silence:
    """Standard output and error are dropped while it is `held`."""

    def __init__(self, held: bool) -> None:
        self.held = held

    @contextmanager
    def over_streams(self) -> Iterator[None]:
        with (
            redirect_stdout(cast(TextIO, Gate(sys.stdout, self))),
            redirect_stderr(cast(TextIO, Gate(sys.stderr, self))),
        ):
            yield

    @contextmanager
    def broken(self) -> Iterator[None]:
        held, self.held = self.held, False
        try:
            yield
        finally:
            self.held = held


class Gate:
    """A stream under a silence. Log handlers that Hydra makes meanwhile keep this one, and so speak later."""

    def __init__(self, stream: TextIO, silence: Silence) -> None:
        self.stream = stream
        self.silence = silence

    def write(self, text: str) -> int:
        if not self.silence.held:
            try:
                self.stream.write(text)
            except BrokenPipeError:
                self._leave()
        return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except BrokenPipeError:
            self._leave()

    def _leave(self) -> None:
        """Nobody reads: what is buffered, and what is to come, goes nowhere, at the interpreter's exit too."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.stream.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def open_missing() -> None:
    """Standard streams that were closed when Python began are None; they lead nowhere from here on."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115, it stays open

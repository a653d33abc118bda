"""How a run can end: the exit codes, which error has which, and the board on which the ranks read of each other's end.

    0  done                      4  hang: a rank waited for others longer than cluster.timeout_seconds
    1  an exception              5  no finite gradient any more
    2  the configuration         6  out of memory
    3  the data                  7  a rank went away without a word (killed, or its machine is gone)
    130 SIGINT   143 SIGTERM

All ranks of a job leave with the code of what ended it, whoever is asked. No torch here.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megalite.train.finite import NotFiniteError
from megalite.train.guard import Stopped
from megalite.train.strict import ConfigError

if TYPE_CHECKING:
    from torch.distributed import Store

FAILED_CODE, CONFIG_CODE, DATA_CODE, HANG_CODE, NOT_FINITE_CODE, MEMORY_CODE, LOST_CODE = range(1, 8)
INTERRUPTED_CODE = 130
REFUSALS = (CONFIG_CODE, DATA_CODE, NOT_FINITE_CODE)
"""Codes of errors that are one line; the others come with a traceback."""


def code_of(error: BaseException) -> int:
    """The exit code of what main raised."""
    from megalite.data import DataError  # here, since it brings numpy, which --help does not need

    if isinstance(error, KeyboardInterrupt):
        return 128 + error.signum if isinstance(error, Stopped) else INTERRUPTED_CODE
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, ConfigError):
        return CONFIG_CODE
    if isinstance(error, DataError):
        return DATA_CODE
    if isinstance(error, NotFiniteError):
        return NOT_FINITE_CODE
    return MEMORY_CODE if _is_out_of_memory(error) else FAILED_CODE


def _is_out_of_memory(error: BaseException) -> bool:
    # By name: torch's class exists only once torch is imported, and its CPU allocator raises a plain RuntimeError.
    names = {cls.__name__ for cls in type(error).__mro__}
    by_cpu = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    return bool(names & {"OutOfMemoryError", "MemoryError"}) or by_cpu


def one_line(error: BaseException) -> str:
    """Its type and the first line of what it says."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r})"
    said = str(error).strip().splitlines()
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__


@dataclass(frozen=True)
class Ending:
    """What ended a job. kind: failed, stopped (by a signal), hung, lost; line: said of it in one line."""

    kind: str
    code: int
    rank: int
    line: str


@dataclass(frozen=True)
class Card:
    """A rank's process. machine: its boot; started: its start in clock ticks: with pid it names one process only."""

    machine: str
    pid: int
    started: int

    @classmethod
    def mine(cls) -> Card:
        boot = Path("/proc/sys/kernel/random/boot_id")
        return cls(boot.read_text().strip() if boot.exists() else "", os.getpid(), _process(os.getpid())[1])

    def state(self) -> str:
        """What the system knows of that process: "gone", "stopped", "running"; "" for one on another machine."""
        if not self.machine or self.machine != Card.mine().machine:
            return ""
        letter, started = _process(self.pid)
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter in "Tt" else "running"


def _process(pid: int) -> tuple[str, int]:
    """(state letter, start time) of a process here; ("X", 0) if there is none, or no /proc to tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "X", 0
    return fields[0], int(fields[19])


class BoardGone(RuntimeError):
    """The store went away with the process that kept it."""


class Board:
    """What the ranks of one job write up for each other when it ends, in the job's store.

    The first ending stands. No call waits for another rank's process, but each blocks while the store's keeper is
    stopped, and raises BoardGone once the keeper is gone. keeper: this rank keeps the store and so should leave last.
    """

    def __init__(self, store: Store, *, rank: int, size: int, keeper: bool = False) -> None:
        self.store, self.rank, self.size, self.keeper = store, rank, size, keeper
        self.gone = self.has_left = False
        self._claimed = False

    def claim(self, ending: Ending) -> bool:
        """Write up what ended the job. True if this is the first word, so that the caller has it."""
        if self._claimed:
            return False
        word = json.dumps(asdict(ending))
        self._claimed = self._call("compare_set", "ending", "", word) == word.encode()
        return self._claimed

    def ending(self) -> Ending | None:
        """What ended the job, or None if it goes on."""
        return Ending(**json.loads(self._call("get", "ending"))) if self._call("check", ["ending"]) else None

    def tell(self, ending: Ending, silent: Iterable[int] = ()) -> None:
        """The first word has been spoken, and what came of it. silent: ranks that did not answer."""
        self._call("set", "told", json.dumps([asdict(ending), sorted(silent)]))

    def told(self, seconds: float) -> tuple[Ending | None, list[int]]:
        """What `tell` wrote, waited for so long; (None, []) if it does not come."""
        if not self._await(["told"], seconds):
            return None, []
        ending, silent = json.loads(self._call("get", "told"))
        return Ending(**ending), silent

    def write(self, kind: str, text: str) -> None:
        """This rank's own entry of a kind: "card", "state", "left"."""
        self._call("set", f"{kind}/{self.rank}", text)

    def read(self, kind: str, *, seconds: float = 0.0, ranks: Iterable[int] | None = None) -> dict[int, str]:
        """The entries of a kind that are there once all are, or after so many seconds."""
        keys = {rank: f"{kind}/{rank}" for rank in (range(self.size) if ranks is None else ranks)}
        self._await(list(keys.values()), seconds)
        return {rank: self._call("get", key).decode() for rank, key in keys.items() if self._call("check", [key])}

    def leave(self, seconds: float) -> None:
        """This rank reads no more. The keeper waits so long for the others."""
        self.has_left = True
        self.write("left", "")
        if self.keeper:
            self._await([f"left/{rank}" for rank in range(self.size)], seconds)

    def _await(self, keys: list[str], seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._call("check", keys):
            if time.monotonic() >= end:
                return False
            time.sleep(min(0.05, seconds))
        return True

    def _call(self, method: str, *args: object) -> Any:
        if self.gone:  # torch writes pages to stderr for each try
            raise BoardGone
        try:
            return getattr(self.store, method)(*args)
        except RuntimeError as error:
            self.gone = True
            raise BoardGone from error


def write_error_file(path: str | None, message: str, trace: str = "", *, consequence: bool = False) -> None:
    """Leave a failure where torchrun looks for what to show, in its format. The first one is kept."""
    if path is None or Path(path).exists():
        return
    # torchrun takes the earliest for the cause and counts in whole seconds.
    seconds = int(time.time()) + consequence
    extra = {"py_callstack": trace or message, "timestamp": str(seconds)}
    Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def trace_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))

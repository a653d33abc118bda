"""What is said when main raises, by whom, and the exit code: the cause once and first, its consequences in a line.

The rank that is first to write its ending on the board speaks of it in full. Another one ends with that ending's code
and says one line: that it stopped because of it, or what it raised itself, or nothing, if that is the same.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megalite.train import report
from megalite.train.failure import (
    FAILED_CODE,
    LOST_CODE,
    MEMORY_CODE,
    REFUSALS,
    Ending,
    code_of,
    one_line,
    trace_of,
    write_error_file,
)
from megalite.train.guard import within

if TYPE_CHECKING:
    from megalite.train.watchdog import Watch

T = TypeVar("T")
BOARD_SECONDS = 15.0
"""Bounds each talk with the board, whose keeper may be stopped; longer than any answer is waited for."""
TOLD_SECONDS = 2.0
"""How long the cause's own words are waited for, so that they come first."""


def conclude(error: BaseException, watch: Watch, *, with_traces: bool = False) -> int:
    """The exit code of what main raised, once it has been said. with_traces: of refusals too. Never raises."""
    watch.guard.unwinding = True
    if watch.ending is not None:  # the watch has ended this rank, and what main raised is only how
        return _follow(watch.ending, error, watch)
    if _is_peers(error, watch):
        return _of_peer(error, watch, with_traces)
    return _own(error, watch, with_traces)


def _is_peers(error: BaseException, watch: Watch) -> bool:
    """Whether another rank may have caused it: it came out of a collective, or out of torch.distributed."""
    if not isinstance(error, RuntimeError):
        return False
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    origin = "" if trace is None else str(trace.tb_frame.f_globals.get("__name__", ""))
    return watch.progress.in_collective() or origin.startswith(("torch.distributed", "megalite.comm"))


def _of_peer(error: BaseException, watch: Watch, with_traces: bool) -> int:
    """A collective failed here: another rank ended, and has written why, or is gone, or else it was this rank's own."""
    board = watch.board
    lost = Ending("lost", LOST_CODE, board.rank, f"a collective of rank {board.rank} failed: {one_line(error)}")
    if not _ask(lambda: board.claim(lost)):
        ending = _ask(board.ending)
        if ending is not None:
            return _follow(ending, error, watch)
        cause = "the store of this job is gone: rank 0 or the launcher, whichever keeps it, was killed"
        _say(f"rank {board.rank} stopped {watch.progress.when}, since {cause}")
        return LOST_CODE
    _, silent = _ask(watch.ask) or ({}, {})
    left = set(_ask(lambda: board.read("left")) or {})
    silent |= dict.fromkeys(left, "")
    if not silent:
        failed = Ending("failed", code_of(error), board.rank, one_line(error))
        _speak(failed, error, watch, with_traces)
        _ask(lambda: board.tell(failed))
        return failed.code
    line = report.lost(silent, left)
    code = LOST_CODE if set(silent) - left else FAILED_CODE
    lost = Ending("lost", code, board.rank, line)
    _say(f"{line} (seen by rank {board.rank} {watch.progress.when})")
    write_error_file(watch.error_file, line)
    _ask(lambda: board.tell(lost, set(silent) - left))
    return lost.code


def _own(error: BaseException, watch: Watch, with_traces: bool) -> int:
    """This rank's own error, or a signal that it was sent."""
    board, code = watch.board, code_of(error)
    if isinstance(error, KeyboardInterrupt):
        ending = Ending("stopped", code, board.rank, f"{error or 'SIGINT'} {watch.progress.when}")
    else:
        ending = Ending("failed", code, board.rank, one_line(error))
    if _ask(lambda: board.claim(ending)) is False:
        first = _ask(board.ending)
        return code if first is None else _follow(first, error, watch)
    _speak(ending, error, watch, with_traces)
    _ask(lambda: board.tell(ending))
    return code


def _follow(ending: Ending, error: BaseException, watch: Watch) -> int:
    """Another rank was first, or this one's own watch. In a hang the report says all."""
    board, rank = watch.board, watch.board.rank
    if ending.kind == "hung" or (ending.rank == rank and ending.kind != "lost"):
        return ending.code
    seconds = TOLD_SECONDS if ending.kind != "lost" else BOARD_SECONDS
    final, _ = _ask(lambda: board.told(seconds)) or (None, [])
    ending = final or ending
    if ending.kind == "stopped" or ending.rank == rank or board.has_left:
        return ending.code
    own = not isinstance(error, KeyboardInterrupt) and not _is_peers(error, watch)
    if not own:
        cause = ending.line if ending.kind == "lost" else f"rank {ending.rank} failed: {ending.line}"
        _say(line := f"rank {rank} stopped, since {cause}")
        write_error_file(watch.error_file, line, consequence=True)
    elif one_line(error) != ending.line:
        _say(f"rank {rank} failed too: {one_line(error)}")
    return ending.code


def _speak(ending: Ending, error: BaseException, watch: Watch, with_traces: bool) -> None:
    if ending.kind == "stopped":
        _say(f"rank {ending.rank} was stopped by {ending.line}")
    elif isinstance(error, SystemExit):
        if ending.code:
            _say(f"rank {ending.rank} left {watch.progress.when} by {ending.line}")
    elif ending.code in REFUSALS:
        _say((trace_of(error) if with_traces else "") + f"error: {error}")
    else:
        trace = trace_of(error)
        _say(f"rank {ending.rank} failed {watch.progress.when}:\n{trace}")
        if ending.code == MEMORY_CODE:
            _say("out of memory: take a smaller micro_batch_size or seq_len, recompute=full, or more ranks")
        write_error_file(watch.error_file, ending.line, trace)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _ask(call: Callable[[], T]) -> T | None:
    """What the board says, or None where it is out of reach."""
    return within(BOARD_SECONDS, call)

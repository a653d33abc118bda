"""What is said of a hang or of a lost rank: pure functions of what the ranks answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from megalite.train.progress import State, Waiting, when

MOST_LINES = 12
"""Ranks that a report names one by one, those that tell most first; each rank's own file has the rest."""


@dataclass(frozen=True)
class Rank:
    """One line about one rank; the lower `order`, the nearer it is to the cause."""

    order: int
    rank: int
    line: str


def hang(
    waiting: Waiting,
    states: Mapping[int, State],
    processes: Mapping[int, str],
    *,
    rank: int,
    size: int,
    seconds: float,
    timeout_seconds: float,
    folder: str,
) -> str:
    """Which collective hung, who did not come to it, and where each rank is. `rank` waits and has asked the others.

    states: of the ranks that answered. processes: what the system knows of those that did not, "" for nothing.
    """
    ranks = waiting.ranks or range(size)
    over = f" over {waiting.axis} (ranks {shorten(ranks)}), its number {waiting.number}" if waiting.axis else ""
    size_of = f", {waiting.payload_bytes:,} bytes" if waiting.axis else ""
    step = states[rank].step if rank in states else 0
    lines = [
        f"hang {when(step)}: {waiting.operation}{over}{size_of}: rank {rank} has waited {seconds:.1f} s, and "
        f"cluster.timeout_seconds={timeout_seconds:g}"
    ]
    about = [_of(other, waiting, states, processes, joins=other in ranks) for other in range(size)]
    about.sort(key=lambda one: (one.order, one.rank))
    lines += [f"  {one.line}" for one in about[:MOST_LINES]]
    if len(about) > MOST_LINES:
        lines.append(f"  and {len(about) - MOST_LINES} more")
    lines.append(f"  every rank's stacks and collectives: {folder}/rank<N>.txt")
    lines.append("  if it is only slow (a first step, a slow disk), take a larger cluster.timeout_seconds")
    return "\n".join(lines)


def _of(
    other: int, waiting: Waiting, states: Mapping[int, State], processes: Mapping[int, str], *, joins: bool
) -> Rank:
    if other not in states:
        return Rank(0, other, f"rank {other} {silence(processes.get(other, ''))}")
    state = states[other]
    where = f"{when(state.step)}, at {state.at}"
    doing = f"waits in {state.waits_in}" if state.waits_in else "waits in no collective"
    if not joins:
        return Rank(5 if state.waits_in else 2, other, f"rank {other} is not asked for: {doing}; {where}")
    if not waiting.axis:
        same = state.waits_in == waiting.operation
        return Rank(
            4 if same else 1, other, f"rank {other} {'waits too' if same else 'did not come: ' + doing}; {where}"
        )
    begun = state.counts.get(waiting.axis, 0)
    if begun < waiting.number:
        came = f"did not come: it has begun {begun} over {waiting.axis} and {doing}"
        return Rank(3 if state.waits_in else 1, other, f"rank {other} {came}; {where}")
    operation = state.operation(waiting.axis, waiting.number)
    if operation not in (None, waiting.operation):
        return Rank(
            1, other, f"rank {other} came with another one: its number {waiting.number} is {operation}; {where}"
        )
    return Rank(4, other, f"rank {other} came and {doing}; {where}")


def lost(silent: Mapping[int, str], left: Iterable[int]) -> str:
    """One line on ranks that went away without a word. left: those that had ended their run."""
    done = set(left)
    parts = [
        f"rank {rank} " + ("has ended its run before the others" if rank in done else silence(process))
        for rank, process in sorted(silent.items())
    ]
    more = f"; and {len(parts) - MOST_LINES} more" if len(parts) > MOST_LINES else ""
    return "; ".join(parts[:MOST_LINES]) + more


def silence(process: str) -> str:
    """What it means that a rank does not answer, by what the system knows of its process."""
    if process == "gone":
        return "went away without a word: its process was killed (by a person, or for want of memory) or crashed"
    if process == "stopped":
        return "does not answer: its process is stopped (SIGSTOP)"
    if process == "running":
        return "does not answer, though its process is there"
    return "does not answer: its process, its machine or the network is gone or stopped"


def shorten(ranks: Sequence[int] | range) -> str:
    """As `0, 1` or, of many, `0, 1, 2, 3, ... 1023`."""
    if len(ranks) <= 8:
        return ", ".join(map(str, ranks))
    return f"{', '.join(map(str, ranks[:4]))}, ... {ranks[-1]}"

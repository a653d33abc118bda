"""A pipeline schedule is data: for each rank, an ordered list of what to do.

The model is cut into *stages*, numbered along the forward pass; each rank holds one or several. One `Action` is one
pass of one micro-batch through one stage:

- F, the forward;
- B, the gradient of the stage's input, which the stage before waits for;
- W, the gradient of its weights, which nobody waits for until the optimizer's step (arXiv:2401.10241);
- BW, both in one backward, whose input gradient leaves at its end.

Written F3@1: the forward of micro-batch 3 through stage 1. Nothing here runs anything: schedules are made in
`straight`, `looped` and `v_shaped`, checked in `lower`, timed in `simulate`, drawn in `draw`, run in `execute`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeVar

Number = int | float | Fraction
N = TypeVar("N", int, Number)
KINDS = ("F", "B", "W", "BW")
_WORD = re.compile(r"(F|BW|B|W)([0-9]{1,9})@([0-9]{1,9})")


class Action(NamedTuple):
    """One pass of a micro-batch through a stage. kind: one of KINDS."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}@{self.stage}"

    @classmethod
    def parse(cls, word: str) -> Action:
        """F3@1 -> Action("F", stage=1, microbatch=3). Raises ValueError for another word."""
        if not (found := _WORD.fullmatch(word)):
            raise ValueError(
                f"{word!r} is no action; write F3@1 for the forward of micro-batch 3 on stage 1, or B, W, BW"
            )
        kind, microbatch, stage = found.groups()
        return cls(kind, int(stage), int(microbatch))


Row = tuple[Action, ...]


@dataclass(frozen=True)
class Schedule:
    """What each rank does, in order.

    rows: one of actions a rank. rank_of: stage -> the rank that holds it. paired: forwards that run together with the
    backward that follows them in their row (DeepSeek-V3's F&B): one after the other here, overlapped only where
    something overlaps them. peaks: for each rank the activations that the schedule promises to hold at most, each of
    one stage and micro-batch, from its F to its W (or BW); () promises nothing.
    """

    name: str
    rows: tuple[Row, ...]
    rank_of: tuple[int, ...]
    paired: frozenset[Action] = frozenset()
    peaks: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.rank_of)

    @cached_property
    def microbatches(self) -> int:
        return 1 + max((action.microbatch for row in self.rows for action in row), default=-1)

    @property
    def stages_per_rank(self) -> int:
        """Virtual stages, v: the most that a rank holds."""
        return max(len(self.stages_of(rank)) for rank in range(self.ranks))

    @cached_property
    def splits_backward(self) -> bool:
        """Whether any backward comes as B and W apart."""
        return any(action.kind == "W" for row in self.rows for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, in forward order."""
        return tuple(stage for stage, holder in enumerate(self.rank_of) if holder == rank)

    def __str__(self) -> str:
        """One line a rank, as `parse` reads it."""
        return "\n".join(" ".join(self._words(row)) for row in self.rows)

    def to_csv(self) -> str:
        """One line a rank, commas between the words, as `parse` reads it."""
        return "\n".join(",".join(self._words(row)) for row in self.rows)

    def _words(self, row: Row) -> Iterator[str]:
        actions = iter(row)
        for action in actions:
            yield f"{action}&{next(actions)}" if action in self.paired else str(action)


def parse(text: str, *, name: str = "custom") -> Schedule:
    """Reads a schedule: one line a rank, words apart by blanks or commas; F3@1&BW2@6 is a pair; # begins a comment.

    A stage lives on the rank in whose line it stands. Raises ValueError, with the line, for what is no schedule; that
    it is complete and comes to its end is for `lower.check` to say.
    """
    rows: list[Row] = []
    paired: set[Action] = set()
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].replace(",", " ").split()
        if not words:
            continue
        row: list[Action] = []
        for word in words:
            try:
                actions = [Action.parse(part) for part in word.split("&")]
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if len(actions) > 1:
                _require_pair(actions, word, number)
                paired.add(actions[0])
            row += actions
        rows.append(tuple(row))
    if not rows:
        raise ValueError("the schedule is empty; write one line of actions for each rank, as in F0@0 BW0@0")
    return Schedule(name, tuple(rows), _rank_of(rows), frozenset(paired))


def _require_pair(actions: Sequence[Action], word: str, line: int) -> None:
    kinds = [action.kind for action in actions]
    if len(actions) != 2 or kinds[0] != "F" or kinds[1] not in ("B", "BW"):
        raise ValueError(f"line {line}: {word!r} is no pair; a pair is a forward and a backward, as in F3@1&BW2@6")


def _rank_of(rows: Sequence[Row]) -> tuple[int, ...]:
    holder: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            if holder.setdefault(action.stage, rank) != rank:
                raise ValueError(
                    f"rank {rank} has {action}, and stage {action.stage} is rank {holder[action.stage]}'s; a stage "
                    "lives on one rank"
                )
    missing = sorted(set(range(len(holder))) - set(holder))
    if missing:
        raise ValueError(f"no rank has stage {missing[0]}, and there is a stage {max(holder)}; number them from 0")
    return tuple(holder[stage] for stage in range(len(holder)))


def in_line(ranks: int) -> tuple[int, ...]:
    """Placement of one stage a rank."""
    return tuple(range(ranks))


def in_loops(ranks: int, virtual_stages: int) -> tuple[int, ...]:
    """Placement of `virtual_stages` a rank, around and around: stage s on rank s mod ranks (arXiv:2104.04473)."""
    return tuple(stage % ranks for stage in range(ranks * virtual_stages))


def in_a_v(ranks: int) -> tuple[int, ...]:
    """Placement of two stages a rank, there and back: rank 0 holds the first and the last (arXiv:2405.15362)."""
    return (*range(ranks), *reversed(range(ranks)))


def held(actions: Iterable[Action], passes: Callable[[int], tuple[N, N]]) -> Iterator[N]:
    """What all passes hold together: before the first action, which is nothing, and after each.

    passes: stage -> what one holds from its F to its B or BW, and from its B to its W.
    """
    total: N = 0
    yield total
    for kind, stage, _ in actions:
        until_b, until_w = passes(stage)
        total += {"F": until_b, "B": until_w - until_b, "W": -until_w, "BW": -until_b}[kind]
        yield total


def held_at_most(actions: Iterable[Action]) -> int:
    """Activations that a row of actions holds at its highest moment, each from its F to its W or BW."""
    return max(held(actions, lambda stage: (1, 1)))

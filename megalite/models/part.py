"""`Part`: what of a model one pipeline stage holds. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """The layers of one stage, by their numbers in the whole model; the first also embeds, the last has the loss."""

    layers: range
    is_first: bool = True
    is_last: bool = True

    @classmethod
    def each(cls, split: Sequence[range]) -> list[Part]:
        """The parts of all stages, in forward order, from the layers of each (`megalite.pipeline.split`)."""
        last = len(split) - 1
        return [cls(layers, stage == 0, stage == last) for stage, layers in enumerate(split)]


def require_placed(parts: Mapping[int, Part], rank_of: Sequence[int], *, rank: int) -> None:
    """Raises ValueError where `parts` are not the stages that `rank_of` gives this rank of pp, or not in their places.

    Every rank derives from `rank_of` which groups to make, so one that disagrees would leave the others waiting.
    """
    mine = [stage for stage, holder in enumerate(rank_of) if holder == rank]
    if sorted(parts) != mine:
        raise ValueError(
            f"pp rank {rank} was given the stages {sorted(parts)}, and rank_of={list(rank_of)} places {mine} on it; "
            "pass the schedule's rank_of"
        )
    for stage, part in parts.items():
        if (part.is_first, part.is_last) != (stage == 0, stage == len(rank_of) - 1):
            raise ValueError(
                f"stage {stage} of {len(rank_of)} has is_first={part.is_first} and is_last={part.is_last}; "
                "make the parts of all stages at once, by Part.each"
            )

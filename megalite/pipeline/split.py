"""Which layers each stage holds: every one exactly once, in order. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

STAGES = "layout.pp x pipeline.virtual_stages"


def split_layers(
    layers: int,
    stages: int,
    *,
    sizes: Sequence[int] | None = None,
    embedding_layers: int = 0,
    head_layers: int = 0,
) -> list[range]:
    """The layers of each stage, numbered through from 0.

    sizes (pipeline.split): how many each stage has. Without, they are as even as can be: stages differ by one layer at
    most, the embedding counting as `embedding_layers` on the first stage and the head as `head_layers` on the last; a
    first or last stage may so have no layer beside them. What is left over goes to the stages with the fewest layers,
    from the front: with nothing counted the last stage, which has the head, is among the smaller ones.
    Raises ValueError, with the config keys, where sizes and numbers disagree or a stage would have nothing to do.
    """
    if layers < 1 or stages < 1:
        raise ValueError(f"model.num_hidden_layers={layers} and {STAGES} = {stages} must be at least 1")
    if sizes is None:
        sizes = _even(layers, stages, embedding_layers=embedding_layers, head_layers=head_layers)
    elif embedding_layers or head_layers:
        counted = f"pipeline.embedding_layers={embedding_layers} and pipeline.head_layers={head_layers}"
        raise ValueError(f"pipeline.split={list(sizes)} leaves nothing for {counted} to decide; give one or the other")
    else:
        _require_fitting(sizes, layers, stages)
    ends = list(accumulate(sizes))
    return [range(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _even(layers: int, stages: int, *, embedding_layers: int, head_layers: int) -> list[int]:
    for key, count in (("embedding", embedding_layers), ("head", head_layers)):
        if count < 0:
            raise ValueError(f"pipeline.{key}_layers={count} must be at least 0")
    counted = (embedding_layers > 0) + (head_layers > 0)
    if stages > layers + counted:
        raise ValueError(
            f"model.num_hidden_layers={layers} cannot fill the {stages} stages of {STAGES}; take at most "
            f"{layers + counted} stages, count embedding and head (pipeline.embedding_layers, pipeline.head_layers), "
            "or give pipeline.split"
        )
    sizes, loads = [0] * stages, [0] * stages
    loads[0] += embedding_layers
    loads[-1] += head_layers
    for _ in range(layers):
        least = min(range(stages), key=lambda stage: (loads[stage], sizes[stage], stage))
        sizes[least] += 1
        loads[least] += 1
    return sizes


def _require_fitting(sizes: Sequence[int], layers: int, stages: int) -> None:
    shown = f"pipeline.split={list(sizes)}"
    if len(sizes) != stages:
        raise ValueError(f"{shown} has {len(sizes)} entries for the {stages} stages of {STAGES}; give one to each")
    if min(sizes) < 0 or sum(sizes) != layers:
        raise ValueError(
            f"{shown} sums to {sum(sizes)}, and model.num_hidden_layers={layers}; entries of at least 0 that sum to "
            f"{layers} are legal"
        )
    for stage, size in enumerate(sizes[1:-1], 1):
        if not size:
            raise ValueError(
                f"{shown} leaves stage {stage} nothing to do; only the first (embedding) and the last (head) of the "
                f"{stages} stages may have 0 layers"
            )

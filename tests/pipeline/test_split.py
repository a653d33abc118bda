"""Every layer is on one stage, in order, and stages are as even as can be."""

from __future__ import annotations

import re
from itertools import product

import pytest

from megalite.pipeline.split import split_layers


def sizes(*args: int, **options) -> list[int]:
    return [len(layers) for layers in split_layers(*args, **options)]


@pytest.mark.parametrize(("layers", "stages"), [*product(range(1, 14), range(1, 7)), (30, 4), (80, 32)])
def test_every_layer_is_on_one_stage_in_order_and_sizes_differ_by_at_most_one(layers, stages):
    if stages > layers:
        return
    split = split_layers(layers, stages)
    assert len(split) == stages
    assert [layer for stage in split for layer in stage] == list(range(layers))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_layers_that_do_not_divide_are_not_dropped():
    assert sizes(7, 2) == [4, 3]
    assert sizes(10, 3) == [4, 3, 3]
    assert sizes(30, 4) == [8, 8, 7, 7]


@pytest.mark.parametrize(
    ("layers", "stages", "embedding", "head"), list(product(range(1, 8), range(1, 6), range(4), range(4)))
)
def test_counted_as_layers_embedding_and_head_are_balanced_as_no_other_split_does_better(
    layers, stages, embedding, head
):
    counted = {"embedding_layers": embedding, "head_layers": head}
    if stages > layers + (embedding > 0) + (head > 0):
        with pytest.raises(ValueError, match=f"cannot fill the {stages} stages"):
            split_layers(layers, stages, **counted)
        return

    def loads(split: list[int]) -> list[int]:
        return [n + (i == 0) * embedding + (i == stages - 1) * head for i, n in enumerate(split)]

    found = sizes(layers, stages, **counted)
    assert sum(found) == layers and all(found[1:-1])
    every = [split for split in product(range(layers + 1), repeat=stages) if sum(split) == layers]
    best = min(sorted(loads(split), reverse=True) for split in every)
    assert sorted(loads(found), reverse=True) == best
    with_layers = [load for load, size in zip(loads(found), found, strict=True) if size]
    assert max(with_layers) - min(loads(found)) <= 1, "what has layers has at most one more than any other"


def test_a_stage_of_the_embedding_or_the_head_alone_comes_only_where_the_count_asks_for_it():
    assert sizes(4, 4, embedding_layers=1, head_layers=1) == [1, 1, 1, 1]
    assert sizes(2, 4, embedding_layers=1, head_layers=1) == [0, 1, 1, 0]
    assert sizes(6, 4, embedding_layers=3) == [0, 2, 2, 2]


def test_given_sizes_are_taken_as_they_are():
    assert split_layers(14, 4, sizes=[3, 4, 4, 3]) == [range(3), range(3, 7), range(7, 11), range(11, 14)]
    assert sizes(2, 3, sizes=[0, 2, 0]) == [0, 2, 0]
    assert sizes(2, 1, sizes=[2]) == [2]


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((2, 3), {}, "model.num_hidden_layers=2 cannot fill the 3 stages of layout.pp x pipeline.virtual_stages; take "
         "at most 2 stages,"),
        ((2, 4), {"head_layers": 1}, "take at most 3 stages,"),
        ((8, 4), {"sizes": [4, 4]}, "pipeline.split=[4, 4] has 2 entries for the 4 stages of layout.pp x"),
        ((8, 2), {"sizes": [3, 4]}, "pipeline.split=[3, 4] sums to 7, and model.num_hidden_layers=8;"),
        ((8, 2), {"sizes": [9, -1]}, "entries of at least 0 that sum to 8 are legal"),
        ((8, 3), {"sizes": [4, 0, 4]}, "pipeline.split=[4, 0, 4] leaves stage 1 nothing to do"),
        ((8, 2), {"sizes": [4, 4], "head_layers": 1}, "pipeline.split=[4, 4] leaves nothing for"),
        ((8, 2), {"embedding_layers": -1}, "pipeline.embedding_layers=-1 must be at least 0"),
        ((0, 1), {}, "model.num_hidden_layers=0"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_the_numbers_and_the_keys(args, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        split_layers(*args, **options)

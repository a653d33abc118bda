"""`shard_over`: shards over some of the data ranks, replicas over the others, the same numbers."""

from __future__ import annotations

from functools import partial

import pytest

from megalite.mesh import Layout, Mesh
from megalite.zero import Zero
from tests.ranks import run
from tests.zero.cases import assert_all_equal_one_process
from tests.zero.models import ParallelMLP
from tests.zero.training import Record, adamw, assert_equals_one_process, plain_mlp, reference, train

HYBRID = ["parameters of 0, 1 and 3 entries", "tied within and between units", "keywords, tuples, dicts, dataclasses"]


def test_shards_over_one_some_or_all_data_ranks_train_as_in_one_process():
    """Parameters of one and of three entries over four ranks."""
    options = [{"stage": stage, "shard_over": over} for stage in (1, 2, 3) for over in (1, 2, 4)]
    assert_all_equal_one_process(HYBRID, Layout(dp=4), 2, options)


def with_tp(sequence_parallel: bool) -> list[Record]:
    mesh = Mesh.build(Layout(dp=2, tp=2))
    build = partial(ParallelMLP, sequence_parallel=sequence_parallel)
    chosen = [{"stage": stage, "shard_over": over} for stage in (1, 2, 3) for over in (1, 2)]
    return [train(build, mesh, (1, 3, 2), options) for options in chosen]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_hybrids_train_as_in_one_process_beside_tensor_parallelism(sequence_parallel):
    one = reference(partial(ParallelMLP, sequence_parallel=sequence_parallel))
    for records in zip(*run(with_tp, 4, sequence_parallel), strict=True):
        assert_equals_one_process(records, one)


def cut_wrongly(over: int) -> str:
    with pytest.raises(ValueError) as raised:
        Zero(plain_mlp(Mesh.build(Layout(dp=4))), Mesh.build(Layout(dp=4)), stage=3, shard_over=over, optimizer=adamw)
    return str(raised.value)


@pytest.mark.parametrize("over", [0, 3, 8])
def test_a_number_of_shards_that_does_not_divide_the_data_ranks_is_refused_with_both_numbers(over):
    expected = f"zero.shard_over={over} must divide the 4 data ranks: take one of [1, 2, 4]"
    assert run(cut_wrongly, 4, over) == [expected] * 4

"""The law of the whole project: same config and seed, same numbers, on every cut of the ranks.

Here over data and tensor ranks, with every option (one rank of pp: its B and W apart or in one); test_pipeline_is_free
has the schedules. Later parts of the project add their axis.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
from allpairspy import AllPairs

from megalite.layers.recompute import Recompute
from megalite.mesh import Layout
from megalite.models.config import GPTConfig
from megalite.models.gpt import LossOptions
from tests.layouts import MEAN, MODELS, PLAIN, STRAIGHT, UNSHARDED, Row, Sharded, Stages, assert_law

GPTS = [name for name, config in MODELS.items() if isinstance(config, GPTConfig)]
FACTORS = OrderedDict(
    model=GPTS,
    layout=[
        Layout(dp=2),
        Layout(dp=4),
        Layout(tp=2),
        Layout(tp=4),
        Layout(dp=2, tp=2),
        Layout(dp=2, tp=2, order=("dp", "tp", "cp", "pp")),
    ],
    sequence_parallel=[False, True],
    microbatches=[1, 2],
    recompute=[
        PLAIN,
        Recompute("full"),
        Recompute("full", every=2),
        Recompute("selective", ("attention", "norm", "activation")),
        Recompute("selective", ("mlp",)),
    ],
    chunk_tokens=[None, 5],
    stages=[STRAIGHT, Stages("zb_h1")],
    loss=[MEAN, LossOptions(z_loss=1e-2, label_smoothing=0.1)],
    zero=[UNSHARDED, Sharded(1), Sharded(2), Sharded(3), Sharded(3, over=2)],
)


def possible(row: dict[str, Any]) -> bool:
    """Sequence parallelism cuts over tp, ZeRO over data ranks. row: the values of some factors."""
    layout, zero = row.get("layout"), row.get("zero", UNSHARDED)
    return layout is None or not (
        (row.get("sequence_parallel") and layout.tp == 1) or (zero.over and layout.dp % zero.over)
    )


def _named(values: Sequence[Any]) -> dict[str, Any]:
    """The first of a row's values, as many as there are, by factor."""
    return dict(zip(FACTORS, values, strict=False))


# Every pair of values of two factors stands in a row: faults of two things together show, without the full product.
TABLE = [Row(**pairs._asdict()) for pairs in AllPairs(FACTORS, filter_func=lambda row: possible(_named(row)))] + [
    Row("mlp", Layout(dp=4), microbatches=2, zero=Sharded(3)),
    Row("mlp", Layout(tp=4), stages=Stages("zb_h1")),
    Row("mlp", Layout(dp=2, tp=2), microbatches=2, zero=Sharded(2)),
    Row("mlp of three", Layout(dp=2, tp=2), stages=Stages("zb_h1"), zero=Sharded(3)),
]


@pytest.mark.parametrize("row", TABLE, ids=str)
def test_every_layout_trains_as_one_process_does(row: Row) -> None:
    assert_law(row)


def test_the_table_has_every_pair_of_values() -> None:
    """The generator is another's: its promise is checked here, on what was made of it."""
    seen = {pair for row in TABLE for pair in combinations(((name, str(getattr(row, name))) for name in FACTORS), 2)}
    values = [[(name, value) for value in FACTORS[name]] for name in FACTORS]
    for one, other in ((a, b) for first, second in combinations(values, 2) for a in first for b in second):
        if possible(dict([one, other])):
            assert ((one[0], str(one[1])), (other[0], str(other[1]))) in seen, (one, other)
    # A norm over heads leaves a summand on each rank always, one over the stream only where tokens are cut.
    cut = {(row.model, row.sequence_parallel) for row in TABLE if row.layout.tp > 1}
    assert cut >= set(product(GPTS, (False, True)))

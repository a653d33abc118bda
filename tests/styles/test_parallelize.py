"""A user's model that is cut by styles trains as it did: logits, raw gradients, norm and weights are the plain one's."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("transformers")

from megalite.mesh import Layout
from tests.ranks import run
from tests.styles.models import RECIPES
from tests.styles.training import MAX_NORM, Record, assert_equals_the_plain_model, reference, train


@functools.cache
def plain(name: str) -> Record:
    return reference(RECIPES[name])


@pytest.mark.parametrize(
    ("name", "layout", "stage"),
    [
        *((name, Layout(tp=2), 0) for name in RECIPES),
        *((name, Layout(tp=4), 0) for name in RECIPES if "GPT-2" in name or "4 key heads" in name),
        *((name, Layout(dp=2, tp=2), 0) for name in ("Llama", "Llama, sequence", "GPT-2", "GPT-2, sequence")),
        *((name, Layout(dp=2, tp=2), 3) for name in ("Llama", "Llama, sequence", "GPT-2", "GPT-2, sequence")),
    ],
)
def test_a_model_of_transformers_trains_alike_on_every_layout(name, layout, stage):
    records = run(train, layout.world_size, RECIPES[name], layout, {"stage": stage})
    assert_equals_the_plain_model(records, plain(name), layout.dp)
    assert min(plain(name).norms) > MAX_NORM, "each step must clip, or clipping is not tested"

"""What a run will take, before it takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.train.check import check
from megalite.train.config import LayoutConfig, PipelineConfig, load
from megalite.train.expect import expected_memory, expected_of_all, require_memory
from megalite.train.strict import ConfigError
from tests.train.composing import composed


def test_a_model_that_cannot_fit_is_refused_with_both_numbers_unless_one_insists():
    config = check(load(composed(model="llama3-8b")), 1)
    held = expected_memory(config).state.between
    require_memory(config, held)
    require_memory(config, None)
    with pytest.raises(ConfigError, match=r"8,030,261,248 parameters need 119\.7 GiB a rank .* can have 119\.5 GiB; "):
        require_memory(config, held - 2**27)
    require_memory(replace(config, cluster=replace(config.cluster, check_memory=False)), 0)


def test_the_rank_of_a_pipeline_that_needs_most_decides():
    """Here the first one, with a layer more: embedding and head take as much."""
    pipeline = {"layout": LayoutConfig(pp=4), "pipeline": PipelineConfig(split=[9, 8, 8, 7])}
    config = check(replace(load(composed(model="llama3-8b")), **pipeline), 4)
    first, *_, last = (need.state.between for need in expected_of_all(config))
    assert first > last
    with pytest.raises(ConfigError, match=r"larger layout\.tp or layout\.pp"):
        require_memory(config, (first + last) // 2)
    require_memory(config, first)
    tied = check(replace(config, model=replace(config.model, tie_word_embeddings=True)), 4)
    assert expected_of_all(tied)[3].state == expected_of_all(config)[3].state  # the head is the embedding's copy

"""What a run will take, before it takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.train.check import check
from megalite.train.config import load
from megalite.train.expect import expected_memory, require_memory
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

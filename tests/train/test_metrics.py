"""Every metric has a name that the documentation explains, and a column only where it can occur."""

from __future__ import annotations

import re
from dataclasses import replace

from megalite.models.config import MLPConfig
from megalite.train.config import Config, EvalConfig, LogConfig
from megalite.train.metrics import METRICS, occurring
from tests.train.composing import ROOT


def names_of(config: Config, **options) -> set[str]:
    options = {"device": "cpu", "world_size": 1, "peak_known": False} | options
    return set(occurring(config, **options))


def test_the_page_on_metrics_names_those_that_there_are_and_no_others():
    page = (ROOT / "docs" / "metrics.md").read_text()
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {name for cell in cells for name in re.findall(r"`(\w+/\w+)`", cell)}
    assert named == set(METRICS)


def test_a_metric_has_a_column_only_in_a_run_in_which_it_can_occur():
    plain = names_of(Config())
    evaluated = replace(Config(), eval=EvalConfig(every=5))
    assert names_of(evaluated) - plain == {"val/loss", "val/perplexity", "val/bits_per_byte"}
    assert names_of(replace(evaluated, model=MLPConfig())) - plain == {"val/loss"}
    assert names_of(Config(), peak_known=True) - plain == {"perf/mfu"}
    assert names_of(Config(), device="cuda:0") ^ plain == {"memory/max_allocated_gib", "memory/max_resident_gib"}
    looked = names_of(Config(), world_size=2) - plain
    assert "perf/slowest_rank" in looked and len(looked) == 4
    assert names_of(replace(Config(), log=LogConfig(ranks_every=0)), world_size=2) == plain

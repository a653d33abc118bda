"""The benchmark of the display times the log alone, on a terminal that really is one."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from benchmarks.display import log_seconds, observer_seconds, terminal
from megalite.train.check import check
from megalite.train.config import Config, LogConfig


def test_what_is_timed_leaves_out_the_step(tmp_path):
    with terminal() as file, contextlib.redirect_stdout(file):
        assert file.isatty()
        config = check(replace(Config(), steps=4, out_dir=str(tmp_path), log=LogConfig(display="rich")), 1)
        taken = log_seconds(config, step_seconds=0.2)
    assert len(taken) == 3 and all(0 < seconds < 0.1 for seconds in taken)  # 100 times what is usual


def test_an_observed_collective_costs_less_than_its_own_latency():
    assert 0 < observer_seconds() < 1e-4

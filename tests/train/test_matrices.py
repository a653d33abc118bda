"""train.py with optimizers of matrices: the same rows on one rank and on four."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.train.config import LayoutConfig, OptimConfig, ZeroConfig
from tests.ranks import run
from tests.train.test_train import run_of, text, trained

__all__ = ["text"]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(tp=2)])
def test_twenty_steps_leave_the_same_rows_on_four_ranks(text, tmp_path, name, layout):
    """To 1e-10: in float64 rounding has not grown further within twenty steps."""

    def config(out: str, **changes):
        base = run_of("gpt", text, tmp_path / out, **changes)
        return replace(base, steps=20, optim=OptimConfig(name, warmup_steps=2))

    alone = trained(config("alone"))
    rows = run(trained, 4, config("cut", layout=layout, zero=ZeroConfig(stage=2)))[0]
    assert len(rows) == len(alone) == 20 and rows[-1]["train/loss"] < rows[0]["train/loss"]
    for mine, other in zip(rows, alone, strict=True):
        for key in ("train/loss", "train/grad_norm"):
            assert abs(mine[key] - other[key]) <= 1e-10 * abs(other[key]), key

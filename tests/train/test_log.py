"""What a run leaves behind, and what its header says."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from omegaconf import OmegaConf

from megalite.data import Baselines
from megalite.mesh import Layout
from megalite.models.config import MLPConfig
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, load
from megalite.train.log import Log, describe_batch, describe_layout, open_fresh

METRICS = {"train/loss": 1 / 3, "train/grad_norm": 2.0**0.5, "train/lr": 1e-3, "perf/tokens_per_sec": 12345.678}


def log(out_dir, *, rank: int = 0) -> Log:
    config = check(replace(Config(), out_dir=str(out_dir), layout=LayoutConfig(tp=2)), 4)
    return Log(config, rank=rank, layout=config.layout.fit(4), where="cpu")


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_every_number_to_the_last_bit(tmp_path):
    with log(tmp_path) as one:
        one.step(1, METRICS)
        one.step(2, METRICS | {"val/loss": 0.1 + 0.2})
        written = rows(tmp_path / "metrics.jsonl")  # before the end: a killed run keeps what it has done
    assert written == [{"step": 1, **METRICS}, {"step": 2, **METRICS, "val/loss": 0.1 + 0.2}]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_is_strict_json_and_the_line_says_that_its_step_was_skipped(tmp_path, capsys, bad):
    with log(tmp_path) as one:
        one.step(1, METRICS | {"train/loss": bad, "train/grad_norm": bad})
        one.step(2, METRICS)
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(written[0], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert row == {"step": 1, **METRICS, "train/loss": None, "train/grad_norm": None}
    first, second = capsys.readouterr().out.splitlines()
    assert f"loss {bad}" in first and first.endswith("skipped: its gradient is not finite")
    assert "skipped" not in second


def test_only_rank_0_speaks_and_writes(tmp_path, capsys):
    with log(tmp_path / "run", rank=1) as other:
        other.header(data="", baselines=lambda: pytest.fail("another rank counts what only rank 0 shows"))
        other.step(1, METRICS)
        other.summary(skipped=1)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_configuration_that_is_saved_can_be_loaded_again(tmp_path):
    with log(tmp_path) as one:
        pass
    assert load(OmegaConf.load(tmp_path / "config.yaml")) == one.config


def test_a_second_run_keeps_the_first_ones_rows_apart_even_while_both_write(tmp_path):
    with log(tmp_path) as first:
        first.step(1, METRICS)
        with log(tmp_path) as second, log(tmp_path) as third:
            first.step(2, METRICS)
            second.step(7, METRICS)
            third.step(9, METRICS)
    assert [row["step"] for row in rows(tmp_path / "metrics.1.jsonl")] == [1, 2]
    assert [row["step"] for row in rows(tmp_path / "metrics.2.jsonl")] == [7]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [9]
    assert (tmp_path / "config.1.yaml").exists() and (tmp_path / "config.2.yaml").exists()


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    for name in ("metrics.jsonl", "metrics.1.jsonl", "metrics.3.jsonl"):
        (tmp_path / name).write_text(name)
    open_fresh(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.1.jsonl").read_text() == "metrics.1.jsonl"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "metrics.jsonl"
    assert (tmp_path / "metrics.3.jsonl").read_text() == "metrics.3.jsonl"
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_what_a_person_sees(tmp_path, capsys):
    with log(tmp_path) as one:
        one.header(data="some text", baselines=lambda: Baselines(3.0, 2.5))
        one.step(1, METRICS | {"val/loss": 2.25})
        one.summary(skipped=0)
    out = capsys.readouterr().out
    assert "dp=2 x cp=1 x tp=2 x pp=1 = 4 ranks, sequence parallel" in out
    assert "16 sequences x 128 = 2,048 tokens a step: 2 data ranks x 1 micro-batches x 8" in out
    assert (
        f"step   1/{one.config.steps}  loss 0.3333  grad_norm 1.414  lr 1.00e-03  12,346 tokens/s  val_loss 2.2500"
        in out
    )
    assert "train loss 0.3333 over the last 1 steps; validation loss 2.2500" in out
    assert out.count("by the token before: 2.5000") == 2


def test_steps_that_changed_nothing_are_told_at_the_end(tmp_path, capsys):
    for skipped in (0, 3):
        with log(tmp_path) as one:
            one.step(1, METRICS)
            one.summary(skipped=skipped)
        assert ("3 steps changed nothing, as their gradient was not finite" in capsys.readouterr().out) == bool(skipped)


def test_the_layout_says_who_sits_together():
    config = check(replace(Config(), layout=LayoutConfig(tp=2)), 4)
    assert describe_layout(config, config.layout.fit(4))[1:] == ["tp: ranks [0, 1] [2, 3]", "dp: ranks [0, 2] [1, 3]"]
    many = replace(config, layout=LayoutConfig(dp=16, tp=4))
    assert describe_layout(many, Layout(dp=16, tp=4))[1].endswith("[12, 13, 14, 15] and 12 more")


def test_the_batch_is_counted_in_what_the_model_takes():
    config = check(replace(Config(), micro_batch_size=2), 2)
    assert describe_batch(config).endswith("2 data ranks x 4 micro-batches x 2 sequences")
    config = check(replace(Config(), model=MLPConfig(), global_batch_size=128), 2)
    assert describe_batch(config) == "128 vectors a step: 2 data ranks x 1 micro-batches x 64"

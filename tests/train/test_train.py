"""train.py as a whole: the same rows in every layout, and every end it can come to."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import megalite.train.batches
from megalite.mesh import Axis, Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import IGNORED, Microbatch, VectorMicrobatch
from megalite.spec import init_parameters
from megalite.train.check import check
from megalite.train.config import (
    Config,
    DataConfig,
    EvalConfig,
    LayoutConfig,
    LossConfig,
    OptimConfig,
    PipelineConfig,
    PrecisionConfig,
    ZeroConfig,
)
from megalite.train.finite import GROWTH_STEPS, MOST_SKIPPED_IN_A_ROW, LossScale, NotFiniteError
from megalite.train.launch import World
from megalite.train.model import build_stages
from tests.ranks import run
from tests.train.composing import ROOT
from tests.train.test_launch import exit_code

PROGRAM = importlib.util.spec_from_file_location("train_program", ROOT / "train.py")
train = importlib.util.module_from_spec(PROGRAM)
PROGRAM.loader.exec_module(train)

GPT = GPTConfig(hidden_size=16, intermediate_size=32, vocab_size=257, resid_pdrop=0.1, tie_word_embeddings=True)
CONFIGS = {
    "gpt": Config(model=GPT, seq_len=8, global_batch_size=8, loss=LossConfig(z_loss=0.1, chunk_tokens=6)),
    "mlp": Config(model=MLPConfig(hidden_size=16, num_hidden_layers=3), global_batch_size=8),
}


ENDS_APART = PipelineConfig("zb_v", embedding_layers=1, head_layers=1)  # four stages of two layers, and the two ends


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8).tobytes())
    return str(path)


def run_of(name: str, text: str, out_dir: Path, **changes) -> Config:
    config = replace(
        CONFIGS[name], precision=PrecisionConfig("fp64"), steps=4, out_dir=str(out_dir), eval=EvalConfig(2, 5)
    )
    data = DataConfig([text]) if name == "gpt" else DataConfig()
    return replace(config, data=data, optim=OptimConfig(warmup_steps=2), **changes)


def trained(config: Config) -> list[dict[str, float]]:
    """The rows that train.py leaves behind on this process group, or alone."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    train.main(check(config, size), World(rank, size, "cpu", "gloo", 1, Path(config.out_dir) / "cache"))
    rows = [json.loads(line) for line in (Path(config.out_dir) / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: value for key, value in row.items() if not key.startswith(("perf/", "memory/"))} for row in rows]
    return [{key: math.nan if value is None else value for key, value in row.items()} for row in kept]


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "changes"),
    [
        ("gpt", 2, LayoutConfig(tp=2), {}),
        ("gpt", 4, LayoutConfig(tp=2, sequence_parallel=False), {"micro_batch_size": 2}),
        ("gpt", 4, LayoutConfig(), {"micro_batch_size": 1}),
        ("gpt", 2, LayoutConfig(pp=2), {}),
        ("gpt", 4, LayoutConfig(pp=2), {"pipeline": ENDS_APART, "zero": ZeroConfig(3)}),
        ("gpt", 4, LayoutConfig(pp=2, tp=2), {"pipeline": PipelineConfig("zb_h1"), "recompute": "full"}),
        ("mlp", 2, LayoutConfig(tp=2), {"micro_batch_size": 4}),
        ("mlp", 2, LayoutConfig(), {}),
        ("mlp", 2, LayoutConfig(pp=2), {"pipeline": PipelineConfig("gpipe")}),
    ],
)
def test_every_layout_leaves_the_same_rows(text, tmp_path, name, ranks, layout, changes):
    """Rank 0 writes them: loss and norm are there where the last stage is another rank's, too."""
    alone = trained(run_of(name, text, tmp_path / "alone"))
    cut = run_of(name, text, tmp_path / "cut", layout=layout, **changes)
    rows = run(trained, ranks, cut)[0]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert ["val/loss" in row for row in rows] == [False, True, False, True]
    for row, expected in zip(rows, alone, strict=True):
        assert row == pytest.approx(expected, rel=1e-10)  # float64 over four steps


def test_the_loss_falls_and_a_repeated_run_has_the_same_bits(text, tmp_path):
    config = run_of("gpt", text, tmp_path / "one", steps=12)
    rows = trained(config)
    assert rows[-1]["train/loss"] < rows[0]["train/loss"] - 0.1
    assert trained(replace(config, out_dir=str(tmp_path / "two"))) == rows
    assert trained(replace(config, out_dir=str(tmp_path / "other"), seed=1)) != rows


def test_a_text_of_two_and_a_half_batches_is_read_on_in_whole_ones_by_every_layout(tmp_path):
    """The third batch ends in the next epoch: no rank has a short or a missing micro-batch."""
    (tmp_path / "short.txt").write_bytes(bytes(range(97, 122)) * 330)  # 8250 tokens, of which a step reads 3200
    alone = run_of("gpt", "", tmp_path / "alone", seq_len=400)
    data = DataConfig([str(tmp_path / "short.txt")], validation_period=0)
    alone = replace(alone, data=data, eval=EvalConfig())
    rows = run(trained, 4, replace(alone, out_dir=str(tmp_path / "cut"), layout=LayoutConfig(pp=2)))[0]
    expected = trained(alone)
    assert len(rows) == len(expected) == 4
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-10)  # float64 over four steps


def test_stop_after_ends_a_run_and_changes_none_of_its_steps(text, tmp_path):
    whole = trained(run_of("gpt", text, tmp_path / "whole"))
    part = trained(run_of("gpt", text, tmp_path / "part", stop_after=2))
    assert part == whole[:2]


class Changed:
    """Batches whose micro-batches are changed, as a function of the samples' numbers alone: in all layouts alike."""

    def __init__(self, batches: Any, change: Callable[[Any], Any]) -> None:
        self.batches, self.change = batches, change

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        self.batches.__exit__(*error)

    def training(self, step: int) -> list[Any]:
        return [self.change(microbatch) for microbatch in self.batches.training(step)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.batches, name)


def change_batches(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]) -> None:
    """From here on train.py trains on changed micro-batches."""
    opened = megalite.train.batches.open_batches
    monkeypatch.setattr(megalite.train.batches, "open_batches", lambda *a, **k: Changed(opened(*a, **k), change))


def keeping(valid: tuple[int, ...]) -> Callable[[Microbatch], Microbatch]:
    """Of sample i the first valid[i mod len(valid)] labels count, and no others."""

    def change(microbatch: Microbatch) -> Microbatch:
        labels = microbatch.labels.clone()
        for row, sample in zip(labels, microbatch.sample_ids.tolist(), strict=True):
            row[valid[sample % len(valid)] :] = IGNORED
        return replace(microbatch, labels=labels, counted=None)

    return change


def by_torch(config: Config) -> float:
    """The loss of the first step: torch's cross entropy over all tokens that count, on one process, all at once."""
    config = check(config, 1)
    model = build_stages(config, mesh=Mesh.build())[0]
    init_parameters(model, config.seed)
    batches = megalite.train.batches.open_batches(config, dp=Axis("dp"), device="cpu", cache_dir=Path(config.out_dir))
    (batch,) = batches.training(1)
    with torch.no_grad():
        total = F.cross_entropy(model.logits(batch).flatten(0, 1), batch.labels.flatten(), reduction="sum")
    return total.item() / max(batch.valid(), 1)


@pytest.mark.parametrize(
    ("valid", "ranks", "layout", "micro_batch_size"),
    [
        pytest.param((10, 100), 1, LayoutConfig(), 1, id="two micro-batches"),
        pytest.param((1, 9), 2, LayoutConfig(), None, id="two ranks"),
        pytest.param((1, 9, 100, 10), 2, LayoutConfig(), 1, id="two micro-batches of two ranks"),
        pytest.param((1, 100), 4, LayoutConfig(tp=2), None, id="dp2 tp2"),
        pytest.param((7, 0), 1, LayoutConfig(), 1, id="a micro-batch without any"),
        pytest.param((7, 0), 2, LayoutConfig(), None, id="a rank without any"),
        pytest.param((0, 0), 2, LayoutConfig(), None, id="none anywhere"),
        pytest.param((0, 0, 0, 5), 4, LayoutConfig(tp=2), 1, id="dp2 tp2, one micro-batch of one data rank"),
        pytest.param((7, 0, 1), 2, LayoutConfig(pp=2), 1, id="pp2, a micro-batch without any"),
        pytest.param((0, 0, 0, 5), 4, LayoutConfig(pp=2), 1, id="dp2 pp2, one micro-batch of one data rank"),
        pytest.param((0, 0), 2, LayoutConfig(pp=2), 1, id="pp2, none anywhere"),
    ],
)
def test_every_token_that_counts_weighs_the_same_however_they_are_spread(
    monkeypatch, text, tmp_path, valid, ranks, layout, micro_batch_size
):
    """Over sequences, micro-batches and ranks, some of which may have none; a step without any has loss and norm 0."""
    change_batches(monkeypatch, keeping(valid))
    common = {"model": replace(GPT, resid_pdrop=0.0), "seq_len": 100, "global_batch_size": len(valid)}
    common |= {"loss": LossConfig(), "eval": EvalConfig()}
    alone = replace(run_of("gpt", text, tmp_path / "alone"), **common)
    cut = replace(alone, out_dir=str(tmp_path / "cut"), layout=layout, micro_batch_size=micro_batch_size)
    expected = trained(alone)
    for row, other in zip(run(trained, ranks, cut)[0], expected, strict=True):
        assert row == pytest.approx(other, rel=1e-10)  # float64 over four steps
    assert expected[0]["train/loss"] == pytest.approx(by_torch(alone), rel=1e-10)
    if not any(valid):
        assert all(row["train/loss"] == row["train/grad_norm"] == 0 for row in expected)


def poisoned(sample: int, field: str) -> Callable[[VectorMicrobatch], VectorMicrobatch]:
    def change(microbatch: VectorMicrobatch) -> VectorMicrobatch:
        values = getattr(microbatch, field).clone()
        values[microbatch.sample_ids == sample] = math.nan
        return replace(microbatch, **{field: values})

    return change


@pytest.mark.parametrize(
    ("bad_step", "layout", "field"),
    [
        pytest.param(1, LayoutConfig(), "inputs", id="dp, first step"),
        pytest.param(3, LayoutConfig(tp=2), "inputs", id="tp"),
        pytest.param(1, LayoutConfig(pp=2), "targets", id="pp, first step"),
        pytest.param(3, LayoutConfig(pp=2), "targets", id="pp"),
    ],
)
def test_a_loss_that_is_not_a_number_on_one_rank_is_seen_and_its_step_left_out_by_all(
    monkeypatch, tmp_path, capfd, bad_step, layout, field
):
    """The last sample of a step, which rank 0 has not read where data is cut, and whose targets only the last stage
    looks at. Later steps are those of one process."""
    change_batches(monkeypatch, poisoned(8 * bad_step - 1, field))
    alone = trained(run_of("mlp", "", tmp_path / "alone"))
    assert "1 steps changed nothing" in capfd.readouterr().out
    rows = run(trained, 2, run_of("mlp", "", tmp_path / "cut", layout=layout))[0]
    assert "1 steps changed nothing" in capfd.readouterr().out
    for row, other in zip(rows, alone, strict=True):
        assert row == pytest.approx(other, rel=1e-10, nan_ok=True)
        bad = row["step"] == bad_step
        assert math.isnan(row["train/loss"]) == math.isnan(row["train/grad_norm"]) == bad


def given_up(config: Config) -> str:
    with pytest.raises(NotFiniteError) as lost:
        trained(config)
    return str(lost.value)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(1, LayoutConfig()), (2, LayoutConfig(tp=2)), (2, LayoutConfig(pp=2)), (2, LayoutConfig())]
)
def test_ten_skipped_steps_in_a_row_end_the_run_on_all_ranks_and_each_says_so(tmp_path, capfd, ranks, layout):
    config = run_of("mlp", "", tmp_path, layout=layout)
    config = replace(config, steps=40, optim=OptimConfig(lr=1e300, warmup_steps=0))
    said = run(given_up, ranks, config)
    assert len(said) == ranks and len(set(said)) == 1
    assert said[0].startswith("non-finite: steps 2 to 11 changed nothing")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("step ")]
    assert ["skipped" in line for line in lines] == [False] + [True] * 10


def test_a_dynamic_loss_scale_halves_at_overflows_and_grows_after_many_good_steps():
    """An overflow says that the scale was too high, until it is 1: from there on it is counted."""
    scale = LossScale.of("fp16")
    for step in range(1, 17):
        assert scale.value == 2.0 ** (17 - step)
        scale.see(step, math.inf)
    assert scale.value == 1 and scale.in_a_row == 0
    for step in range(GROWTH_STEPS):
        scale.see(17 + step, 1.0)
    assert scale.value == 2
    scale.see(5000, math.nan)
    with pytest.raises(NotFiniteError, match="steps 6000 to 6009 "):
        for step in range(6000, 6010):
            scale.see(step, math.nan)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_other_precisions_are_not_scaled(precision):
    scale = LossScale.of(precision)
    for step in range(1, 2 * GROWTH_STEPS):
        scale.see(step, 1.0)
    assert scale.value == 1 and scale.metrics() == {}


def test_float16_trains_and_its_scale_is_in_the_rows(text, tmp_path):
    """Near float32's losses: 11 bits a number, over four steps. The scale has come down to where nothing overflows."""
    config = replace(run_of("gpt", text, tmp_path / "half"), precision=PrecisionConfig("fp16"))
    rows = trained(config)
    plain = trained(replace(config, precision=PrecisionConfig("fp32"), out_dir=str(tmp_path / "plain")))
    taken = [row for row in rows if math.isfinite(row["train/grad_norm"])]
    assert taken and all(row["train/loss_scale"] >= 1 for row in rows)
    assert rows[0]["train/loss"] == pytest.approx(plain[0]["train/loss"], rel=2e-3)


def test_only_steps_in_a_row_count():
    scale = LossScale()
    for step in range(1, 40):
        scale.see(step, math.nan if step % MOST_SKIPPED_IN_A_ROW else 1.0)
    with pytest.raises(NotFiniteError, match="steps 31 to 40 "):
        scale.see(40, math.inf)


@pytest.mark.parametrize(
    ("override", "code", "says"),
    [
        ("data.paths=[nowhere.txt]", 3, "error: data.paths[0]: nowhere.txt does not exist"),
        ("data.weights=[1,2]", 3, "error: data.weights has 2 values for 1 sources"),
        ("model.vocab_size=100", 3, "error: model.vocab_size=100 is too small for data.paths"),
        ("seq_len=2048 model.max_position_embeddings=4096 data.paths=[short.txt]", 3, "error: data.paths"),
        ("recompute=selective recompute_ops=[soup]", 2, "error: recompute_ops has soup, which is unknown"),
    ],
)
def test_what_only_the_data_or_the_layers_know_is_refused_in_one_line(
    monkeypatch, tmp_path, capfd, override, code, says
):
    (tmp_path / "short.txt").write_bytes(b"a" * 100)
    assert exit_code(monkeypatch, tmp_path, train.main, *override.split()) == code
    err = capfd.readouterr().err
    assert err.startswith(says) and err.count("\n") == 1
    assert not torch.distributed.is_initialized()

"""train.py as a whole: the same rows in every layout, and every end it can come to."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megalite.models.config import GPTConfig, MLPConfig
from megalite.train.check import check
from megalite.train.config import Config, DataConfig, EvalConfig, LayoutConfig, LossConfig, OptimConfig
from megalite.train.launch import World
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


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(np.random.default_rng(0).integers(97, 123, 20_000, dtype=np.uint8).tobytes())
    return str(path)


def run_of(name: str, text: str, out_dir: Path, **changes) -> Config:
    config = replace(CONFIGS[name], precision="fp64", steps=4, out_dir=str(out_dir), eval=EvalConfig(2, 5))
    data = DataConfig([text]) if name == "gpt" else DataConfig()
    return replace(config, data=data, optim=OptimConfig(warmup_steps=2), **changes)


def trained(config: Config) -> list[dict[str, float]]:
    """The rows that train.py leaves behind on this process group, or alone."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    train.main(check(config, size), World(rank, size, "cpu", "gloo", 1, Path(config.out_dir) / "cache"))
    rows = [json.loads(line) for line in (Path(config.out_dir) / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("perf/")} for row in rows]


@pytest.mark.parametrize(
    ("name", "ranks", "layout", "micro_batch_size"),
    [
        ("gpt", 2, LayoutConfig(tp=2), None),
        ("gpt", 4, LayoutConfig(tp=2, sequence_parallel=False), 2),
        ("gpt", 4, LayoutConfig(), 1),
        ("mlp", 2, LayoutConfig(tp=2), 4),
        ("mlp", 2, LayoutConfig(), None),
    ],
)
def test_every_layout_leaves_the_same_rows(text, tmp_path, name, ranks, layout, micro_batch_size):
    alone = trained(run_of(name, text, tmp_path / "alone"))
    cut = run_of(name, text, tmp_path / "cut", layout=layout, micro_batch_size=micro_batch_size)
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


def test_stop_after_ends_a_run_and_changes_none_of_its_steps(text, tmp_path):
    whole = trained(run_of("gpt", text, tmp_path / "whole"))
    part = trained(run_of("gpt", text, tmp_path / "part", stop_after=2))
    assert part == whole[:2]


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

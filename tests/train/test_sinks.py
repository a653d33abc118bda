"""Where rows go, and how two runs in one folder are kept apart."""

from __future__ import annotations

import csv
import json
import math
import sys
import types
from dataclasses import replace

import pytest

from megalite.train.config import Config, LogConfig
from megalite.train.sinks import CSV, TensorBoard, make_fresh, open_fresh, open_sinks, require_extras
from megalite.train.strict import ConfigError

ROWS = {1: {"train/loss": 0.1 + 0.2, "train/lr": 1e-3}, 2: {"train/loss": math.nan, "train/lr": 1.0, "val/loss": 2.5}}


def test_a_file_that_is_there_is_never_overwritten(tmp_path):
    for name in ("metrics.jsonl", "metrics.1.jsonl", "metrics.3.jsonl"):
        (tmp_path / name).write_text(name)
    open_fresh(tmp_path / "metrics.jsonl").close()
    assert (tmp_path / "metrics.1.jsonl").read_text() == "metrics.1.jsonl"
    assert (tmp_path / "metrics.2.jsonl").read_text() == "metrics.jsonl"
    assert (tmp_path / "metrics.3.jsonl").read_text() == "metrics.3.jsonl"
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_an_out_dir_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"out_dir=.*file/run cannot be written \(Not a directory\); take another"):
        open_sinks(replace(Config(), out_dir=str(tmp_path / "file/run")), ["train/loss"])


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    made = [make_fresh(tmp_path / "runs" / "tensorboard").name for _ in range(3)]
    assert made == ["tensorboard", "tensorboard.1", "tensorboard.2"]


def test_a_table_has_a_cell_for_each_column_in_full_precision_and_is_whole_after_each_row(tmp_path):
    table = CSV(tmp_path / "metrics.csv", ["train/loss", "train/lr", "val/loss"])
    table.write(1, ROWS[1])
    table.write(2, ROWS[2])
    with open(tmp_path / "metrics.csv", newline="") as file:  # not closed by its writer yet
        head, *cells = csv.reader(file)
    table.close()
    assert head == ["step", "train/loss", "train/lr", "val/loss"]
    assert cells == [["1", "0.30000000000000004", "0.001", ""], ["2", "", "1.0", "2.5"]]


def test_a_name_without_a_column_is_left_out_with_one_warning(tmp_path):
    table = CSV(tmp_path / "metrics.csv", ["train/loss"])
    with pytest.warns(UserWarning, match="train/lr has no column") as said:
        table.write(1, ROWS[1])
        table.write(2, ROWS[1])
    table.close()
    assert len(said) == 1


def test_rows_and_table_are_always_written_and_agree(tmp_path):
    sinks = open_sinks(replace(Config(), out_dir=str(tmp_path / "run")), ["train/loss", "train/lr", "val/loss"])
    for sink in sinks:
        for step, row in ROWS.items():
            sink.write(step, row)
        sink.close()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    with open(tmp_path / "run/metrics.csv", newline="") as file:
        for line, cells in zip(lines, csv.DictReader(file), strict=True):
            assert {name: float(cell) for name, cell in cells.items() if cell} == {
                name: value for name, value in line.items() if value is not None
            }
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["metrics.csv", "metrics.jsonl"]


def test_tensorboard_gets_every_number_under_its_name(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = TensorBoard(tmp_path / "tensorboard")
    for step, row in ROWS.items():
        board.write(step, row)
    board.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert set(events.Tags()["scalars"]) == {"train/loss", "train/lr", "val/loss"}
    assert [(e.step, e.value) for e in events.Scalars("train/lr")] == [(1, pytest.approx(1e-3)), (2, 1.0)]


@pytest.fixture
def wandb(monkeypatch) -> list:
    """A stand-in for the package, which needs a service: what is called on it, in order."""
    calls: list = []
    run = types.SimpleNamespace(
        log=lambda row, step: calls.append(("log", step, row)), finish=lambda: calls.append("finish")
    )
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.init = lambda **options: calls.append(("init", options)) or run
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_weights_and_biases_gets_the_configuration_and_every_row(tmp_path, wandb):
    out_dir = str(tmp_path / "fast")
    config = replace(Config(), out_dir=out_dir, log=LogConfig(wandb=True, wandb_project="mine"))
    require_extras(config.log)
    *_, sink = open_sinks(config, [])
    sink.write(1, ROWS[1])
    sink.close()
    (_, options), *rest = wandb
    assert options["project"] == "mine" and options["name"] == "fast" and options["dir"] == out_dir
    assert options["config"]["seq_len"] == config.seq_len
    assert rest == [("log", 1, ROWS[1]), "finish"]

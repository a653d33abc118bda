"""What a run says and leaves behind, from the header to the summary."""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megalite.data import Baselines
from megalite.mesh import Layout
from megalite.models.config import MLPConfig
from megalite.train.check import check
from megalite.train.config import Config, EvalConfig, LayoutConfig, LogConfig, load
from megalite.train.launch import World
from megalite.train.log import Log
from megalite.train.strict import ConfigError
from tests.train.test_train import train

TRAIN = {"train/loss": 1 / 3, "train/grad_norm": 2.0**0.5, "train/lr": 1e-3}


class Ranks:
    """As much of a Mesh as a log looks at, without processes."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout


def log_of(out_dir, *, rank: int = 0, ranks: int = 4, **changes) -> Log:
    changes.setdefault("log", LogConfig(display="plain", ranks_every=0))
    layout = LayoutConfig(tp=2 if ranks > 1 else 1)
    config = check(replace(Config(), out_dir=str(out_dir), layout=layout, **changes), ranks)
    world = World(rank, ranks, "cpu", "gloo", 1, Path(out_dir))
    return Log(config, world=world, mesh=Ranks(config.layout.fit(ranks)))


def run_step(log: Log, step: int, **more) -> dict[str, float]:
    log.read(lambda step: time.sleep(0.001), step)
    metrics = TRAIN | log.measured(step) | {name.replace("_", "/", 1): value for name, value in more.items()}
    log.step(step, metrics)
    return metrics


def rows(path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_every_number_to_the_last_bit_and_is_there_before_the_end(tmp_path):
    with log_of(tmp_path, eval=EvalConfig(every=1)) as log:
        metrics = [run_step(log, 1), run_step(log, 2, val_loss=0.1 + 0.2)]
        written = rows(tmp_path / "metrics.jsonl")  # a killed run keeps what it has done
    assert written == [{"step": 1, **metrics[0]}, {"step": 2, **metrics[1]}]


def test_the_log_adds_what_it_counts_and_measures(tmp_path):
    """16 sequences of 128 tokens a step over 4 ranks, from step 3 on twice as many."""
    with log_of(tmp_path, global_batch_size_ramp=[[3, 32]]) as log:
        one, two, three = (run_step(log, step) for step in (1, 2, 3))
    assert [row["train/tokens"] for row in (one, two, three)] == [2048, 4096, 8192]
    assert [row["train/samples"] for row in (one, two, three)] == [16, 32, 64]
    for row, tokens in ((one, 2048), (three, 4096)):
        assert row["perf/tokens_per_sec"] == pytest.approx(tokens / row["perf/step_seconds"])
        assert row["perf/tokens_per_sec_per_rank"] == row["perf/tokens_per_sec"] / 4
        assert 0.001 <= row["perf/data_seconds"] <= row["perf/step_seconds"]
        assert row["perf/wait_seconds"] == 0
        assert row["memory/max_resident_gib"] > 0.05  # torch alone takes more
        assert "perf/mfu" not in row  # on a CPU of unknown peak


def test_mfu_is_there_once_the_peak_is_given(tmp_path):
    cluster = replace(Config().cluster, peak_tflops=0.5)
    with log_of(tmp_path, cluster=cluster) as log:
        row = run_step(log, 1)
    operations = 6 * (492_160 - 256 * 128) + 12 * 2 * 128 * 64
    assert row["perf/mfu"] == pytest.approx(operations * row["perf/tokens_per_sec_per_rank"] / 0.5e12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_is_strict_json_and_the_line_says_that_its_step_was_skipped(tmp_path, capsys, bad):
    with log_of(tmp_path) as log:
        run_step(log, 1, train_loss=bad, train_grad_norm=bad)
        run_step(log, 2)
    written = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(written[0], parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert row["train/loss"] is row["train/grad_norm"] is None and row["train/lr"] == 1e-3
    first, second = capsys.readouterr().out.splitlines()
    assert f"loss {bad}" in first and first.endswith("skipped: its gradient is not finite")
    assert "skipped" not in second


def test_only_rank_0_speaks_and_writes(tmp_path, capsys):
    log = log_of(tmp_path / "run", rank=1)
    log.header(data="", baselines=lambda: pytest.fail("another rank counts what only rank 0 shows"))
    with log:
        run_step(log, 1)
        log.summary(skipped=1)
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""


def test_the_configuration_that_is_saved_can_be_loaded_again(tmp_path):
    with log_of(tmp_path) as log:
        pass
    assert load(OmegaConf.load(tmp_path / "config.yaml")) == log.config


def test_a_second_run_keeps_the_first_ones_rows_apart_even_while_both_write(tmp_path):
    with log_of(tmp_path) as first:
        run_step(first, 1)
        with log_of(tmp_path) as second, log_of(tmp_path) as third:
            run_step(first, 2)
            run_step(second, 7)
            run_step(third, 9)
    for kind in ("jsonl", "csv"):
        assert (tmp_path / f"metrics.2.{kind}").exists()
    assert [row["step"] for row in rows(tmp_path / "metrics.1.jsonl")] == [1, 2]
    assert [row["step"] for row in rows(tmp_path / "metrics.2.jsonl")] == [7]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [9]
    assert (tmp_path / "config.1.yaml").exists() and (tmp_path / "config.2.yaml").exists()


def test_what_a_person_sees(tmp_path, capsys):
    log = log_of(tmp_path, eval=EvalConfig(every=1))
    log.header(data="some text", baselines=lambda: Baselines(3.0, 2.5))
    with log:
        run_step(log, 1, val_loss=2.25)
        log.summary(skipped=0)
    out = capsys.readouterr().out
    assert "dp=2 x cp=1 x tp=2 x pp=1 = 4 ranks, sequence parallel" in out
    assert "16 sequences x 128 = 2,048 tokens a step: 2 data ranks x 1 micro-batches x 8" in out
    assert f"step   1/{log.config.steps}  loss 0.3333  grad_norm 1.414  lr 1.00e-03  " in out
    assert "  mfu n/a  " in out and " tokens/s (" in out and "  eta " in out
    assert "\nvalidation after step 1: loss 2.2500\n" in out
    assert "train loss 0.3333 over the last 1 steps; validation loss 2.2500" in out
    assert out.count("by the token before: 2.5000") == 2


def test_lines_come_every_so_often_and_rows_for_every_step(tmp_path, capsys):
    """And lines for what one wants to see at once: the first and last step, a skipped one."""
    with log_of(tmp_path, steps=10, log=LogConfig(every=4, display="plain", ranks_every=0)) as log:
        for step in range(1, 11):
            run_step(log, step, **({"train_grad_norm": math.nan} if step == 6 else {}))
    shown = [int(line.split("/")[0].split()[1]) for line in capsys.readouterr().out.splitlines()]
    assert shown == [1, 4, 6, 8, 10]
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == list(range(1, 11))


def test_the_time_left_counts_tokens_and_leaves_out_the_odd_slow_step(tmp_path, monkeypatch):
    """Steps of 1 s, one of 100 s (an evaluation, say), 5 to come of which 2 are twice as large."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    with log_of(tmp_path, steps=10, global_batch_size_ramp=[[9, 32]]) as log:
        for step, seconds in enumerate((1, 1, 100, 1, 1), 1):
            now[0] += seconds
            run_step(log, step)
        assert log._seconds_left(5) == pytest.approx(3 * 1 + 2 * 2)


def test_steps_that_changed_nothing_are_told_at_the_end(tmp_path, capsys):
    for skipped in (0, 3):
        with log_of(tmp_path) as log:
            run_step(log, 1)
            log.summary(skipped=skipped)
        assert ("3 steps changed nothing, as their gradient was not finite" in capsys.readouterr().out) == bool(skipped)


@pytest.mark.parametrize(("name", "extra"), [("tensorboard", "tb"), ("wandb", "wandb")])
@pytest.mark.parametrize("rank", [0, 3])
def test_an_extra_that_is_missing_is_refused_by_every_rank_before_anything_is_written(
    tmp_path, monkeypatch, name, extra, rank
):
    found = "megalite.train.sinks.importlib.util.find_spec"
    monkeypatch.setattr(found, lambda wanted: None if wanted == name else object())
    with pytest.raises(ConfigError, match=rf"log.{name}=true .*pip install 'megalite\[{extra}\]'"):
        log_of(tmp_path / "run", rank=rank, log=LogConfig(**{name: True}))
    assert not (tmp_path / "run").exists()


def test_the_header_is_out_before_memory_is_taken(tmp_path, monkeypatch, capsys):
    """So that who asks for too large a model is warned while the machine still answers."""
    monkeypatch.setattr("megalite.train.model.build_zero", lambda *a, **k: pytest.fail(capsys.readouterr().out))
    monkeypatch.setattr("megalite.train.log.available_bytes", lambda *a, **k: 2**20)
    config = check(replace(Config(), model=MLPConfig(), global_batch_size=8, out_dir=str(tmp_path / "run")), 1)
    with pytest.raises(pytest.fail.Exception, match=r"memory .* weights 16 MiB(.|\n)*\nwarning: a rank is expected"):
        train.main(config, World(0, 1, "cpu", "gloo", 1, tmp_path))


ENDLESS = """
import sys, time
from pathlib import Path
from megalite.mesh import Mesh
from megalite.train.check import check
from megalite.train.config import Config, LogConfig
from megalite.train.launch import World
from megalite.train.log import Log
from dataclasses import replace
config = check(replace(Config(), out_dir=sys.argv[1], steps=10**6, log=LogConfig(display="rich")), 1)
with Log(config, world=World(0, 1, "cpu", "gloo", 1, Path(".")), mesh=Mesh.build()) as log:
    for step in range(1, 10**6):
        log.read(lambda step: time.sleep(0.01), step)
        log.step(step, {"train/loss": 1.0, "train/grad_norm": 1.0, "train/lr": 1.0} | log.measured(step))
"""


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_in_the_middle_leaves_a_cursor_and_whole_rows(tmp_path, end):
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while seen.count(b"eta") < 3:
        seen += os.read(ours, 65536)
    process.send_signal(end)
    process.wait(timeout=30)
    try:
        while more := os.read(ours, 65536):
            seen += more
    except OSError:  # how Linux says that the other side of a terminal is closed
        pass
    os.close(ours)
    assert seen.rfind(b"\x1b[?25h") > seen.rfind(b"\x1b[?25l"), "the cursor is hidden"
    assert b"\x1b[?1049h" not in seen, "the terminal is on another screen"
    assert len(rows(tmp_path / "metrics.jsonl")) >= 3
    table = (tmp_path / "metrics.csv").read_text()
    assert table.endswith("\n") and len({line.count(",") for line in table.splitlines()}) == 1

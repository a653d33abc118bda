"""What it costs a step to be measured, shown and written, beside 1% of a step of 50 ms.

    python benchmarks/display.py                       half a minute: 100 steps of each display
    python benchmarks/display.py --step-ms 20          shorter steps: rich redraws in fewer of them

Steps are sleeps, so that rich draws as often as it would in training; what is timed is the log alone: taking times,
drawing on a pseudo-terminal that another process reads, and a row in each file. The first step, which loads what is
needed, is left out. The last line is what an observer adds to a collective.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TextIO

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from megalite.comm import Call, observe
from megalite.comm.observe import seen
from megalite.mesh import Axis, Mesh
from megalite.train.check import check
from megalite.train.config import Config, LogConfig
from megalite.train.launch import World
from megalite.train.log import Log
from megalite.train.meter import Meter

SHARE = 0.01
COLLECTIVES = 10_000


@contextlib.contextmanager
def terminal() -> Iterator[TextIO]:
    """A terminal to write on, that `cat` reads as fast as it comes."""
    ours, theirs = os.openpty()
    reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    os.close(ours)
    try:
        with open(theirs, "w", encoding="utf-8") as file:
            yield file
    finally:
        reader.kill()
        reader.wait()


def log_seconds(config: Config, *, step_seconds: float) -> list[float]:
    """What the log took of each step but the first."""
    world = World(0, 1, "cpu", "gloo", 1, Path())
    taken = []
    with Log(config, world=world, mesh=Mesh.build()) as log:
        for step in range(1, config.steps + 1):
            began = time.perf_counter()
            log.read(lambda step: None, step)
            read = time.perf_counter()
            time.sleep(step_seconds)
            worked = time.perf_counter()
            metrics = {"train/loss": 2.5, "train/grad_norm": 1.0, "train/lr": 1e-3} | log.measured(step)
            log.step(step, metrics)
            taken.append(read - began + time.perf_counter() - worked)
    return taken[1:]


def observer_seconds() -> float:
    """A collective's two calls of a meter, with nothing between."""
    call = Call("all_reduce", Axis("tp"), 0)
    with observe(Meter(device="cpu")):
        began = time.perf_counter()
        for _ in range(COLLECTIVES):
            with seen(call, "waiting", "waited"):
                pass
        return (time.perf_counter() - began) / COLLECTIVES


def main() -> None:
    parser = argparse.ArgumentParser(description="What display and files cost a step.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--step-ms", type=float, default=50.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    limit = SHARE * options.step_ms
    rows = []
    for display in ("plain", "rich"):
        with tempfile.TemporaryDirectory() as folder:
            log = LogConfig(display=display)
            config = check(replace(Config(), steps=options.steps + 1, out_dir=folder, log=log), 1)
            with terminal() as file, contextlib.redirect_stdout(file):
                taken = [1000 * seconds for seconds in log_seconds(config, step_seconds=options.step_ms / 1000)]
        mean = statistics.fmean(taken)
        figures = (mean, statistics.median(taken), max(taken), limit)
        rows.append((display, *(f"{figure:.3f}" for figure in figures), f"{mean / limit:.2f}"))
    print(harness.table(("display", "mean ms", "median ms", "most ms", f"{SHARE:.0%} of a step", "mean / this"), rows))
    print(f"an observed collective: {observer_seconds() * 1e6:.1f} us more")


if __name__ == "__main__":
    main()

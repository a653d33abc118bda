"""Where rows of metrics go: metrics.jsonl and metrics.csv always, TensorBoard and Weights & Biases when asked for.

A run never mixes its rows with another's: files that are already there are renamed, metrics.jsonl to metrics.1.jsonl
(the next free number); a run that still writes to one goes on writing there. Each row is handed to the operating system
before the next step begins, so a run that is killed keeps the rows of all its finished steps, readable.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, TextIO

from megalite.train.config import Config, LogConfig
from megalite.train.strict import ConfigError

EXTRAS = {"tensorboard": "tb", "wandb": "wandb"}
"""Key under `log`, which is also the package it needs -> the extra of ours that brings it."""


class Sink(Protocol):
    """Takes rows until it is closed."""

    def write(self, step: int, row: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def require_extras(config: LogConfig) -> None:
    """Raises ConfigError for a sink that is asked for and whose package is not installed. Every rank asks, so that all
    come to the same verdict before they wait for each other."""
    for name, extra in EXTRAS.items():
        if getattr(config, name) and importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.{name}=true needs the package {name}, which is not installed: pip install 'megalite[{extra}]', "
                f"or take log.{name}=false"
            )


def open_sinks(config: Config, names: Sequence[str]) -> list[Sink]:
    """All that the configuration asks for, in its out_dir. names: those that a row can have.

    Raises ConfigError for an out_dir that cannot be written.
    """
    folder = Path(config.out_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sinks: list[Sink] = [JSONLines(folder / "metrics.jsonl"), CSV(folder / "metrics.csv", names)]
    except OSError as error:
        raise ConfigError(
            f"out_dir={folder} cannot be written ({error.strerror or error}); take another folder"
        ) from error
    if config.log.tensorboard:
        sinks.append(TensorBoard(folder / "tensorboard"))
    if config.log.wandb:
        sinks.append(WeightsAndBiases(config))
    return sinks


class JSONLines:
    """One JSON object a row: `step`, then the metrics in full precision; null for what is not finite."""

    def __init__(self, path: Path) -> None:
        self.file = open_fresh(path)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        finite = {name: value if math.isfinite(value) else None for name, value in row.items()}
        self.file.write(json.dumps({"step": step, **finite}, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class CSV:
    """The same as a table, RFC 4180's: the columns are fixed by the first line, and a cell may be empty.

    Empty is what the step did not measure, and what is not finite. A name without a column is left out, with a warning
    the first time.
    """

    def __init__(self, path: Path, names: Sequence[str]) -> None:
        self.names, self.missing = list(names), set[str]()
        self.file = open_fresh(path, newline="")
        self.writer = csv.writer(self.file)
        self.writer.writerow(["step", *self.names])
        self.file.flush()

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name in row.keys() - self.names - self.missing:
            self.missing.add(name)
            warnings.warn(f"{name} has no column in metrics.csv; megalite/train/metrics.py names them", stacklevel=2)
        cells = (row.get(name, math.nan) for name in self.names)
        self.writer.writerow([step, *(repr(cell) if math.isfinite(cell) else "" for cell in cells)])
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """Event files in a folder of their own for each run, out_dir/tensorboard, or tensorboard.1 where that is there."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter  # here: an extra

        self.writer = SummaryWriter(str(make_fresh(folder)))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """One run of log.wandb_project, named after out_dir, with the whole configuration."""

    def __init__(self, config: Config) -> None:
        import wandb  # here: an extra

        self.run: Any = wandb.init(
            project=config.log.wandb_project,
            name=Path(config.out_dir).name,
            dir=config.out_dir,
            config=asdict(config),
        )

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self.run.log(dict(row), step=step)

    def close(self) -> None:
        self.run.finish()


def open_fresh(path: Path, **options: Any) -> TextIO:
    """`path` as a new file. One that is there gets the next free number before its suffix; nothing is overwritten."""
    number = 1
    while True:
        try:
            return open(path, "x", encoding="utf-8", **options)
        except FileExistsError:
            old = path.with_name(f"{path.stem}.{number}{path.suffix}")
            number += 1
        try:
            # The number is ours from here on: another run that starts here at the same time takes the next.
            open(old, "x").close()
            os.replace(path, old)
        except FileExistsError:
            continue
        except FileNotFoundError:  # another run has just moved it
            old.unlink()


def make_fresh(folder: Path) -> Path:
    """`folder` or, where that exists, folder.1, folder.2, ...: made here, so that no other run has it."""
    number, made = 0, folder
    while True:
        try:
            made.mkdir(parents=True)
            return made
        except FileExistsError:
            number += 1
            made = folder.with_name(f"{folder.name}.{number}")

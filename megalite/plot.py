"""`python -m megalite.plot FOLDER ...`: draws what runs have measured, one or several over one another, as PNGs.

    python -m megalite.plot runs/a runs/b --out plots --x tokens

Reads metrics.jsonl of each folder, also of a run that still writes it. Draws loss.png, norm.png, lr.png,
throughput.png, memory.png, each if there is anything in it, and overview.png with all of them: raw values faint,
smoothed ones on top, validation as points, the same colour for the same run. Exit code 2, and one line, for a folder
without rows or where matplotlib (extra plot) is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

REFUSED_CODE = 2
SMOOTHED_SHARE = 20
"""Smoothing has a memory of 1/20 of the run, so that it looks alike for short and long ones."""

Row = dict[str, float | None]


class Group(NamedTuple):
    """One picture. lines: metrics drawn as curves, the first of them that a run has; points: as points over it."""

    name: str
    title: str
    lines: tuple[str, ...]
    points: tuple[str, ...] = ()
    logarithmic: bool = False
    noisy: bool = True  # what is not gets no smoothed curve, which would only lag behind


GROUPS = (
    Group("loss", "loss (nats a token); points: validation", ("train/loss",), ("val/loss",)),
    Group("norm", "gradient norm", ("train/grad_norm",), logarithmic=True),
    Group("lr", "learning rate", ("train/lr",), noisy=False),
    Group("throughput", "tokens per second, all ranks", ("perf/tokens_per_sec",)),
    Group(
        "memory",
        "memory (GiB), at most so far",
        ("memory/max_allocated_gib", "memory/max_resident_gib"),
        noisy=False,
    ),
)
X_AXES = {"step": "step", "tokens": "train/tokens"}


class PlotError(Exception):
    """What cannot be drawn; one line."""


@dataclass(frozen=True)
class Run:
    """One folder's rows, under the name by which the legend tells it from the others."""

    name: str
    rows: Sequence[Row]

    def curve(self, metric: str, x: str) -> tuple[list[float], list[float]]:
        """x and y of the rows that have both; what is not finite is left out."""
        pairs = [(row.get(x), row.get(metric)) for row in self.rows]
        found = [(across, up) for across, up in pairs if across is not None and up is not None]
        return [across for across, _ in found], [up for _, up in found]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; gives the exit code."""
    parser = argparse.ArgumentParser(prog="python -m megalite.plot", description="Draws runs over one another.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="out_dir of a run")
    parser.add_argument("--out", type=Path, help="where the PNGs go; default: plots in the first folder")
    parser.add_argument("--x", choices=list(X_AXES), default="step", help="what runs to the right; default: step")
    options = parser.parse_args(arguments)
    try:
        runs = read_runs(options.folders)
        for path in draw(runs, out=options.out or options.folders[0] / "plots", x=options.x):
            print(path)
    except PlotError as error:
        print(f"error: {error}", file=sys.stderr)
        return REFUSED_CODE
    return 0


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders. Raises PlotError for a folder that is not there or has no rows."""
    names = distinct_names(folders)
    return [Run(name, read_rows(folder)) for name, folder in zip(names, folders, strict=True)]


def read_rows(folder: Path) -> list[Row]:
    """All whole rows of a folder's metrics.jsonl; a last line that is still being written is left out."""
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise PlotError(f"{folder} is no folder; give the out_dir of a run")
    if not path.is_file():
        raise PlotError(f"{folder} has no metrics.jsonl; give the out_dir of a run")
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows: list[Row] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline after it
                break
            raise PlotError(f"{path}: line {number} is no row of metrics ({error})") from error
        if not isinstance(row, dict):
            raise PlotError(f"{path}: line {number} is no row of metrics")
        rows.append(row)
    if not rows:
        raise PlotError(f"{path} has no rows yet; wait for the first step")
    return rows


def distinct_names(folders: Sequence[Path]) -> list[str]:
    """For each folder the shortest end of its path that no other has: runs/a/x and runs/b/x are a/x and b/x."""
    parts = [PurePath(folder.resolve()).parts for folder in folders]
    names = []
    for mine in parts:
        ends = (mine[-length:] for length in range(1, len(mine) + 1))
        name = next((end for end in ends if sum(other[-len(end) :] == end for other in parts) == 1), mine)
        names.append("/".join(name).replace("//", "/"))
    return names


def smoothed(values: Sequence[float]) -> list[float]:
    """An exponential moving average without the pull of a start at zero: weights 1, d, d^2, ... from the last back."""
    keep = 1 - SMOOTHED_SHARE / max(len(values), SMOOTHED_SHARE + 1)
    total = weight = 0.0
    smooth = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        smooth.append(total / weight)
    return smooth


def draw(runs: Sequence[Run], *, out: Path, x: str) -> Iterator[Path]:
    """Writes the pictures, and gives each one's path. x: a key of X_AXES. Raises PlotError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("matplotlib is not installed: pip install 'megalite[plot]'") from error
    matplotlib.use("Agg")  # files alone, also where there is no screen
    import matplotlib.pyplot as plt

    groups = [group for group in GROUPS if any(_has(run, group, X_AXES[x]) for run in runs)]
    if not groups:
        raise PlotError(f"none of the runs has a metric over {X_AXES[x]}; take --x step")
    out.mkdir(parents=True, exist_ok=True)
    for group in groups:
        figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
        _draw_group(axes, group, runs, x)
        yield _save(plt, figure, out / f"{group.name}.png")
    rows = -(-len(groups) // 2)
    figure, table = plt.subplots(rows, 2, figsize=(14, 4.2 * rows), layout="constrained", squeeze=False)
    for axes in table.flat[len(groups) :]:
        axes.set_visible(False)
    for axes, group in zip(table.flat, groups, strict=False):
        _draw_group(axes, group, runs, x)
    yield _save(plt, figure, out / "overview.png")


def _has(run: Run, group: Group, x: str) -> bool:
    return any(run.curve(metric, x)[0] for metric in group.lines)


def _draw_group(axes: Any, group: Group, runs: Sequence[Run], x: str) -> None:
    several = len(runs) > 1
    for number, run in enumerate(runs):
        colour = f"C{number % 10}"
        curves = [curve for metric in group.lines if (curve := run.curve(metric, X_AXES[x]))[0]]
        if curves:
            across, up = curves[0]
            if group.noisy:
                axes.plot(across, up, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(across, smoothed(up) if group.noisy else up, color=colour, linewidth=1.6, label=run.name)
        for metric in group.points:
            across, up = run.curve(metric, X_AXES[x])
            axes.plot(across, up, "o", color=colour, markersize=4, markeredgecolor="black", markeredgewidth=0.5)
    if group.logarithmic and all(value > 0 for line in axes.get_lines() for value in line.get_ydata()):
        axes.set_yscale("log")
    axes.set_title(group.title, fontsize=10)
    axes.set_xlabel(x)
    axes.grid(alpha=0.3)
    if several or group is GROUPS[0]:
        axes.legend(fontsize=8)


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path


if __name__ == "__main__":
    sys.exit(main())

"""A `Timeline` as a picture (extra `plot`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt

from megalite.train.memory_timeline import KINDS, Timeline

COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8c8c8c", "#ccb974")
MOST_POINTS = 4000  # along the picture, several for each pixel
MOST_NAMES = 24  # actions that are named; more would be written over each other
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}


def draw(timeline: Timeline, path: Path) -> None:
    """The kinds stacked over time, with steps and actions, and the peak told."""
    from matplotlib.figure import Figure

    peak = timeline.peak()
    unit = next(name for name, size in UNITS.items() if peak["total"] >= size or size == 1)
    rows = shown_rows(timeline.bytes.sum(axis=1))
    milliseconds = timeline.microseconds[rows] / 1e3
    figure = Figure(figsize=(14, 6), layout="constrained")
    axes = figure.subplots()
    levels = timeline.bytes[rows].T / UNITS[unit]
    labels = [f"{kind}: {peak['bytes'][kind] / UNITS[unit]:,.1f} {unit} at the peak" for kind in KINDS]
    axes.stackplot(milliseconds, levels, labels=labels, colors=COLOURS, step="post")
    top = peak["total"] / UNITS[unit]
    axes.set_ylim(0, top * 1.15)
    actions = [one for one in timeline.ranges if not one[0].startswith("step ")]
    for name, start, end in timeline.ranges:
        if name.startswith("step "):
            axes.axvline(start / 1e3, color="black", linewidth=1)
            axes.text(start / 1e3, top * 1.11, f" {name}", fontsize=9)
            continue
        axes.axvspan(start / 1e3, end / 1e3, color="black", alpha=0.04 if name.startswith("F") else 0.10, linewidth=0)
        if len(actions) <= MOST_NAMES:
            axes.text((start + end) / 2e3, top * 1.05, name, fontsize=8, ha="center")
    where = ", ".join(peak["in"]) or "between the steps"
    axes.axhline(top, color="black", linewidth=0.8, linestyle="--")
    axes.set_title(f"{timeline.device}: peak {top:,.1f} {unit} in {where}")
    axes.set_xlabel("milliseconds since the recording began")
    axes.set_ylabel(unit)
    axes.margins(x=0)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=3, reverse=True)
    figure.savefig(path, dpi=120)


def shown_rows(totals: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Which rows are drawn: all, or of each run of neighbours the highest, so that no peak is lost; the ends always."""
    size = -(-len(totals) // MOST_POINTS)
    starts = np.arange(0, len(totals), size)
    highest = [start + int(totals[start : start + size].argmax()) for start in starts]
    return np.unique(np.array([0, *highest, len(totals) - 1], dtype=np.int64))

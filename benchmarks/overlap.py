"""What each stage of ZeRO hides of its communication: layers that sleep, over a link that sleeps; with drawings.

    python benchmarks/overlap.py                                   all stages, computing longer than sending
    python benchmarks/overlap.py --gather-ms 60 --png overlap      sending longer; pictures overlap-0.png to -3.png

Neither a layer nor the link takes a processor, so a step takes what its schedule makes of it, on any machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from tests.ranks import run
from tests.zero.sleeping import Job, Slept, sleep_through

HEADER = ("ms", "all hidden", "ratio", "overlap off: ms", "the sum", "ratio")
LEGEND = """all hidden: max(forward, its gathers) + max(backward, its gathers and reductions), and what cannot hide: the
first gather of a step (stages 1 to 3) and the last reduction; at stage 3 of every micro-batch
gathers, reductions: from when their bytes have the wire until they are there; waits: the rank stands still"""


def report(jobs: Sequence[Job], *, steps: int, drawn: bool, png: str | None = None) -> str:
    rows, drawings = [], []
    for job in jobs:
        slept = {overlap: _slept(job, steps=steps, overlap=overlap) for overlap in (True, False)}
        seconds = {overlap: _fastest(ranks) for overlap, ranks in slept.items()}
        hidden = job.hidden_seconds + job.exposed_seconds
        cells = (seconds[True], hidden, seconds[False], job.sum_seconds)
        on, all_hidden, off, total = (f"{1000 * cell:.0f}" for cell in cells)
        ratios = f"{seconds[True] / hidden:.2f}", f"{seconds[False] / job.sum_seconds:.2f}"
        rows.append((f"stage {job.stage}", on, all_hidden, ratios[0], off, total, ratios[1]))
        timeline = slept[True][0].timeline
        drawings.append(f"stage {job.stage}\n{timeline.text()}")
        if png is not None:
            timeline.draw(Path(f"{png}-{job.stage}.png"), title=f"ZeRO stage {job.stage}: a step of rank 0")
    text = harness.table((f"{jobs[0].ranks} ranks", *HEADER), rows) + "\n" + LEGEND
    return "\n\n".join([text, *(drawings if drawn else [])])


def _slept(job: Job, *, steps: int, overlap: bool) -> list[Slept]:
    return run(partial(sleep_through, job, steps=steps, overlap=overlap), job.ranks, checked=False)


def _fastest(ranks: Sequence[Slept]) -> float:
    """Of the steps, each as its slowest rank saw it."""
    return min(max(seconds) for seconds in zip(*(one.seconds for one in ranks), strict=True))


def main(arguments: Sequence[str] | None = None) -> None:
    default = Job(0)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--stages", nargs="+", type=int, default=(0, 1, 2, 3))
    parser.add_argument("--ranks", type=int, default=default.ranks)
    parser.add_argument("--layers", type=int, default=default.layers)
    parser.add_argument("--microbatches", type=int, default=default.microbatches)
    parser.add_argument("--prefetch", type=int, default=default.prefetch)
    for name in ("forward", "backward", "gather", "latency"):
        milliseconds = 1000 * getattr(default, f"{name}_seconds")
        parser.add_argument(
            f"--{name}-ms", type=float, default=milliseconds, help=f"of a layer; default {milliseconds:g}"
        )
    parser.add_argument("--steps", type=int, default=3, help="timed; the fastest counts")
    parser.add_argument("--png", metavar="NAME", help="draw NAME-<stage>.png as well; needs matplotlib")
    options = vars(parser.parse_args(arguments))
    torch.set_num_threads(1)
    steps, png, stages = (options.pop(name) for name in ("steps", "png", "stages"))
    of_time = {f"{name[:-3]}_seconds": options.pop(name) / 1000 for name in list(options) if name.endswith("_ms")}
    job = replace(default, **options, **of_time)
    print(report([replace(job, stage=stage) for stage in stages], steps=steps, drawn=True, png=png))


if __name__ == "__main__":
    main()

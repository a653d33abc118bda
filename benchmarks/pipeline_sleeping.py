"""What every pipeline schedule makes of its time: stages that sleep their costs, beside what the simulator says.

    python benchmarks/pipeline_sleeping.py                                        all schedules, 4 ranks: 7 minutes
    python benchmarks/pipeline_sleeping.py --schedules 1f1b zb_v --repeats 1      two of them, quickly

Stages of a rank's share of a model cannot be timed by real work where ranks share processors; sleeping takes none. The
simulator is fed with how long each action took here, so that the ratio is what the executor adds: taking, sending and
waiting for messages, and Python.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from benchmarks import harness
from megalite.pipeline.catalogue import SCHEDULES
from megalite.pipeline.simulate import Timeline, simulate
from tests.pipeline.sleeping import Job, Slept, slept

AT_MOST = 1.05
"""Measured over simulated makespan, of durations as they were measured."""

HEADER = (
    *("makespan s", "simulated", "ratio", "nominal", "ratio"),
    *("bubble", "nominal", "idle span s", "nominal", "/ work", "nominal"),
)
LEGEND = """makespan: from the first begin of any action to the last end of any; of {repeats} steps that of median ratio
simulated: with each action as long as it took, at most {at_most} for the ratio; nominal: as long as it should take
bubble: idle part of all ranks' time; idle span: of the rank with most, within its own first begin and last end
/ work: makespan over what one rank sleeps: equal work takes so much time"""


class Row(NamedTuple):
    """Of one schedule. slept: the step of the median ratio; nominal: the simulator's, of the costs that were meant."""

    job: Job
    slept: Slept
    nominal: Timeline

    def cells(self) -> tuple[str, ...]:
        measured, simulated, nominal = self.slept.measured, self.slept.simulated, self.nominal
        return (
            self.job.name,
            f"{measured.makespan:.3f}",
            f"{simulated.makespan:.3f}",
            f"{self.slept.ratio:.3f}",
            f"{nominal.makespan:.3f}",
            f"{measured.makespan / nominal.makespan:.3f}",
            *(f"{one.bubble:.3f}" for one in (measured, nominal)),
            *(f"{one.idle_span:.3f}" for one in (measured, nominal)),
            *(f"{self.per_work(one):.3f}" for one in (measured, nominal)),
        )

    def per_work(self, timeline: Timeline) -> float:
        return float(timeline.makespan / self.job.work_seconds)


def measure(job: Job, repeats: int) -> Row:
    steps = slept(job, steps=repeats)
    return Row(job, steps[len(steps) // 2], simulate(job.schedule(), job.costs))


def report(jobs: Sequence[Job], repeats: int) -> str:
    rows = {}
    for job in jobs:
        rows[job.name] = measure(job, repeats)
        print(f"  {job.name}: {rows[job.name].slept.ratio:.3f}", file=sys.stderr, flush=True)
    ranks, microbatches = jobs[0].ranks, jobs[0].microbatches
    text = harness.table((f"{ranks} ranks, m {microbatches}", *HEADER), [row.cells() for row in rows.values()])
    worst = max(rows.values(), key=lambda row: row.slept.ratio)
    lines = [text, f"worst ratio to simulated: {worst.slept.ratio:.3f} ({worst.job.name}), at most {AT_MOST}"]
    return "\n".join([*lines, *against_1f1b(rows)])


def against_1f1b(rows: Mapping[str, Row]) -> list[str]:
    """What equal work takes under 1f1b over what it takes under zb_v."""
    if not {"1f1b", "zb_v"} <= set(rows):
        return []
    slow, fast = rows["1f1b"], rows["zb_v"]
    measured = slow.per_work(slow.slept.measured) / fast.per_work(fast.slept.measured)
    says = slow.per_work(slow.nominal) / fast.per_work(fast.nominal)
    return [f"zb_v is {measured:.2f} times as fast as 1f1b; the simulator says {says:.2f}"]


def main(arguments: Sequence[str] | None = None) -> None:
    default = Job("1f1b")
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[8, 16], help="a table each")
    parser.add_argument("--ranks", type=int, default=default.ranks)
    parser.add_argument("--repeats", type=int, default=3, help="steps; the one of median ratio is shown")
    for kind in ("forward", "input-gradient", "weight-gradient"):
        seconds = getattr(default, f"{kind.replace('-', '_')}_seconds")
        parser.add_argument(f"--{kind}-ms", type=float, default=1000 * seconds, help=f"default {1000 * seconds:g}")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sleeps = [getattr(options, f"{kind}_ms") / 1000 for kind in ("forward", "input_gradient", "weight_gradient")]
    for microbatches in options.microbatches:
        jobs = [Job(name, options.ranks, microbatches, *sleeps) for name in options.schedules]
        print(report(jobs, options.repeats) + "\n", flush=True)
    print(LEGEND.format(repeats=options.repeats, at_most=AT_MOST))


if __name__ == "__main__":
    main()

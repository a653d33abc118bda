"""Stage 0 against DistributedDataParallel: steps per second and memory; and how long a run takes to begin.

    python benchmarks/train.py                      all parts: dp 2, dp 4, memory, start
    python benchmarks/train.py --parts start        one of them

One `GPT`, the same class on both sides, trained with clipping and fused AdamW: once by `Zero(stage=0)`, once inside
torch's DDP, plain and with `gradient_as_bucket_view`, which spares it one copy of the gradients. Ranks are forked here,
one thread each. Memory is what torch's allocator had handed out at its highest, from the building of the model through
the steps, on the rank that had most: the profiler sees every allocation, also those of DDP's own buckets in C++.
"""

from __future__ import annotations

import argparse
import bisect
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from benchmarks import harness
from benchmarks.harness import Side
from benchmarks.work import Work, add_work, work_of
from megalite.mesh import Layout, Mesh
from megalite.models.gpt import GPT, Block
from megalite.spec import init_parameters, param_specs
from megalite.train.memory_timeline import Change, Range, read_tree
from megalite.train.recorder import Recorder
from megalite.zero import Zero
from tests.ranks import run

ROOT = Path(__file__).parents[1]
SEED, MAX_NORM, LEARNING_RATE, WEIGHT_DECAY = 0, 1.0, 1e-3, 0.1
PARTS = ("speed", "memory", "start")


class Training(NamedTuple):
    """A model in training: `step()` makes one update and returns the gradient's norm before clipping."""

    model: nn.Module
    step: Callable[[], Tensor]


def adamw(groups: Sequence[dict]) -> torch.optim.Optimizer:
    """Fused, on groups {"params", "decay"}: the same on all sides."""
    rows = [{"params": g["params"], "weight_decay": WEIGHT_DECAY if g["decay"] else 0.0} for g in groups]
    return torch.optim.AdamW(rows, lr=LEARNING_RATE, fused=True)


def ours(work: Work) -> Training:
    """This rank's part of the batch under `Zero`, stage 0."""
    mesh = Mesh.build(Layout(dp=dist.get_world_size()))
    model = GPT(work.config, mesh=mesh, device="meta")
    zero = Zero(model, mesh, stage=0, units=(Block,), optimizer=adamw, seed=SEED)
    microbatch = work.part(mesh.dp)

    def step() -> Tensor:
        zero.begin(microbatches=1)
        (model(None, microbatch) / work.tokens).backward()
        return zero.step(max_norm=MAX_NORM)

    return Training(model, step)


def ddp(work: Work, *, bucket_views: bool) -> Training:
    """The same under DistributedDataParallel, which averages where we sum: hence the loss over this rank's tokens."""
    mesh = Mesh.build(Layout(dp=dist.get_world_size()))
    model = GPT(work.config, mesh=mesh)
    init_parameters(model, SEED)
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=bucket_views)
    specs = param_specs(model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if specs[name].decay is decay], "decay": decay}
        for decay in (True, False)
    ]
    optimizer = adamw(groups)
    microbatch = work.part(mesh.dp)

    def step() -> Tensor:
        optimizer.zero_grad()
        (wrapped(None, microbatch) / microbatch.valid()).backward()
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return norm

    return Training(model, step)


SIDES: dict[str, Callable[[Work], Training]] = {
    "ours": ours,
    "DDP": partial(ddp, bucket_views=False),
    "DDP, bucket views": partial(ddp, bucket_views=True),
}


class Speed(NamedTuple):
    """times: of each side. differences: of weights after the same steps, relative to the largest."""

    times: dict[str, harness.Times]
    differences: dict[str, float]


def speed(work: Work, pairs: int) -> Speed:
    """Runs on every rank: all sides in turn."""
    world = Mesh.build(Layout(dp=dist.get_world_size())).world
    trained = {name: make(work) for name, make in SIDES.items()}
    sides = {name: Side(training.step, world.size) for name, training in trained.items()}
    times = harness.in_turn(sides, world=world, rounds=pairs)
    reference = list(trained["ours"].model.parameters())
    differences = {}
    for name, training in trained.items():
        both = zip(training.model.parameters(), reference, strict=True)
        differences[name] = max(((a - b).abs().max() / b.abs().max()).item() for a, b in both)
    return Speed(times, differences)


class Memory(NamedTuple):
    """Bytes: the most that torch's allocator had handed out at once, and the growth of the process's resident set."""

    live: int
    resident: int


def live(work: Work, name: str, steps: int) -> int:
    """Runs on every rank, in a process of its own."""

    def train() -> None:
        training = SIDES[name](work)
        for _ in range(steps):
            training.step()

    return peak_live_bytes(train)


def peak_live_bytes(fn: Callable[[], None]) -> int:
    """The most that torch's CPU allocator has handed out at once while `fn` runs, of what it hands out from then on."""
    changes, _ = _recorded(fn, names=set())
    return max((held for _, held in live_bytes(changes)), default=0)


def peaks_within(fn: Callable[[], None], name: str) -> list[int]:
    """The same for each range of this name (`record_function`), in order."""
    changes, ranges = _recorded(fn, names={name})
    levels = live_bytes(changes)
    return [max(held for time, held in levels if one.start_ns <= time <= one.end_ns) for one in ranges]


def _recorded(fn: Callable[[], None], *, names: set[str]) -> tuple[list[Change], list[Range]]:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with Recorder(activities=activities, profile_memory=True) as profiled:
        fn()
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    tree = profiled.profiler.kineto_results.experimental_event_tree()
    return read_tree(tree, device=torch.device("cpu"), names=names)


def live_bytes(changes: Sequence[Change]) -> list[tuple[int, int]]:
    """(time, bytes that are held from then on) at each change.

    Of memory whose last owner was a thread of Gloo the profiler does not see the end. It has ended where other memory
    is handed out in its place; until then it counts.
    """
    levels, total = [], 0
    starts: list[int] = []  # of what is held, ascending
    sizes: dict[int, int] = {}
    for change in changes:
        first = bisect.bisect_left(starts, change.place)
        if first and starts[first - 1] + sizes[starts[first - 1]] > change.place:
            first -= 1
        last = first
        while last < len(starts) and starts[last] < change.place + abs(change.nbytes):
            total -= sizes.pop(starts[last])
            last += 1
        starts[first:last] = [change.place] if change.nbytes > 0 else []
        if change.nbytes > 0:
            sizes[change.place] = change.nbytes
            total += change.nbytes
        levels.append((change.time_ns, total))
    return levels


def resident(work: Work, name: str, steps: int) -> int:
    """Runs on every rank, in a process of its own: the highest resident set, less what it is before the model."""
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins here
    before = _status("VmRSS")
    training = SIDES[name](work)
    for _ in range(steps):
        training.step()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def report_speed(work: Work, pairs: int) -> str:
    tables = []
    for dp in (2, 4):
        found = run(speed, dp, work, pairs, checked=False, timeout=600)[0]
        rows = []
        for name, times in found.times.items():
            rows.append(
                (
                    name,
                    f"{work.tokens / statistics.median(times.seconds):.0f}",
                    *harness.milliseconds(times),
                    str(harness.ratio(times.seconds, found.times["ours"].seconds)),
                    f"{found.differences[name]:.1e}",
                )
            )
        tables.append(
            harness.table((f"dp {dp}", "tokens/s", *harness.MILLISECONDS, "ours / this", "weights differ by"), rows)
        )
    legend = f"ours / this: tokens per second, medians of {pairs} rounds in turn (quartiles)\n"
    legend += "best: the fastest round; CPU: of all ranks together"
    return "\n\n".join(tables) + "\n" + legend


def report_memory(work: Work, steps: int = 3) -> str:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own to stderr
    tables = []
    for dp in (2, 4):
        measured = {}
        for name in SIDES:
            of_live = run(live, dp, work, name, steps, checked=False, timeout=300)
            of_resident = run(resident, dp, work, name, steps, checked=False, timeout=300)
            measured[name] = Memory(max(of_live), max(of_resident))
        ours = measured["ours"]
        rows = [
            (name, f"{m.live / 1e6:.1f}", f"{ours.live / m.live:.2f}", f"{m.resident / 1e6:.0f}",
             f"{ours.resident / m.resident:.2f}")
            for name, m in measured.items()
        ]  # fmt: skip
        header = (f"memory, dp {dp}", "live MB", "ours / this", "resident MB", "ours / this")
        tables.append(harness.table(header, rows))
    legend = "the rank that has most; live: tensors' storages at their highest; resident: growth of the process"
    return "\n\n".join(tables) + "\n" + legend


def report_start() -> str:
    """Seconds from the command to its help, and to the first row of metrics.jsonl, as a user would wait for them."""
    rows = [
        ("python train.py --help", f"{statistics.median(_seconds(['train.py', '--help']) for _ in range(3)):.2f}", "1")
    ]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", "train.py", "layout.tp=2"]
    for command in (["train.py"], torchrun):
        shown = " ".join(command).replace("-m torch.distributed.run", "torchrun")
        rows.append((f"first step: {shown}", f"{_seconds_to_first_step(command):.1f}", "15"))
    return harness.table(("start", "seconds", "at most"), rows)


def _seconds(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env=_one_thread())
    return time.perf_counter() - start


def _seconds_to_first_step(command: Sequence[str]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder, "run", "metrics.jsonl")
        full = [sys.executable, *command, "stop_after=1", f"out_dir={rows.parent}"]
        start = time.perf_counter()
        with subprocess.Popen(full, cwd=ROOT, stdout=subprocess.DEVNULL, env=_one_thread()) as process:
            while process.poll() is None and not (rows.exists() and rows.stat().st_size):
                time.sleep(0.01)
            seconds = time.perf_counter() - start
            process.wait(timeout=60)
        if process.returncode:
            raise SystemExit(f"{' '.join(full)} ended with exit code {process.returncode}")
    return seconds


def _one_thread() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add_work(parser)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--pairs", type=int, default=7, help="timed rounds; each runs every side once")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = work_of(options)
    print(f"{work}, one thread a rank", flush=True)
    reports = {
        "speed": lambda: report_speed(work, options.pairs),
        "memory": lambda: report_memory(work),
        "start": report_start,
    }
    for part in options.parts:
        print("\n" + reports[part](), flush=True)


if __name__ == "__main__":
    main()

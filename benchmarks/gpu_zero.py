"""What only a GPU can show of ZeRO: every stage on CUDA's streams, memory that is given back, time of a step.

Two ranks on Gloo share the device, since two need a device each on NCCL. Losses and norms of a few steps are compared
with stage 0's; memory is what torch's allocator says of the first rank.
"""

from __future__ import annotations

import statistics
import time
from typing import NamedTuple

import torch

from benchmarks import harness
from benchmarks.work import Work
from megalite.comm import start_all_reduce
from megalite.mesh import Layout, Mesh
from megalite.models.gpt import GPT, Block
from megalite.train.config import OptimConfig
from megalite.train.optim import optimizer
from megalite.zero import Zero

SEED = 0
STAGES = (0, 1, 2, 3)
WARM_UP = 3


class Trained(NamedTuple):
    """Of one stage: losses and norms by step, median seconds of a step, bytes between steps and at most."""

    losses: list[float]
    norms: list[float]
    seconds: float
    held_bytes: int
    peak_bytes: int


def train(work: Work, device: str, steps: int, dtype: torch.dtype) -> list[Trained]:
    """Runs on each rank: the same steps at every stage, each data rank with its part of the batch."""
    mesh = Mesh.build(Layout.fit(torch.distributed.get_world_size()))
    return [_stage(work, device, steps, dtype, stage=stage, mesh=mesh) for stage in STAGES]


def _stage(work: Work, device: str, steps: int, dtype: torch.dtype, *, stage: int, mesh: Mesh) -> Trained:
    on_gpu = torch.device(device).type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    model = GPT(work.config, mesh=mesh, device="meta", dtype=dtype)
    make = optimizer(OptimConfig())
    zero = Zero(model, mesh, stage=stage, units=(Block,), optimizer=make, seed=SEED, verify=False, device=device)
    microbatch = work.part(mesh.dp, device=device)
    losses, norms, taken = [], [], []
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP + steps):
        _synchronize(on_gpu)
        start = time.perf_counter()
        zero.begin(microbatches=1)
        loss = model(None, microbatch) / work.tokens
        loss.backward()
        norms.append(zero.step(max_norm=1.0).item())
        _synchronize(on_gpu)
        taken.append(time.perf_counter() - start)
        losses.append(start_all_reduce(loss.detach().double(), mesh.dp).wait().item())
    held = torch.cuda.memory_allocated() - before if on_gpu else 0
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    return Trained(losses, norms, statistics.median(taken[WARM_UP:]), held, peak)


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def report(found: list[Trained], *, dtype: torch.dtype, allowed: float) -> str:
    """As a table. Raises SystemExit, after printing it, where a stage is further from stage 0 than `allowed`."""
    first = found[0]
    off = [max(_distance(one.losses, first.losses), _distance(one.norms, first.norms)) for one in found]
    rows = [
        (
            f"stage {stage}",
            f"{1e3 * one.seconds:.1f}",
            f"{first.seconds / one.seconds:.2f}",
            f"{one.held_bytes / 1e6:.0f}",
            f"{one.peak_bytes / 1e6:.0f}",
            f"{worst:.1e}",
        )
        for stage, one, worst in zip(STAGES, found, off, strict=True)
    ]
    name = f"two ranks on one GPU, Gloo, {str(dtype).removeprefix('torch.')}"
    text = harness.table((name, "step ms", "stage 0 / this", "held MB", "peak MB", "off by"), rows)
    if max(off) > allowed:
        raise SystemExit(f"{text}\nthe stages do not agree: allowed is {allowed:.0e}")
    return text + f"\noff by: losses and norms against stage 0, relative, at most; allowed {allowed:.0e}"


def _distance(mine: list[float], others: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(a - b) / abs(b) for a, b in zip(mine, others, strict=True))

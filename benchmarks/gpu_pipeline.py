"""What only a GPU can show of pipelines: autograd's own threads and the store, stages on CUDA's stream, time of a step.

Two ranks on Gloo share the device, since two need a device each on NCCL; what travels goes through the host's memory.
Each schedule's loss and gradients are compared with those of the whole model in one process, micro-batch by
micro-batch. A backward runs on a thread of autograd's own there: were the open store not seen from it, the stage would
say that it puts no weight gradient off, which counts as an error here.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.work import Work
from megalite import models
from megalite.comm import start_all_reduce
from megalite.mesh import Layout, Mesh
from megalite.models.gpt import GPT
from megalite.models.microbatch import Microbatch
from megalite.models.part import Part
from megalite.pipeline.catalogue import make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.split import split_layers
from megalite.spec import init_parameters

SEED = 0
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v", "dualpipe_v")
ALONE = "one process"
MICROBATCHES = 4
WARM_UP = 2


class Trained(NamedTuple):
    """Of one schedule: relative distances from one process, the larger of both ranks (loss; gradients, relative to the
    largest entry of each); threads besides the caller's on which gradients came; median seconds of a step; the most
    bytes that the first rank had on the device for it, weights and gradients in them."""

    name: str
    loss: float
    gradients: float
    threads: int
    seconds: float
    peak_bytes: int


def train(work: Work, device: str, steps: int, dtype: torch.dtype) -> list[Trained]:
    """Runs on each of two ranks: one process first, then every schedule."""
    mesh = Mesh.build(Layout(pp=torch.distributed.get_world_size()))
    cut = _cut(work, device)
    whole = GPT(work.config, mesh=Mesh(Layout(), 0), device="meta", dtype=dtype)
    init_parameters(whole, SEED, device=device)

    def alone() -> Tensor:
        losses = []
        for microbatch in cut:
            loss = whole(None, microbatch)
            (loss / work.tokens).backward()
            losses.append(loss.detach().double() / work.tokens)
        return torch.stack(losses).sum()

    loss, *rest = _timed(alone, {0: whole}, device, steps)
    found = [Trained(ALONE, 0.0, 0.0, *rest)]
    expected = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for name in SCHEDULES:
        stages = _stages(work, name, mesh, device, dtype)
        schedule = make(name, ranks=mesh.pp.size, microbatches=MICROBATCHES)
        pipeline = Pipeline(stages, schedule, pp=mesh.pp)
        step = lambda pipeline=pipeline: pipeline.step(cut, denominator=work.tokens)  # noqa: E731
        theirs, *rest = _timed(step, stages, device, steps)
        off = torch.tensor([abs(theirs - loss) / abs(loss), _distance(stages, expected)], dtype=torch.float64)
        found.append(Trained(name, *start_all_reduce(off, mesh.world, op="max").wait().tolist(), *rest))
    return found


def _cut(work: Work, device: str) -> list[Microbatch]:
    whole = work.microbatch(device=device)
    parts = (x.chunk(MICROBATCHES) for x in (whole.tokens, whole.labels, whole.sample_ids))
    return [Microbatch(tokens, labels, whole.positions, ids, 1) for tokens, labels, ids in zip(*parts, strict=True)]


def _stages(work: Work, name: str, mesh: Mesh, device: str, dtype: torch.dtype) -> dict[int, nn.Module]:
    schedule = make(name, ranks=mesh.pp.size, microbatches=MICROBATCHES)
    parts = Part.each(split_layers(work.config.num_hidden_layers, schedule.stages, head_layers=1))
    mine = {stage: parts[stage] for stage in schedule.stages_of(mesh.pp.rank)}
    how: dict[str, Any] = {"device": "meta", "dtype": dtype}
    built: dict[int, nn.Module] = dict(models.stages(work.config, mine, mesh=mesh, rank_of=schedule.rank_of, **how))
    init_parameters(built.values(), SEED, device=device)
    return built


def _timed(
    step: Callable[[], Tensor], stages: Mapping[int, nn.Module], device: str, steps: int
) -> tuple[float, int, float, int]:
    """Loss of the last of some steps, whose gradients stay; threads, seconds, bytes, as in `Trained`."""
    on_gpu = torch.device(device).type == "cuda"
    parameters = [parameter for stage in stages.values() for parameter in stage.parameters()]
    threads: set[int] = set()
    hooks = [p.register_post_accumulate_grad_hook(lambda _: threads.add(threading.get_ident())) for p in parameters]
    others = torch.cuda.memory_allocated() - sum(parameter.nbytes for parameter in parameters) if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    taken, loss = [], torch.zeros(())
    for _ in range(WARM_UP + steps):
        for parameter in parameters:
            parameter.grad = None
        _synchronize(on_gpu)
        start = time.perf_counter()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="stage .* puts no weight gradient off")
            loss = step()
        _synchronize(on_gpu)
        taken.append(time.perf_counter() - start)
    for hook in hooks:
        hook.remove()
    peak = torch.cuda.max_memory_allocated() - others if on_gpu else 0
    return loss.item(), len(threads - {threading.get_ident()}), statistics.median(taken[WARM_UP:]), peak


def _synchronize(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def _distance(stages: Mapping[int, nn.Module], expected: Mapping[str, Tensor | None]) -> float:
    """The largest difference of a gradient, relative to the largest entry of what it should be."""
    worst = 0.0
    for name, parameter in (pair for stage in stages.values() for pair in stage.named_parameters()):
        mine, whole = parameter.grad, expected[name]
        assert mine is not None and whole is not None, name
        worst = max(worst, ((mine - whole).abs().max() / whole.abs().max()).item())
    return worst


def report(found: list[Trained], *, dtype: torch.dtype, allowed: tuple[float, float]) -> str:
    """As a table. Raises SystemExit, after printing it, where a schedule is further from one process than allowed: the
    loss and the gradients."""
    rows = [
        (
            one.name,
            f"{1e3 * one.seconds:.1f}",
            f"{found[0].seconds / one.seconds:.2f}",
            f"{one.peak_bytes / 1e6:.0f}",
            str(one.threads),
            f"{one.loss:.1e}",
            f"{one.gradients:.1e}",
        )
        for one in found
    ]
    name = f"two ranks on one GPU, Gloo, {str(dtype).removeprefix('torch.')}"
    header = (name, "step ms", "one process / this", "peak MB", "threads", "loss off", "gradients off")
    text = harness.table(header, rows)
    wrong = [one.name for one in found if not (one.loss <= allowed[0] and one.gradients <= allowed[1])]
    if wrong:
        raise SystemExit(f"{text}\nnot what one process computes: {', '.join(wrong)}; allowed {allowed}")
    return text + f"\noff: relative, allowed {allowed[0]:.0e} and {allowed[1]:.0e}; threads: autograd's own"

"""Pipeline schedules against torch.distributed.pipelining: time, CPU, memory, bytes; all sides in one run, in turn.

    python benchmarks/pipeline.py                            six schedules on 2 ranks, hidden 128 and 256
    python benchmarks/pipeline.py --schedules zb_v --rounds 5 --hiddens 128

A step is forward and backward of all micro-batches, without an optimizer, in float32:

- ours: `Pipeline` over the stages of a `GPT`;
- torch: `PipelineStage`s around the same stages, with the same weights, under its schedule of the same name;
- torch, plain: the same around the layers that a user of torch would write (`benchmarks.peers.Llama`), with logits and
  F.cross_entropy as loss_fn. Its split backward is made for such layers: of an autograd function, like ours of a
  linear, it runs the whole backward twice.

torch's schedules are set up as its documentation says for a loss that is summed: scale_grads=False, and shapes inferred
in the first step. All sides have the same split, the head counted as layers. Ranks are forked here, one thread each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs_schedules
from torch.profiler import record_function

from benchmarks import harness, peers
from benchmarks.harness import Side
from benchmarks.train import SEED, peaks_within
from benchmarks.work import Work, add_work, work_of
from megalite import models
from megalite.mesh import Layout, Mesh
from megalite.models.microbatch import Microbatch
from megalite.models.part import Part
from megalite.pipeline.catalogue import make
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.schedule import Schedule
from megalite.pipeline.split import split_layers
from megalite.spec import init_parameters
from tests.ranks import run

RANKS = 2
FLOAT_BYTES = 4
OURS, PEER, PLAIN = "ours", "torch", "torch, plain"
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Our name of a schedule -> torch's."""


def target(schedule: Schedule, work: Work) -> float:
    """What torch's time over ours shall be at least. Of CPU: at most 1.03 of torch's; of memory: at most 1."""
    if not schedule.splits_backward:
        return 0.97
    return 1.1 if work.config.hidden_size <= 128 else 1.0


class Job(NamedTuple):
    """A schedule over a model. head_layers: as how many layers the head counts in the split."""

    name: str
    work: Work
    microbatches: int
    head_layers: int

    def schedule(self) -> Schedule:
        return make(self.name, ranks=RANKS, microbatches=self.microbatches)

    def split(self) -> list[range]:
        layers = self.work.config.num_hidden_layers
        return split_layers(layers, self.schedule().stages, head_layers=self.head_layers)

    def cut(self, whole: Microbatch) -> list[Microbatch]:
        rows = self.work.batch // self.microbatches
        return [
            Microbatch(
                whole.tokens[first : first + rows],
                whole.labels[first : first + rows],
                whole.positions,
                whole.sample_ids[first : first + rows],
                whole.step,
            )
            for first in range(0, self.work.batch, rows)
        ]


class Training(NamedTuple):
    """`step()` fills the gradients and returns the loss, on the rank of the last stage at least; `gradients()` are this
    rank's, by our names."""

    step: Callable[[], Tensor]
    gradients: Callable[[], dict[str, Tensor]]


def built(job: Job, mesh: Mesh) -> dict[int, nn.Module]:
    """This rank's stages of our GPT."""
    rank_of = job.schedule().rank_of
    parts = {stage: part for stage, part in enumerate(Part.each(job.split())) if rank_of[stage] == mesh.pp.rank}
    stages: dict[int, nn.Module] = dict(models.stages(job.work.config, parts, mesh=mesh, rank_of=rank_of))
    init_parameters(list(stages.values()), SEED)
    return stages


def ours(job: Job) -> Training:
    mesh = Mesh.build(Layout(pp=RANKS))
    stages = built(job, mesh)
    pipeline = Pipeline(stages, job.schedule(), pp=mesh.pp)
    whole = job.work.microbatch()

    def step() -> Tensor:
        _drop_gradients(stages.values())
        return pipeline.step(job.cut(whole), denominator=job.work.tokens)

    return Training(step, partial(_gradients, stages))


def torchs(job: Job) -> Training:
    """torch's schedule over the same stages."""
    mesh = Mesh.build(Layout(pp=RANKS))
    stages = built(job, mesh)
    whole = job.work.microbatch()
    rows = job.work.batch // job.microbatches
    wrapped: dict[int, nn.Module] = {
        stage: InMicrobatches(module, whole.positions, whole.sample_ids[:rows]) for stage, module in stages.items()
    }
    step = torchs_step(job, wrapped, whole, loss=lambda loss, _: loss / job.work.tokens, labels=whole.labels)
    return Training(step, partial(_gradients, stages))


class InMicrobatches(nn.Module):
    """A stage of ours as torch calls one: with the tokens or the activation, and the labels by name."""

    def __init__(self, stage: nn.Module, positions: Tensor, sample_ids: Tensor) -> None:
        super().__init__()
        self.stage, self.positions, self.sample_ids = stage, positions, sample_ids

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        is_first = not x.is_floating_point()
        microbatch = Microbatch(x if is_first else labels, labels, self.positions, self.sample_ids, 1)
        return self.stage(None if is_first else x, microbatch)


def torchs_plain(job: Job) -> Training:
    """torch's schedule over the plain layers, which have other first weights."""
    whole, split, rank_of = job.work.microbatch(), job.split(), job.schedule().rank_of
    model = peers.Llama(job.work.config)
    stages: dict[int, nn.Module] = {
        stage: PlainStage(model, layers, is_first=stage == 0, is_last=stage == len(split) - 1)
        for stage, layers in enumerate(split)
        if rank_of[stage] == dist.get_rank()
    }

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / job.work.tokens

    return Training(torchs_step(job, stages, whole, loss=loss), dict)


class PlainStage(nn.Module):
    """Some layers of a plain `Llama`."""

    def __init__(self, model: peers.Llama, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.embedding = model.tok_embeddings if is_first else None
        self.layers = nn.ModuleList(model.layers[layer] for layer in layers)
        self.norm, self.output = (model.norm, model.output) if is_last else (None, None)
        self.cos, self.sin = model.cos, model.sin

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return x if self.output is None or self.norm is None else self.output(self.norm(x))


def torchs_step(
    job: Job, stages: Mapping[int, nn.Module], whole: Microbatch, *, loss: Callable[..., Tensor], **inputs: Tensor
) -> Callable[[], Tensor]:
    """A step of torch's schedule; inputs: what its stages get besides x, cut into micro-batches by torch."""
    schedule = job.schedule()
    cpu = torch.device("cpu")
    staged = [PipelineStage(module, stage, schedule.stages, cpu) for stage, module in sorted(stages.items())]
    kind: Any = getattr(torchs_schedules, PEERS[job.name])
    given = staged[0] if schedule.stages_per_rank == 1 else staged
    runs = kind(given, job.microbatches, loss_fn=loss, scale_grads=False)
    first = (whole.tokens,) if 0 in stages else ()

    def step() -> Tensor:
        _drop_gradients(stages.values())
        losses: list[Tensor] = []
        runs.step(*first, target=whole.labels, losses=losses, return_outputs=False, **inputs)
        return torch.stack(losses).detach().double().sum() if losses else torch.zeros((), dtype=torch.float64)

    return step


def _drop_gradients(stages: Any) -> None:
    for stage in stages:
        for parameter in stage.parameters():
            parameter.grad = None


def _gradients(stages: Mapping[int, nn.Module]) -> dict[str, Tensor]:
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


SIDES: dict[str, Callable[[Job], Training]] = {OURS: ours, PEER: torchs, PLAIN: torchs_plain}


class Found(NamedTuple):
    """Of one schedule, on one rank, by side. sent: bytes that this rank sends in a step. difference: of the gradients
    of ours and of torch's after the same step, relative to each tensor's largest entry; of the loss beside it."""

    times: dict[str, harness.Times]
    sent: dict[str, float]
    difference: float
    losses: dict[str, float]


def speed(job: Job, rounds: int) -> Found:
    """Runs on every rank: all sides in turn."""
    world = Mesh.build(Layout(pp=dist.get_world_size())).world
    trained = {name: side(job) for name, side in SIDES.items()}
    sides = {name: Side(training.step, world.size) for name, training in trained.items()}
    times = harness.in_turn(sides, world=world, rounds=rounds, warm_up=2)
    sent, losses = {}, {}
    for name, training in trained.items():
        with harness.bytes_sent() as counted:
            losses[name] = training.step().item()
        sent[name] = counted.bytes_sent("send")
    mine, theirs = (trained[name].gradients() for name in (OURS, PEER))
    assert set(mine) == set(theirs), set(mine) ^ set(theirs)
    difference = max(((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)
    return Found(times, sent, difference, losses)


def live(job: Job, side: str) -> int:
    """Runs on every rank, in a process of its own: the most that tensors held at once within a step after the first."""

    def train() -> None:
        training = SIDES[side](job)
        for _ in range(5):
            with record_function("the step"):
                training.step()

    return min(peaks_within(train, "the step")[1:])


def formula_bytes(job: Job) -> int:
    """All ranks: an activation of batch x seq x hidden over each boundary between ranks, and its gradient back."""
    rank_of = job.schedule().rank_of
    boundaries = sum(a != b for a, b in itertools.pairwise(rank_of))
    return 2 * boundaries * job.work.tokens * job.work.config.hidden_size * FLOAT_BYTES


HEADER = (
    *(*harness.MILLISECONDS, "ours / this", "at least", "CPU"),
    *("peak MB", "ours / this", "sent MB", "formula", "loss off", "gradients off"),
)


def report(job: Job, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: one of each side."""
    ranks = run(speed, RANKS, job, rounds, checked=False, timeout=600)
    peaks = {side: max(run(live, RANKS, job, side, checked=False, timeout=300)) for side in SIDES}
    times, sent = ranks[0].times, {side: sum(found.sent[side] for found in ranks) for side in SIDES}
    loss = {side: max(found.losses[side] for found in ranks) for side in SIDES}
    cpu = {side: sum(times[side].cpu_seconds) for side in SIDES}
    rows = []
    for side in SIDES:
        peer = side != OURS
        rows.append(
            (
                f"  {side}" if peer else job.name,
                *harness.milliseconds(times[side]),
                str(harness.ratio(times[side].seconds, times[OURS].seconds)) if peer else "",
                str(target(job.schedule(), job.work)) if side == PEER else "",
                f"{cpu[OURS] / cpu[side]:.3f}" if peer else "",
                f"{peaks[side] / 1e6:.2f}",
                f"{peaks[OURS] / peaks[side]:.3f}" if peer else "",
                f"{sent[side] / 1e6:.3f}",
                "" if peer else f"{formula_bytes(job) / 1e6:.3f}",
                f"{abs(loss[OURS] - loss[side]) / loss[side]:.0e}" if side == PEER else "",
                f"{max(found.difference for found in ranks):.0e}" if side == PEER else "",
            )
        )
    return rows


LEGEND = """ours / this: speed, the median of {rounds} rounds in turn (quartiles)
CPU: ours over this, all rounds and ranks summed, waiting left out; 1.03 at most where backward is not split
peak: live storages at their highest within a step, weights and gradients in it, of the rank with most
sent: by both ranks in one step; off: the largest difference, relative to the tensor's largest entry"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add_work(parser)
    parser.set_defaults(vocab=2048, seq=128, layers=7)
    parser.add_argument("--schedules", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--hiddens", nargs="+", type=int, default=[128, 256], help="a table each")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--head-layers", type=int, default=1, help="as how many layers the head counts in the split")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds; each runs every side once")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own to stderr
    for hidden in options.hiddens:
        options.hidden = hidden
        work = work_of(options)
        print(f"{work}, {options.microbatches} micro-batches, the head as {options.head_layers}, one thread a rank\n")
        rows = []
        for name in options.schedules:
            job = Job(name, work, options.microbatches, options.head_layers)
            rows += report(job, options.rounds)
        print(harness.table((f"{RANKS} ranks, hidden {hidden}", *HEADER), rows) + "\n", flush=True)
    print(LEGEND.format(rounds=options.rounds))


if __name__ == "__main__":
    main()

"""Pipeline schedules against torch.distributed.pipelining: time, CPU, memory, bytes; both sides in one run, in turn.

    python benchmarks/pipeline.py                                six schedules on 2 ranks, hidden 128 and 256: 5 minutes
    python benchmarks/pipeline.py --models plain                 over layers as a user of torch writes them
    python benchmarks/pipeline.py --schedules zb_v --rounds 5    one of them, quickly

A step is forward and backward of all micro-batches, without an optimizer, in float32. Both sides run the same stages,
with the same weights, split alike, the head counted as layers:

- gpt: the stages of a `GPT`. torch's split backward runs an autograd function, such as our linear layer is, twice;
- plain: those of `benchmarks.peers.Llama`, nn.Linears, which torch's split backward is made for; ours defers them.

torch's schedules are set up as its documentation says for a loss that is summed: scale_grads=False, and shapes inferred
in the first step. Ranks are forked here, one thread each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Sequence
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
from megalite.layers.defer import defer
from megalite.mesh import Axis, Layout, Mesh
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
OURS, PEER = "ours", "torch"
PEERS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "interleaved_zb": "ScheduleInterleavedZeroBubble",
    "zb_v": "ScheduleZBVZeroBubble",
    "dualpipe_v": "ScheduleDualPipeV",
}
"""Our name of a schedule -> torch's."""


class Job(NamedTuple):
    """A schedule over a model of MODELS. head_layers: as how many layers the head counts in the split."""

    name: str
    model: str
    work: Work
    microbatches: int
    head_layers: int

    def schedule(self) -> Schedule:
        return make(self.name, ranks=RANKS, microbatches=self.microbatches)

    def split(self) -> list[range]:
        layers = self.work.config.num_hidden_layers
        return split_layers(layers, self.schedule().stages, head_layers=self.head_layers)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.work.batch // self.microbatches

    def cut(self, whole: Microbatch) -> list[Microbatch]:
        split = (x.split(self.rows) for x in (whole.tokens, whole.labels, whole.sample_ids))
        return [
            Microbatch(tokens, labels, whole.positions, ids, whole.step)
            for tokens, labels, ids in zip(*split, strict=True)
        ]


Stages = dict[int, nn.Module]
"""This rank's, by number, each called as `Pipeline` calls it: stage(activation | None, microbatch)."""


def gpt(job: Job, pp: Axis, *, deferring: bool) -> Stages:
    """The stages of our GPT, which defer whatever is said."""
    schedule = job.schedule()
    parts = {stage: part for stage, part in enumerate(Part.each(job.split())) if stage in schedule.stages_of(pp.rank)}
    mesh = Mesh.build(Layout(pp=pp.size))
    stages: Stages = dict(models.stages(job.work.config, parts, mesh=mesh, rank_of=schedule.rank_of))
    init_parameters(stages.values(), SEED)
    return stages


def plain(job: Job, pp: Axis, *, deferring: bool) -> Stages:
    """The stages of a plain Llama."""
    model = peers.Llama(job.work.config, seed=SEED)
    stages: Stages = {}
    for stage in job.schedule().stages_of(pp.rank):
        stages[stage] = PlainStage(model, Part.each(job.split())[stage])
        if deferring:
            defer(stages[stage])
    return stages


class PlainStage(nn.Module):
    """A part of a plain `Llama`."""

    def __init__(self, model: peers.Llama, part: Part) -> None:
        super().__init__()
        self.embedding = model.tok_embeddings if part.is_first else None
        self.layers = nn.ModuleDict({str(layer): model.layers[layer] for layer in part.layers})
        self.norm, self.output = (model.norm, model.output) if part.is_last else (None, None)
        self.cos, self.sin = model.cos, model.sin

    def forward(self, activation: Tensor | None, microbatch: Microbatch) -> Tensor:
        x = activation if self.embedding is None else self.embedding(microbatch.tokens)
        seq = microbatch.tokens.shape[1]
        for layer in self.layers.values():
            x = layer(x, self.cos[:seq], self.sin[:seq])
        if self.norm is None or self.output is None:
            return x
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), microbatch.labels.flatten(), reduction="sum")


MODELS = {"gpt": gpt, "plain": plain}


class Training(NamedTuple):
    """`step()` fills the gradients and returns the loss, on the rank of the last stage at least; `gradients()` are this
    rank's, by name."""

    step: Callable[[], Tensor]
    gradients: Callable[[], dict[str, Tensor]]


def ours(job: Job) -> Training:
    pp = Mesh.build(Layout(pp=RANKS)).pp
    schedule = job.schedule()
    stages = MODELS[job.model](job, pp, deferring=schedule.splits_backward)
    pipeline = Pipeline(stages, schedule, pp=pp)
    whole = job.work.microbatch()

    def step() -> Tensor:
        _drop_gradients(stages)
        return pipeline.step(job.cut(whole), denominator=job.work.tokens)

    return Training(step, partial(_gradients, stages))


def torchs(job: Job) -> Training:
    """torch's schedule; it cuts the batch itself, and gives labels and target to every rank."""
    pp = Mesh.build(Layout(pp=RANKS)).pp
    schedule, cpu = job.schedule(), torch.device("cpu")
    stages = MODELS[job.model](job, pp, deferring=False)
    whole = job.work.microbatch()
    staged = [
        PipelineStage(InMicrobatches(module, job.cut(whole)[0]), stage, schedule.stages, cpu)
        for stage, module in stages.items()
    ]
    kind: Any = getattr(torchs_schedules, PEERS[job.name])
    runs = kind(
        staged[0] if schedule.stages_per_rank == 1 else staged,
        job.microbatches,
        loss_fn=lambda loss, _: loss / job.work.tokens,
        scale_grads=False,
    )
    first = (whole.tokens,) if 0 in stages else ()

    def step() -> Tensor:
        _drop_gradients(stages)
        losses: list[Tensor] = []
        runs.step(*first, labels=whole.labels, target=whole.labels, losses=losses, return_outputs=False)
        return torch.stack(losses).detach().double().sum() if losses else torch.zeros((), dtype=torch.float64)

    return Training(step, partial(_gradients, stages))


class InMicrobatches(nn.Module):
    """A stage as torch calls one: with the tokens or the activation, and the labels by name."""

    def __init__(self, stage: nn.Module, like: Microbatch) -> None:
        super().__init__()
        self.stage, self.like = stage, like

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        is_first, like = not x.is_floating_point(), self.like
        microbatch = Microbatch(x if is_first else labels, labels, like.positions, like.sample_ids, like.step)
        return self.stage(None if is_first else x, microbatch)


def _drop_gradients(stages: Stages) -> None:
    for stage in stages.values():
        for parameter in stage.parameters():
            parameter.grad = None


def _gradients(stages: Stages) -> dict[str, Tensor]:
    named = [pair for stage in stages.values() for pair in stage.named_parameters()]
    return {name: parameter.grad for name, parameter in named if parameter.grad is not None}


SIDES: dict[str, Callable[[Job], Training]] = {OURS: ours, PEER: torchs}


class Found(NamedTuple):
    """Of one schedule, on one rank, by side. sent: bytes that this rank sends in a step. difference: of the gradients
    of both sides after the same step, relative to each tensor's largest entry."""

    times: dict[str, harness.Times]
    sent: dict[str, float]
    losses: dict[str, float]
    difference: float


def speed(job: Job, rounds: int) -> Found:
    """Runs on every rank: both sides in turn. Two and no more, since memory that one side frees is what the next one
    is given, and which one that is would matter by a few percent."""
    world = Mesh.build(Layout(pp=dist.get_world_size())).world
    trained = {name: side(job) for name, side in SIDES.items()}
    sides = {name: Side(training.step, world.size) for name, training in trained.items()}
    times = harness.in_turn(sides, world=world, rounds=rounds, warm_up=2)
    sent, losses = {}, {}
    for name, training in trained.items():
        with harness.bytes_sent() as counted:
            losses[name] = training.step().item()
        sent[name] = counted.bytes_sent("send")
    mine, theirs = (training.gradients() for training in trained.values())
    assert set(mine) == set(theirs), set(mine) ^ set(theirs)
    difference = max(((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)
    return Found(times, sent, losses, difference)


def live(job: Job, side: str) -> int:
    """Runs on every rank, in a process of its own: the most that tensors held at once within a step after the first."""

    def train() -> None:
        training = SIDES[side](job)
        for _ in range(3):
            with record_function("the step"):
                training.step()

    return min(peaks_within(train, "the step")[1:])


def formula_bytes(job: Job) -> int:
    """All ranks: an activation of batch x seq x hidden over each boundary between ranks, and its gradient back."""
    rank_of = job.schedule().rank_of
    boundaries = sum(a != b for a, b in itertools.pairwise(rank_of))
    return 2 * boundaries * job.work.tokens * job.work.config.hidden_size * FLOAT_BYTES


def target(job: Job) -> float:
    """What torch's time over ours shall be at least. Of CPU: at most 1.03 of torch's; of memory: at most 1."""
    if not job.schedule().splits_backward:
        return 0.97
    return 1.1 if job.work.config.hidden_size <= 128 else 1.0


HEADER = (
    *(*harness.MILLISECONDS, "ours / torch", "at least", "CPU"),
    *("peak MB", "ours / torch", "sent MB", "formula", "loss off", "gradients off"),
)


def report(job: Job, rounds: int) -> list[tuple[str, ...]]:
    """Rows of the table: one of each side."""
    ranks = run(speed, RANKS, job, rounds, checked=False, timeout=600)
    peaks = {side: max(run(live, RANKS, job, side, checked=False, timeout=300)) for side in SIDES}
    times = ranks[0].times
    sent = {side: sum(found.sent[side] for found in ranks) for side in SIDES}
    loss = {side: max(found.losses[side] for found in ranks) for side in SIDES}  # 0 where the last stage is not
    cpu = {side: sum(times[side].cpu_seconds) for side in SIDES}
    rows = []
    for side in SIDES:
        mine = side == OURS
        rows.append(
            (
                f"{job.name}, {job.model}" if mine else f"  {side}",
                *harness.milliseconds(times[side]),
                str(harness.ratio(times[PEER].seconds, times[OURS].seconds)) if mine else "",
                str(target(job)) if mine else "",
                f"{cpu[OURS] / cpu[PEER]:.3f}" if mine else "",
                f"{peaks[side] / 1e6:.2f}",
                f"{peaks[OURS] / peaks[PEER]:.3f}" if mine else "",
                f"{sent[side] / 1e6:.3f}",
                f"{formula_bytes(job) / 1e6:.3f}" if mine else "",
                f"{abs(loss[OURS] - loss[PEER]) / loss[PEER]:.0e}" if mine else "",
                f"{max(found.difference for found in ranks):.0e}" if mine else "",
            )
        )
    return rows


LEGEND = """ours / torch: speed, the median of {rounds} rounds in turn (quartiles)
CPU: ours over torch's, all rounds and ranks summed, waiting left out; 1.03 at most where backward is not split
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
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["gpt"])
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own to stderr
    for hidden in options.hiddens:
        options.hidden = hidden
        work = work_of(options)
        counted = f"{options.microbatches} micro-batches, the head counted as {options.head_layers} layers"
        print(f"{work}, {counted}, one thread a rank\n", flush=True)
        rows = []
        for model in options.models:
            for name in options.schedules:
                rows += report(Job(name, model, work, options.microbatches, options.head_layers), options.rounds)
        print(harness.table((f"{RANKS} ranks, hidden {hidden}", *HEADER), rows) + "\n", flush=True)
    print(LEGEND.format(rounds=options.rounds))


if __name__ == "__main__":
    main()

"""ZeRO's stages against torch's own: tokens per second, memory, bytes; both sides in one run, in turn.

    python benchmarks/zero.py                                  all stages on 2 ranks, hidden 256
    python benchmarks/zero.py --ranks 2 4 --hiddens 256 512    the whole table
    python benchmarks/zero.py --stages 3 --rounds 3            one of them, quickly
    python benchmarks/zero.py --breakdown                      instead: where each side's CPU time goes

| ours    | its peer                                            |
|---------|-----------------------------------------------------|
| stage 0 | DistributedDataParallel                             |
| stage 1 | DistributedDataParallel and ZeroRedundancyOptimizer |
| stage 2 | FSDP2, fully_shard(reshard_after_forward=False)     |
| stage 3 | FSDP2, fully_shard                                  |

One `GPT`, the same class on both sides, with the same first weights, batch, clipping and AdamW (fused). The peers are
set as their documentation advises: DDP's gradients are views of its buckets; FSDP2 wraps the embedding, each Block, and
the last norm with the head. Ranks are forked here, one thread each.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.profiler import record_function

from benchmarks import harness, parts
from benchmarks.harness import Side
from benchmarks.parts import Clock, Enter, silently
from benchmarks.train import LEARNING_RATE, MAX_NORM, SEED, WEIGHT_DECAY, adamw, peaks_within
from benchmarks.work import Work, add_work, work_of
from megalite.mesh import Layout, Mesh
from megalite.models.gpt import GPT, Block
from megalite.spec import init_parameters, param_specs
from megalite.zero import Zero
from tests.ranks import run

STAGES = (0, 1, 2, 3)
TARGETS = {0: 0.97, 1: 1.05, 2: 1.1, 3: 1.1}
"""Stage -> what our tokens per second over the peer's shall be at least. Of memory: at most 1."""
FLOAT_BYTES = 4
OURS, PEER = "ours", "peer"


class Training(NamedTuple):
    """`step()` makes one update and returns the gradient's norm before clipping; `weights()` are whole, by name."""

    step: Callable[[], Tensor]
    weights: Callable[[], dict[str, Tensor]]


def ours(work: Work, stage: int, enter: Enter = silently) -> Training:
    mesh = Mesh.build(Layout(dp=dist.get_world_size()))
    model = GPT(work.config, mesh=mesh, device="meta")
    zero = Zero(model, mesh, stage=stage, units=(Block,), optimizer=adamw, seed=SEED)
    tell_of_update(zero.optimizer, enter)
    microbatch = work.part(mesh.dp)

    def step() -> Tensor:
        enter("forward")
        zero.begin(microbatches=1)
        loss = model(None, microbatch) / work.tokens
        enter("backward")
        loss.backward()
        enter("sums")
        zero.reduce()
        enter("norm and clip")
        return zero.step(max_norm=MAX_NORM)

    def weights() -> dict[str, Tensor]:
        with zero.gathered():
            return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    return Training(step, weights)


def torchs(work: Work, stage: int, enter: Enter = silently) -> Training:
    """The peer of a stage. It averages gradients where we sum them: hence the loss over this rank's own tokens."""
    mesh = Mesh.build(Layout(dp=dist.get_world_size()))
    model = GPT(work.config, mesh=mesh)
    init_parameters(model, SEED)
    decays = {name: spec.decay for name, spec in param_specs(model).items()}
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True) if stage < 2 else sharded(model, stage)
    parameters = dict(model.named_parameters())
    groups = [
        {"params": [parameters[name] for name in parameters if decays[name] is decay], "decay": decay}
        for decay in (True, False)
    ]
    optimizer = spread_adamw(groups) if stage == 1 else adamw(groups)
    tell_of_update(optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer, enter)
    microbatch = work.part(mesh.dp)

    def step() -> Tensor:
        enter("forward")
        optimizer.zero_grad()
        loss = wrapped(None, microbatch) / microbatch.valid()
        enter("backward")
        loss.backward()
        enter("norm and clip")
        norm = clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def weights() -> dict[str, Tensor]:
        whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in parameters.items()}
        return {name: weight.detach().clone() for name, weight in whole.items()}

    return Training(step, weights)


def alone(work: Work, stage: int, enter: Enter = silently) -> Training:
    """The same forward and backward on each rank, and nothing else: what no stage can be faster than."""
    mesh = Mesh.build(Layout(dp=dist.get_world_size()))
    model = GPT(work.config, mesh=mesh)
    init_parameters(model, SEED)
    microbatch = work.part(mesh.dp)

    def step() -> Tensor:
        enter("forward")
        loss = model(None, microbatch) / work.tokens
        enter("backward")
        loss.backward()
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    return Training(step, lambda: dict(model.named_parameters()))


def tell_of_update(optimizer: torch.optim.Optimizer, enter: Enter) -> None:
    """What follows an optimizer's step is the gathering of weights, or torch's broadcasts of them."""
    optimizer.register_step_pre_hook(lambda *_: enter("update"))
    optimizer.register_step_post_hook(lambda *_: enter("gathers"))


def sharded(model: GPT, stage: int) -> nn.Module:
    """Under FSDP2, in place."""
    options = {"mesh": init_device_mesh("cpu", (dist.get_world_size(),)), "reshard_after_forward": stage == 3}
    for unit in (model.embedding, *model.blocks.values(), [model.norm, model.head]):
        fully_shard(unit, **options)
    fully_shard(model, **options)
    return model


def spread_adamw(groups: Sequence[dict]) -> torch.optim.Optimizer:
    """`benchmarks.train.adamw`, its state spread over the ranks by torch."""
    rows = [{"params": g["params"], "weight_decay": WEIGHT_DECAY if g["decay"] else 0.0} for g in groups]
    return ZeroRedundancyOptimizer(rows, optimizer_class=torch.optim.AdamW, lr=LEARNING_RATE, fused=True)


SIDES: dict[str, Callable[..., Training]] = {OURS: ours, PEER: torchs}
PEERS = {0: "DDP", 1: "DDP + ZeroRedundancyOptimizer", 2: "FSDP2, no reshard", 3: "FSDP2"}


class Found(NamedTuple):
    """Of one stage, by side. sent: bytes that rank 0 sends in a step. difference: of weights after the same steps,
    relative to each tensor's largest entry."""

    times: dict[str, harness.Times]
    sent: dict[str, float]
    difference: float


def speed(work: Work, stage: int, rounds: int) -> Found:
    """Runs on every rank: both sides in turn."""
    world = Mesh.build(Layout(dp=dist.get_world_size())).world
    trained = {name: make(work, stage) for name, make in SIDES.items()}
    sides = {name: Side(training.step, world.size) for name, training in trained.items()}
    # The first step learns the order of things, the second is the first that uses it.
    times = harness.in_turn(sides, world=world, rounds=rounds, warm_up=2)
    sent = {}
    for name, training in trained.items():
        with harness.bytes_sent() as counted:
            training.step()
        sent[name] = counted.bytes_sent()
    mine, theirs = (training.weights() for training in trained.values())
    difference = max(((mine[name] - theirs[name]).abs().max() / theirs[name].abs().max()).item() for name in theirs)
    return Found(times, sent, difference)


def live(work: Work, stage: int, side: str) -> int:
    """Runs on every rank, in a process of its own: the most that tensors held at once within a step after the first."""

    def train() -> None:
        training = SIDES[side](work, stage)
        for _ in range(5):
            with record_function("the step"):
                training.step()

    return min(peaks_within(train, "the step")[1:])


def broken_down(work: Work, stage: int, rounds: int) -> dict[str, dict[str, float]]:
    """Runs on every rank: both sides and the computation alone, in turn."""
    clocks = {name: Clock() for name in (*SIDES, "alone")}
    made = SIDES | {"alone": alone}
    sides = {name: (made[name](work, stage, clock.enter).step, clock) for name, clock in clocks.items()}
    return parts.cpu_milliseconds(sides, world=Mesh.build(Layout(dp=dist.get_world_size())).world, rounds=rounds)


def breakdown(work: Work, stages: Sequence[int], *, ranks: int, rounds: int) -> str:
    rows = []
    for stage in stages:
        found = run(broken_down, ranks, work, stage, rounds, checked=False, timeout=600)[0]
        rows += [(f"stage {stage}", found[OURS]), (f"  {PEERS[stage]}", found[PEER]), ("  alone", found["alone"])]
    return parts.report(f"{ranks} ranks, hidden {work.config.hidden_size}, CPU ms", rows)


def formula_bytes(work: Work, stage: int, *, ranks: int) -> float:
    """What our stage sends in a step of one micro-batch, in units of (n-1)/n of the parameters' bytes.

    Stages 0 to 2: an all-reduce, or a reduce-scatter and a gather: 2. Stage 3 gathers for forward and for backward, and
    reduces: 3; but 2 for the embedding, whose backward reads no weight, and for the last unit, the last norm and the
    head, which is not released between. Left out: the norm of the gradients, three numbers.
    """
    sizes = {
        name: parameter.numel()
        for name, parameter in GPT(work.config, mesh=Mesh(Layout(), 0), device="meta").named_parameters()
    }
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    units = 2 * sum(sizes.values()) + (blocks if stage == 3 else 0)
    return units * FLOAT_BYTES * (ranks - 1) / ranks


HEADER = (
    *("tokens/s", *harness.MILLISECONDS, "ours / peer", "at least"),
    *("step's peak MB", "ours / peer", "sent MB", "formula", "differ"),
)


def report(work: Work, stages: Sequence[int], *, ranks: int, rounds: int) -> str:
    rows = []
    for stage in stages:
        found = run(speed, ranks, work, stage, rounds, checked=False, timeout=600)[0]
        peaks = {side: max(run(live, ranks, work, stage, side, checked=False, timeout=300)) for side in SIDES}
        formula = formula_bytes(work, stage, ranks=ranks) / 1e6
        gained = harness.ratio(found.times[PEER].seconds, found.times[OURS].seconds)
        for side, name in ((OURS, f"stage {stage}"), (PEER, f"  {PEERS[stage]}")):
            mine, times = side == OURS, found.times[side]
            rows.append(
                (
                    name,
                    f"{work.tokens / statistics.median(times.seconds):.0f}",
                    *harness.milliseconds(times),
                    str(gained) if mine else "",
                    str(TARGETS[stage]) if mine else "",
                    f"{peaks[side] / 1e6:.1f}",
                    f"{peaks[OURS] / peaks[PEER]:.3f}" if mine else "",
                    f"{found.sent[side] / 1e6:.2f}",
                    f"{formula:.2f}" if mine else "",
                    f"{found.difference:.0e}" if mine else "",
                )
            )
    return harness.table((f"{ranks} ranks, hidden {work.config.hidden_size}", *HEADER), rows)


LEGEND = """ours / peer: tokens/s, the median of {rounds} rounds in turn (quartiles); memory: of the rank with most
ms, best ms: a step of the slowest rank; CPU ms: of all ranks together, waiting left out
step's peak: the highest sum of live storages within a step, weights, gradients, moments and activations together
sent: by one rank and step, as a ring would send what was asked for (on Gloo FSDP2's reduce-scatter is an all-reduce)
differ: the largest difference of weights after the same steps, relative to each tensor's largest entry"""


BREAKDOWN = """CPU ms of a step of all ranks together, the median of {rounds} rounds in turn, waiting left out
alone: forward and backward, and nothing else. sums: what ours still adds after backward; torch's are in backward
other threads: Gloo's, whatever the part. Stage 3's and FSDP2's gathers are in forward and backward"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add_work(parser)
    parser.set_defaults(vocab=2048)
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2])
    parser.add_argument("--hiddens", nargs="+", type=int, help="several tables; default: --hidden alone")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds; each runs both sides once")
    parser.add_argument("--breakdown", action="store_true", help="CPU time by part of the step, instead of the table")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler writes lines of its own to stderr
    for hidden in options.hiddens or [options.hidden]:
        options.hidden = hidden
        work = work_of(options)
        print(f"{work}, one thread a rank\n", flush=True)
        show = breakdown if options.breakdown else report
        for ranks in options.ranks:
            print(show(work, options.stages, ranks=ranks, rounds=options.rounds) + "\n", flush=True)
    print((BREAKDOWN if options.breakdown else LEGEND).format(rounds=options.rounds))


if __name__ == "__main__":
    main()

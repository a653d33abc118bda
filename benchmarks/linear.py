"""Tensor and sequence parallelism against torch's own: tokens per second, bytes, and what the arithmetic would allow.

    python benchmarks/linear.py                                            two ranks, started here
    torchrun --standalone --nproc-per-node=2 benchmarks/linear.py          the ranks that torchrun has started

One Llama, once as our `GPT` and once as a plain module under torch's `parallelize_module` (see peers.py), with the same
weights on the same batch: forward and backward, until every gradient is final. All sides run in turn on the same ranks,
one thread each. The floor is our own model with every collective replaced by a local copy of the same bytes: its
numbers are wrong, its arithmetic is not, so no way of cutting like ours can be faster.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from benchmarks import harness, peers
from benchmarks.harness import Side
from benchmarks.work import Work, add_work, partial_parameters, sum_gradients, work_of
from megalite.comm import collectives, start_all_reduce
from megalite.comm.start import Started, start
from megalite.mesh import Axis, Layout, Mesh
from megalite.models.gpt import GPT
from megalite.weight_grad import WeightGradStore

FLOAT_BYTES = 4


class Subject(NamedTuple):
    """A model that can be stepped: `step()` leaves every gradient final and returns the mean loss."""

    model: nn.Module
    step: Callable[[], Tensor]


def ours(work: Work, mesh: Mesh, *, sequence_parallel: bool = False, split: bool = False) -> Subject:
    """Our `GPT` with the peer's weights. split: weight gradients put off, as a zero-bubble pipeline does."""
    model = GPT(work.config, mesh=mesh, sequence_parallel=sequence_parallel)
    peers.copy_weights(peers.Llama(work.config), model)
    microbatch = work.microbatch()
    partial, store = partial_parameters(model, mesh.tp), WeightGradStore()

    def step() -> Tensor:
        model.zero_grad()
        loss = model(None, microbatch) / work.tokens
        with store.open() if split else contextlib.nullcontext():
            loss.backward()
        store.run()
        sum_gradients(partial, mesh.tp)
        return loss.detach()

    return Subject(model, step)


def torchs(work: Work, spread: Callable[[peers.Llama], peers.Llama], *, loss_is_parallel: bool = False) -> Subject:
    """The plain model, spread by torch."""
    model = spread(peers.Llama(work.config))
    microbatch = work.microbatch()

    def step() -> Tensor:
        model.zero_grad()
        with loss_parallel() if loss_is_parallel else contextlib.nullcontext():
            loss = peers.loss_sum(model, microbatch) / work.tokens
            loss.backward()
        for parameter in model.parameters():  # as torch's optimizers do, one parameter after the other
            gradient = parameter.grad
            if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
                parameter.grad = gradient.redistribute(placements=parameter.placements)
        loss = loss.detach()
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    return Subject(model, step)


@contextlib.contextmanager
def local_copies(n: int) -> Iterator[None]:
    """Within, no collective of ours communicates: each copies as many bytes as it would give, from this rank's own."""
    done = SimpleNamespace(wait=lambda: None)

    def all_reduce(x: Tensor, **_: Any) -> Any:
        x.clone()
        return done

    def all_gather(whole: Tensor, part: Tensor, **_: Any) -> Any:
        whole.view(n, -1).copy_(part.view(1, -1))
        return done

    def receive(received: Tensor, **_: Any) -> Any:
        received.zero_()
        return done

    local = SimpleNamespace(
        all_reduce=all_reduce, irecv=receive, isend=lambda x, **_: done, get_backend=dist.get_backend
    )
    with mock.patch.object(collectives, "dist", local), mock.patch.object(collectives, "_all_gather_flat", all_gather):
        yield


def formula_bytes(work: Work, *, tp: int, sequence_parallel: bool, split: bool = False) -> dict[str, float]:
    """Bytes that each rank sends in a step, by part; b s h = one activation.

    A layer: 8 b s h (t-1)/t elements (Narayanan et al., arXiv:2104.04473, section 3.2: four all-reduces); with sequence
    parallelism 10 (four all-gathers and four reduce-scatters, and the column inputs gathered again instead of kept);
    with a split backward 12 (W gathers the row gradients once more). Embedding, head and loss as their docstrings say.
    """
    layers, share = work.config.num_hidden_layers, (tp - 1) / tp
    activation = work.tokens * work.config.hidden_size * share * FLOAT_BYTES
    per_layer = 8 if not sequence_parallel else 12 if split else 10
    return {
        "layers": layers * per_layer * activation,
        "embedding": 2 * activation,
        "head": (3 if sequence_parallel else 2) * activation,
        "loss": 3 * work.tokens * (tp - 1) * FLOAT_BYTES,
        "norms": 2 * (2 * layers + 1) * work.config.hidden_size * share * FLOAT_BYTES if sequence_parallel else 0.0,
    }


FLOOR = "ours, local copies"
ONE, TP, SP, SPLIT = "one process", "tp", "tp + sp", "tp + sp, split backward"
OURS, PLAIN, PLAN, LOSS_PARALLEL = "ours", "torch, plain", "torch, logits gathered", "torch, loss parallel"


Subjects = dict[tuple[str, str], Subject]


class Difference(NamedTuple):
    """|loss - its loss| / its loss, and the largest over tensors of max |gradient - its| / max |its|."""

    loss: float
    gradient: float


def differences(all_subjects: Subjects, work: Work, world: Axis) -> dict[tuple[str, str], Difference]:
    """How far one step of each side is from one of the plain module on one process, over all ranks."""
    reference = all_subjects[ONE, PLAIN]
    expected_loss = reference.step()
    plain = peers.whole_gradients(reference.model)
    worst = torch.zeros(len(all_subjects), 2, dtype=torch.float64)
    for row, subject in zip(worst, all_subjects.values(), strict=True):
        row[0] = abs(subject.step() - expected_loss) / abs(expected_loss)
        expected = plain
        if isinstance(subject.model, GPT):
            expected = peers.this_rank(peers.in_our_names(plain, work.config), subject.model)
        for name, gradient in peers.whole_gradients(subject.model).items():
            row[1] = max(row[1], (gradient - expected[name]).abs().max() / expected[name].abs().max())
    rows = start_all_reduce(worst, world, op="max").wait().tolist()
    return {at: Difference(*row) for at, row in zip(all_subjects, rows, strict=True)}


def subjects(work: Work, mesh: Mesh) -> Subjects:
    """(layout, whose) -> subject."""
    alone = Mesh(Layout(), 0)
    device_mesh = init_device_mesh("cpu", (mesh.tp.size,))
    return {
        (ONE, OURS): ours(work, alone),
        (ONE, PLAIN): torchs(work, lambda model: model),
        (TP, OURS): ours(work, mesh),
        (TP, PLAN): torchs(work, lambda model: peers.tensor_parallel(model, device_mesh, loss_parallel=False)),
        (TP, LOSS_PARALLEL): torchs(
            work,
            lambda model: peers.tensor_parallel(model, device_mesh, loss_parallel=True),
            loss_is_parallel=True,
        ),
        (SP, OURS): ours(work, mesh, sequence_parallel=True),
        (SP, LOSS_PARALLEL): torchs(
            work, lambda model: peers.sequence_parallel(model, device_mesh), loss_is_parallel=True
        ),
        (SPLIT, OURS): ours(work, mesh, sequence_parallel=True, split=True),
    }


def law(all_subjects: Subjects, work: Work, world: Axis) -> str:
    """All sides compute the same."""
    found = differences(all_subjects, work, world)
    rows = [(", ".join(at), f"{of.loss:.1e}", f"{of.gradient:.1e}") for at, of in found.items()]
    return harness.table(("against the plain module on one process", "loss", "gradients"), rows)


def sent(all_subjects: Subjects, work: Work, tp: int) -> str:
    """Bytes of one step, counted as they are issued, against the formula. AssertionError if ours differ from it."""
    rows = []
    for (layout, whose), subject in all_subjects.items():
        if layout == ONE:
            continue
        with harness.bytes_sent() as counted:
            subject.step()
        measured = counted.bytes_sent()
        formula = sum(formula_bytes(work, tp=tp, sequence_parallel=layout != TP, split=layout == SPLIT).values())
        assert whose != OURS or measured == formula, f"{layout} sends {measured} bytes, and the formula has {formula}"
        calls = counted.calls()
        rows.append(
            (
                f"{layout}, {whose}",
                f"{measured / 1e6:.2f}",
                f"{formula / 1e6:.2f}",
                f"{measured / formula:.3f}",
                str(calls),
            )
        )
    return harness.table(("MB sent per rank and step", "counted", "formula", "ratio", "collectives"), rows)


def timed(all_subjects: Subjects, work: Work, world: Axis, pairs: int) -> str:
    """Tokens per second, speed-up over one process, and ours over torch's."""
    n = world.size
    sides = {at: Side(s.step, 1 if at[0] == ONE else n) for at, s in all_subjects.items() if at[0] != SPLIT}
    for layout in (TP, SP):
        sides[layout, FLOOR] = Side(_without_communication(all_subjects[layout, OURS].step, n), n)
    all_times = harness.in_turn(sides, world=world, rounds=pairs)
    rows = []
    for (layout, whose), times in all_times.items():
        alone = all_times[ONE, OURS if whose in (OURS, FLOOR) else PLAIN]
        rows.append(
            (
                f"{layout}, {whose}",
                f"{work.tokens / statistics.median(times.seconds):.0f}",
                *harness.milliseconds(times),
                str(harness.ratio(alone.seconds, times.seconds)),
                str(harness.ratio(times.seconds, all_times[layout, OURS].seconds)),
            )
        )
    return harness.table(("side", "tokens/s", *harness.MILLISECONDS, "speed-up over one process", "ours / this"), rows)


def _without_communication(step: Callable[[], Any], n: int) -> Callable[[], None]:
    def run() -> None:
        with local_copies(n):
            step()

    return run


def main(started: Started, work: Work, pairs: int) -> None:
    """One rank's part; rank 0 prints."""
    world = started.world
    mesh = Mesh.build(Layout(tp=world.size))
    all_subjects = subjects(work, mesh)
    say(world, f"{world.size} ranks on {dist.get_backend()}, one thread each, float32: {work}\n")
    say(
        world, law(all_subjects, work, world) + "\nlargest relative differences: float32 rounding, a law and no speed\n"
    )
    say(world, sent(all_subjects, work, world.size) + "\nideal bytes of the collectives issued; formula: ours\n")
    say(world, timed(all_subjects, work, world, pairs))
    say(
        world,
        f"medians of {pairs} rounds in turn (quartiles); speed-up: over the same side's own model on one process, one "
        "thread;\nours / this: tokens per second; best: the fastest round; CPU: of all ranks; local copies: the floor",
    )


def say(world: Axis, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    add_work(parser)
    parser.add_argument("--ranks", type=int, help="start so many here (default 2)")
    parser.add_argument("--pairs", type=int, default=7, help="timed rounds; each runs every side once")
    options = parser.parse_args()
    ranks = options.ranks if options.ranks or dist.is_torchelastic_launched() else 2
    start(main, work_of(options), options.pairs, ranks=ranks)

"""What is alive at once: whole weights at stage 3, gradients at stages 2 and 3. Freed for real.

The instrument is the profiler's record of every allocation and every end of one, resized storages included. Buffers are
told apart by their sizes: of U units of N elements in bfloat16 over 4 ranks, whole weights are 2N bytes, whole
gradients 4N (so is what a reduction receives), a rank's sum of them N; weights kept as shards are N / 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.checkpoint import checkpoint

from megalite.mesh import Layout, Mesh
from megalite.train.memory_timeline import read_tree
from megalite.train.recorder import Recorder
from megalite.zero import Zero
from tests.ranks import run
from tests.zero.training import adamw

WIDTH, HIDDEN, UNITS, DP = 24, 40, 6, 4
ELEMENTS = 2 * WIDTH * HIDDEN + 2 * WIDTH
WEIGHTS, GRADIENTS, SUM, SHARD = 2 * ELEMENTS, 4 * ELEMENTS, 4 * ELEMENTS // DP, 2 * ELEMENTS // DP


class Block(nn.Module):
    """Its matrices' gradients, and what else is computed here, have other sizes than the buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN, bias=False), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, *, recompute: bool, shared: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.scale = nn.Parameter(torch.ones(4))
        self.condition = nn.Parameter(torch.ones(WIDTH)) if shared else None
        self.blocks = nn.ModuleList(Block() for _ in range(UNITS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.condition is not None:
                x = x + self.condition
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.float().square().sum() * self.scale.sum()


class Live(NamedTuple):
    """Of buffers of each size: the most at once, the number at the end, and how many were ever there."""

    most: dict[int, int]
    left: dict[int, int]
    made: dict[int, int]


@contextmanager
def watched(found: list[Live]) -> Iterator[None]:
    with Recorder(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        yield
    tree = seen.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    changes, _ = read_tree(tree, device=torch.device("cpu"), names=set())
    live = Live({}, {}, {})
    for size in (WEIGHTS, GRADIENTS, SUM):
        held: set[int] = set()
        live.most[size] = live.made[size] = 0
        for change in changes:
            if change.nbytes == size:
                held.add(change.place)
                live.made[size] += 1
                live.most[size] = max(live.most[size], len(held))
            elif change.nbytes == -size:
                held.discard(change.place)
        live.left[size] = len(held)
    found.append(live)


class Options(NamedTuple):
    stage: int = 3
    prefetch: int = 1
    reshard: str = "forward"
    microbatches: int = 1
    recompute: bool = False
    shared: bool = False  # whether a parameter of the root is used between all units


class Seen(NamedTuple):
    """By step: what lived in its passes, what units hold after it, and how many had their sums when backward ended."""

    passes: list[Live]
    between: list[dict[str, int]]
    sums_in_time: list[int]


def steps(choices: list[Options]) -> list[Seen]:
    mesh = Mesh.build(Layout(dp=DP))
    found = []
    for one in choices:
        torch.manual_seed(0)
        model = Model(recompute=one.recompute, shared=one.shared).bfloat16()
        how = {"stage": one.stage, "units": (Block,), "prefetch": one.prefetch, "reshard": one.reshard}
        zero = Zero(model, mesh, optimizer=adamw, verify=False, **how)
        seen = Seen([], [], [])
        for number in range(2):
            with watched(seen.passes):
                zero.begin(microbatches=one.microbatches)
                for index in range(one.microbatches):
                    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(index + number))
                    model(x.bfloat16()).backward()
            seen.sums_in_time.append(sum(unit._sum is not None for unit in zero.units))
            zero.step(max_norm=1.0)
            for unit in zero.units:
                unit.wait()
            held: dict[str, int] = {}
            for unit in zero.units:
                for kind, tensors in unit.live().items():
                    held[kind] = held.get(kind, 0) + sum(tensor.untyped_storage().nbytes() for tensor in tensors)
            seen.between.append(held)
        found.append(seen)
    return found


ROOT = 4  # elements, padded to the ranks


WHOLE = [
    Options(prefetch=prefetch, microbatches=m, recompute=recompute, shared=shared)
    for prefetch, m, recompute, shared in [
        (0, 1, False, False),
        (1, 1, False, False),
        (1, 2, False, True),
        (1, 2, True, False),
        (2, 2, False, False),
    ]
]


def test_at_stage_3_weights_are_whole_of_1_plus_prefetch_units_at_once_and_of_the_root():
    """Also where all units are given what is one tensor, and where they are recomputed. And in the first step."""
    for rank in run(steps, DP, WHOLE, checked=False):
        for options, seen in zip(WHOLE, rank, strict=True):
            for live in seen.passes:
                assert live.most[WEIGHTS] == 1 + options.prefetch, options
                assert live.left[WEIGHTS] == 0
            root = 2 * (ROOT + (WIDTH if options.shared else 0))
            for held in seen.between:
                assert held == {
                    "weights": UNITS * SHARD + root,
                    "masters": UNITS * SUM + 2 * root // DP,
                    "gradients": 0,
                }


def test_without_reshard_after_forward_weights_stay_from_forward_to_backward_or_to_the_step():
    choices = [Options(reshard="backward", microbatches=2), Options(reshard="step", microbatches=2)]
    for rank in run(steps, DP, choices, checked=False):
        for options, seen in zip(choices, rank, strict=True):
            for live, held in zip(seen.passes, seen.between, strict=True):
                gathers = 1 if options.reshard == "step" else options.microbatches
                assert live.most[WEIGHTS] == UNITS and live.made[WEIGHTS] == gathers * UNITS
                assert live.left[WEIGHTS] == (UNITS if options.reshard == "step" else 0)
                assert held["weights"] == UNITS * SHARD + 2 * ROOT


CUT = [Options(stage=stage, microbatches=m) for stage in (2, 3) for m in (1, 3)]


def test_gradients_at_stages_2_and_3_are_the_open_unit_one_reduction_in_flight_and_the_shards():
    """One whole buffer: what is sent of a unit. The unit that backward is in has its gradients as they came, one a
    parameter. Of a shard's size are what is received of the other ranks and the sums, each made in one of these."""
    for rank in run(steps, DP, CUT, checked=False):
        for options, seen in zip(CUT, rank, strict=True):
            for live, held, in_time in zip(seen.passes, seen.between, seen.sums_in_time, strict=True):
                before = UNITS if options.microbatches > 1 else UNITS - 1
                assert live.most[GRADIENTS] == 1, options
                assert live.most[SUM] == before + DP - 1, options
                assert live.made[GRADIENTS] == UNITS * options.microbatches
                # Sent while backward went on: all but the last few units have their sums when it ends.
                assert in_time >= UNITS - 1
                assert held["gradients"] == 0


def test_gradients_at_stage_1_are_whole_and_one_reduction_in_flight():
    ranks = [seen for (seen,) in run(steps, DP, [Options(stage=1)], checked=False)]
    # The flats of all units were there before, and each sum is made in one of them.
    assert not any(live.made[size] for seen in ranks for live in seen.passes for size in (WEIGHTS, GRADIENTS))
    # Of the first step nothing is summed before its backward ends: it shows how often gradients come.
    assert all([live.most[SUM] for live in seen.passes] == [0, DP - 1] for seen in ranks)
    seen = ranks[0]
    assert seen.between[0]["gradients"] == 4 * (UNITS * ELEMENTS + ROOT)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_of_a_unit_is_made_again_where_it_is_kept(stage):
    (seen,) = run(steps, DP, [Options(stage=stage)], checked=False)[0]
    kept = {0: [WEIGHTS, GRADIENTS, SUM], 1: [WEIGHTS], 2: [WEIGHTS]}[stage]
    assert all(live.made[size] == 0 for live in seen.passes for size in kept)

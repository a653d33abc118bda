"""torch.distributed.pipelining's own orders, made without processes, beside ours of the same ranks, micro-batches and
stages: as soon at their end, and no more held. Schedule1F1B is left out: in torch 2.13 the order that it gives of its
last rank is not the one that it runs."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as theirs

from megalite.pipeline.catalogue import make
from megalite.pipeline.schedule import Action, Schedule
from megalite.pipeline.simulate import Costs, peaks, simulate

KINDS = {"F": "F", "I": "B", "W": "W", "B": "BW"}  # torch's letters; REDUCE_GRAD and the like are no passes
COSTS = [Costs(), Costs(3, 3, 2), Costs(4, 5, 4), Costs(2, 3, 1), Costs(latency=Fraction(1, 20))]
PAIRS = [
    ("gpipe", theirs.ScheduleGPipe, 1),
    ("interleaved", theirs.ScheduleInterleaved1F1B, 2),
    ("interleaved", theirs.ScheduleInterleaved1F1B, 3),
    ("bfs", theirs.ScheduleLoopedBFS, 2),
    ("bfs", theirs.ScheduleLoopedBFS, 3),
    ("interleaved_zb", theirs.ScheduleInterleavedZeroBubble, 2),
    ("interleaved_zb", theirs.ScheduleInterleavedZeroBubble, 3),
    ("zb_v", theirs.ScheduleZBVZeroBubble, 2),
    ("dualpipe_v", theirs.ScheduleDualPipeV, 2),
]


def of_torch(kind: type, ranks: int, microbatches: int, stages: int) -> Schedule | None:
    """The order of one of torch's classes; None where it refuses the numbers."""
    several = issubclass(kind, theirs.PipelineScheduleMulti)
    parts = [
        SimpleNamespace(num_stages=ranks * stages, group_size=ranks, group_rank=0, is_last=False, submod=None)
        for _ in range(stages)
    ]
    try:
        made = kind(parts if several else parts[0], microbatches, loss_fn=lambda output, target: output)
    except ValueError:
        return None
    order = made.pipeline_order if several else made._get_pipeline_order()
    rows = [
        tuple(
            Action(KINDS[each.computation_type.value], each.stage_index, each.microbatch_index)
            for action in order[rank]
            if action is not None
            for each in action.sub_actions or (action,)
            if each.computation_type.value in KINDS
        )
        for rank in range(ranks)
    ]
    holder = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    return Schedule(kind.__name__, tuple(rows), tuple(holder[stage] for stage in range(ranks * stages)))


@pytest.mark.parametrize(("name", "kind", "stages"), PAIRS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_ours_end_as_soon_as_torchs_and_hold_no_more(name, kind, stages, ranks):
    """Makespan and peaks equal, to the fraction, at any costs; but zb_v with fewer micro-batches than 2p - 1, for which
    torch leaves gaps where ours puts a W, ends sooner. (Not where a message takes as long as a pass: there a W put off
    is one that no rank has while it waits.)"""
    compared = 0
    for microbatches in {1, 2, ranks - 1 or 1, ranks, ranks + 1, 2 * ranks - 1, 2 * ranks, 3 * ranks + 2}:
        torchs = of_torch(kind, ranks, microbatches, stages)
        if torchs is None:
            continue
        ours = make(name, ranks=ranks, microbatches=microbatches, virtual_stages=stages)
        assert ours.rank_of == torchs.rank_of
        assert peaks(ours) == peaks(torchs)
        gaps = name == "zb_v" and microbatches < 2 * ranks - 1
        for costs in COSTS:
            sooner = simulate(torchs, costs).makespan - simulate(ours, costs).makespan
            assert sooner >= 0 if gaps else sooner == 0, (microbatches, costs)
        if gaps:
            assert simulate(ours).makespan < simulate(torchs).makespan or microbatches == 2 * ranks - 2
        compared += 1
    assert compared >= 2  # DualPipeV alone refuses all below 2p


@pytest.mark.parametrize(("name", "kind", "stages"), [pair for pair in PAIRS if pair[0] not in ("bfs", "zb_v")])
def test_most_are_the_same_rows(name, kind, stages):
    """bfs takes its backwards first in, first out, and torch's last in, first out; zb_v ends its W in another order."""
    for ranks, microbatches in ((1, 2), (2, 4), (3, 6), (4, 8), (4, 17)):
        torchs = of_torch(kind, ranks, microbatches, stages)
        if torchs is not None:
            assert make(name, ranks=ranks, microbatches=microbatches, virtual_stages=stages).rows == torchs.rows


@pytest.mark.parametrize(
    ("kind", "ranks", "microbatches"),
    [
        (theirs.ScheduleInterleaved1F1B, 4, 9),
        (theirs.ScheduleInterleavedZeroBubble, 4, 9),
        (theirs.ScheduleDualPipeV, 4, 7),
    ],
)
def test_what_torch_refuses_runs_here(kind, ranks, microbatches):
    """Groups that come out uneven, and fewer micro-batches than DualPipeV is shaped for."""
    assert of_torch(kind, ranks, microbatches, 2) is None
    name = {pair[1]: pair[0] for pair in PAIRS}[kind]
    assert simulate(make(name, ranks=ranks, microbatches=microbatches)).makespan > 0

"""The numbers that papers print of these schedules, from the schedules."""

from __future__ import annotations

from fractions import Fraction

import pytest

from megalite.pipeline.catalogue import make
from megalite.pipeline.lower import needs, result_of
from megalite.pipeline.schedule import Action, Schedule
from megalite.pipeline.simulate import Costs, peaks, simulate

# arXiv:2401.10241 ("zero bubble"): tables 9, in ms, and 5, bubble rates; chunks of one layer a rank from table 3
TABLES_9_AND_5 = [
    # p, m, (T_F, T_B, T_W), T_comm, chunks, 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-1p
    (8, 24, ("18.522", "18.086", "9.337"), "0.601", 3, 0.2431, 0.1055, 0.1585, 0.1083, 0.1585),
    (8, 32, ("18.513", "18.086", "9.331"), "0.626", 3, 0.1985, 0.0818, 0.1242, 0.0837, 0.1242),
    (8, 64, ("18.546", "18.097", "9.321"), "0.762", 3, 0.1240, 0.0443, 0.0674, 0.0444, 0.0674),
    (8, 24, ("29.718", "29.444", "19.927"), "0.527", 4, 0.2347, 0.0808, 0.1323, 0.0698, 0.1323),
    (8, 32, ("29.802", "29.428", "19.53"), "0.577", 4, 0.1898, 0.0628, 0.1045, 0.0559, 0.1045),
    (8, 64, ("29.935", "29.621", "19.388"), "0.535", 4, 0.1091, 0.0320, 0.0554, 0.0294, 0.0554),
]


@pytest.mark.parametrize("row", TABLES_9_AND_5)
def test_zero_bubbles_rates_follow_from_its_times_to_four_decimals(row):
    """ZB-1p, its search within the memory of 1F1B, found nothing better than ZB-H1 here. Not reproduced: ZB-2p, where
    it did within twice that; that is the outcome of a search over the measured times and no schedule by rule. Nor
    table 8: of its runs no times are published."""
    p, m, passes, latency, _, one_f_one_b, _, h1, h2, search = row
    costs = Costs(*map(Fraction, passes), latency=Fraction(latency))
    for name, rate in (("1f1b", one_f_one_b), ("zb_h1", h1), ("zb_h2", h2), ("zb_h1", search)):
        assert round(float(simulate(make(name, ranks=p, microbatches=m), costs).bubble_span), 4) == rate


@pytest.mark.parametrize("row", TABLES_9_AND_5)
def test_its_rates_of_interleaved_1f1b_leave_one_way_of_messages_out(row):
    """With one layer a chunk the first rank's span has p T_comm more than what the paper divides by."""
    p, m, passes, latency, chunks, _, interleaved, *_ = row
    whole, comm = [Fraction(each) for each in passes], Fraction(latency)
    costs = Costs(*(each / chunks for each in whole), latency=comm)
    schedule = make("interleaved", ranks=p, microbatches=m, virtual_stages=chunks)
    timeline = simulate(schedule, costs)
    span = max(timeline.span(rank) for rank in range(p)) - p * comm
    assert round(float(1 - m * sum(whole) / span), 4) == interleaved


@pytest.mark.parametrize("passes", [row[2] for row in TABLES_9_AND_5])
@pytest.mark.parametrize("p", [2, 8])
def test_zero_bubbles_table_2(p, passes):
    """Bubbles (p-1)(F+B+W), (p-1)(F+B-W), (p-1)(F+B-2W); activations p M_B, p M_B, (2p-1) M_B on the rank with most."""
    f, b, w = whole = [Fraction(each) for each in passes]
    for name, bubble, held in (
        ("1f1b", f + b + w, p),
        ("zb_h1", f + b - w, p),
        ("zb_h2", f + b - 2 * w, 2 * p - 1),
    ):
        schedule = make(name, ranks=p, microbatches=3 * p)
        assert simulate(schedule, Costs(*whole)).idle_span == (p - 1) * bubble
        m_b, m_w = 34 + 5 * 24 * 1024 // 2304, 32  # table 1's, a token and hidden; M_W < M_B
        most = max(peaks(schedule, until_input_gradient=m_b, until_weight_gradient=m_w))
        assert most == held * m_b


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_zero_bubbles_appendix_h_few_microbatches(p):
    """m <= p and W < B: 1F1B takes (m+p-1)(F+B+W), zero bubble (m+p-1)(F+B) + W."""
    f, b, w = passes = (3, 4, 2)
    for m in range(1, p + 1):
        for name, took in (
            ("1f1b", (m + p - 1) * (f + b + w)),
            ("zb_h1", (m + p - 1) * (f + b) + w),
            ("zb_h2", (m + p - 1) * (f + b) + w),
        ):
            assert simulate(make(name, ranks=p, microbatches=m), Costs(*passes)).makespan == took


@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_megatrons_bubble_in_parts_of_the_ideal_time(v):
    """(p-1) / (v m) (arXiv:2104.04473, section 2.2)."""
    p, m = 4, 12
    ideal = 3 * v * m
    looped = [make("interleaved", ranks=p, microbatches=m, virtual_stages=v)] if v > 1 else []
    for schedule in looped or [make("1f1b", ranks=p, microbatches=m), make("gpipe", ranks=p, microbatches=m)]:
        assert Fraction(simulate(schedule).idle_span, ideal) == Fraction(p - 1, v * m)


@pytest.mark.parametrize("v", [2, 3])
@pytest.mark.parametrize("d", [2, 4, 8])
def test_pipeoffloads_activations_of_interleaved_1f1b(d, v):
    """dv + d - 1 chunks on the first rank, about (v+1)/v of 1F1B's (arXiv:2503.01328, table 1). Not reproduced:
    3p - 2 for v = 2, as arXiv:2510.27257 has it, which is one fewer."""
    assert make("interleaved", ranks=d, microbatches=3 * d, virtual_stages=v).peaks[0] == d * v + d - 1


# arXiv:2405.15362 ("controllable memory")


@pytest.mark.parametrize("p", range(1, 9))
def test_controllable_memorys_exact_peaks(p):
    for name, most in (("v_min", (p + 4) // 3), ("v_half", (p + 2) // 2), ("zb_v", p)):
        assert max(peaks(make(name, ranks=p, microbatches=3 * p))) == most


@pytest.mark.parametrize("p", range(2, 9))
def test_controllable_memorys_bubbles(p):
    """In parts of 1F1B's 6 (p-1) passes of a chunk: zb_h1 a third, v_half a half, v_min two thirds, zb_v none; of its
    "about", one chunk at most is ours."""
    found = {
        name: simulate(make(name, ranks=p, microbatches=3 * p)).idle_span
        for name in ("1f1b", "zb_h1", "v_half", "v_min", "zb_v")
    }
    bubble = 2 * found["1f1b"]
    assert bubble == 6 * (p - 1)
    assert 2 * found["zb_h1"] == bubble / 3
    assert abs(found["v_half"] - bubble / 2) <= 1
    assert abs(found["v_min"] - 2 * bubble / 3) <= 1
    assert found["zb_v"] == 0


@pytest.mark.parametrize("p", [2, 4, 8])
def test_zb_vs_bubble_of_the_chunks_passes(p):
    """(p-1)(F+B-2W) where no message takes time (arXiv:2510.27257), at F = B."""
    schedule = make("zb_v", ranks=p, microbatches=2 * p)
    for forward, weight in ((1, 1), (3, 2), (5, 1)):
        idle = simulate(schedule, Costs(forward, forward, weight)).idle_span
        assert idle == (p - 1) * (2 * forward - 2 * weight)


# arXiv:2412.19437 (DeepSeek-V3), whose B is a whole backward, our B + W


def in_blocks(schedule: Schedule, costs: Costs) -> list[tuple[Fraction, Fraction]]:
    """Begin and end of each rank where a pair is one block, as DeepSeek-V3 draws it: it begins when both of its inputs
    are there, and both of its results leave at its end."""
    blocks: list[list[tuple[Action, ...]]] = []
    for row in schedule.rows:
        actions = iter(row)
        blocks.append([(each, next(actions)) if each in schedule.paired else (each,) for each in actions])
    ends: dict[Action, Fraction] = {}
    spans: dict[int, tuple[Fraction, Fraction]] = {}
    while any(blocks):
        before = len(ends)
        for rank, row in enumerate(blocks):
            while row and all(need in ends for action in row[0] for need in needs(action, schedule.stages)):
                block = row.pop(0)
                ready = max(
                    (ends[need] for each in block for need in needs(each, schedule.stages)), default=Fraction(0)
                )
                start = max(ready, spans[rank][1]) if rank in spans else ready
                end = start + sum(map(costs, block))
                ends |= {result_of(action): end for action in block}
                spans[rank] = (spans[rank][0] if rank in spans else start, end)
        assert len(ends) > before
    return [spans[rank] for rank in range(schedule.ranks)]


def test_deepseeks_figure_5_is_dualpipe_v_on_half_the_ranks_with_half_the_microbatches():
    """8 ranks, 20 micro-batches from both ends, 66 passes long, 6 of them idle. Folded, 4 ranks and 10 micro-batches
    are the same 60 passes of work on each and, as blocks, the same 66. Not reproduced: 6 on every rank. The two ends of
    a folded pipeline are one rank's, so its others begin a pass later each, and idle from 6 down to 3.

    Run one after the other, as here, a forward's message leaves at its own end, and half of the 6 are gone."""
    schedule = make("dualpipe_v", ranks=4, microbatches=10)
    spans = in_blocks(schedule, Costs())
    assert max(end for _, end in spans) == 66
    assert [end - start - 60 for start, end in spans] == [6, 5, 4, 3]
    assert simulate(schedule).makespan == 63 and simulate(schedule).idle_span == 3


@pytest.mark.parametrize("pp", [4, 8, 16])
def test_deepseeks_table_2(pp):
    """Bubbles: 1F1B (PP-1)(F+B), ZB1P (PP-1)(F+B-2W); activations PP for both. DualPipe (PP/2-1)(F&B+B-3W), PP + 1, two
    stages of PP a rank: of dualpipe_v on PP/2 ranks, at F = B - W, with F&B = F + B in one block. Not reproduced: its
    bubble with F&B shorter than that, of which no figure is printed; ours then is below the formula."""
    f, b, w = 4, 7, 3
    costs = Costs(f, b - w, w)
    for name, bubble in (("1f1b", f + b), ("zb_h1", f + b - 2 * w)):
        schedule = make(name, ranks=pp, microbatches=2 * pp)
        assert simulate(schedule, costs).idle_span == (pp - 1) * bubble
        assert max(schedule.peaks) == pp
    schedule = make("dualpipe_v", ranks=pp // 2, microbatches=pp + 2)
    work = (pp + 2) * 2 * (f + b)
    spans = in_blocks(schedule, costs)
    assert max(end - start for start, end in spans) - work == (pp // 2 - 1) * (f + b + b - 3 * w)
    assert set(schedule.peaks) == {pp + 1} and schedule.stages_per_rank == 2

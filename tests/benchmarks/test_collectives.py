"""The benchmark's arithmetic: bytes, bandwidths, the model of latency and bandwidth; a well-known case, done right."""

from __future__ import annotations

import json
import sys
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.collectives import (
    PRIMITIVES,
    Model,
    Record,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_factor,
    calls,
    elements,
    fit,
    main,
    models,
    plot,
    sent_bytes,
    table,
    times,
)
from megalite.mesh import Axis
from tests.counting import count
from tests.ranks import run

GIB = 2**30

# Stanford CS336, spring 2025, lecture 8: four GPUs, 400 MiB of float32, milliseconds of each of the four ranks.
LECTURE_RANKS = 4
LECTURE_BYTES = 104_857_600 * 4
LECTURE_ALL_REDUCE_MS = [2.14, 2.16, 2.11, 2.11]
LECTURE_REDUCE_SCATTER_MS = [4.06, 4.03, 3.92, 3.92]


def test_the_lectures_two_collectives_run_at_about_one_speed_once_the_full_tensor_is_counted():
    """The reduce-scatter was given four times the bytes of the all-reduce: 400 MiB were what each rank got out."""
    seconds = [min(LECTURE_ALL_REDUCE_MS) / 1e3, min(LECTURE_REDUCE_SCATTER_MS) / 1e3]
    all_reduce = bus_bandwidth("all_reduce", LECTURE_BYTES, seconds[0], ranks=LECTURE_RANKS)
    reduce_scatter = bus_bandwidth("reduce_scatter", LECTURE_RANKS * LECTURE_BYTES, seconds[1], ranks=LECTURE_RANKS)
    assert [round(all_reduce / 1e9), round(reduce_scatter / 1e9)] == [298, 321]
    assert [round(all_reduce / GIB), round(reduce_scatter / GIB)] == [278, 299]


def test_what_the_lecture_printed_is_gibibytes_and_for_reduce_scatter_the_output_alone():
    printed = [
        [bus_bandwidth(name, LECTURE_BYTES, ms / 1e3, ranks=LECTURE_RANKS) / GIB for ms in row]
        for name, row in (("all_reduce", LECTURE_ALL_REDUCE_MS), ("reduce_scatter", LECTURE_REDUCE_SCATTER_MS))
    ]
    # as printed; the times are rounded to 0.01 ms, which is 0.5 % of the shorter
    assert printed[0] == pytest.approx([273, 272, 278, 278], rel=0.01)
    assert printed[1] == pytest.approx([72, 73, 75, 75], rel=0.01)


def _bytes_counted(primitive: str, n: int) -> dict[str, float]:
    """side -> bytes that this rank sends in one run on 96 float32."""
    axis = Axis("world", n, dist.get_rank(), dist.group.WORLD)
    counted = {}
    for side, call in calls(primitive, torch.zeros(96), axis).items():
        with count() as c:
            call()
        counted[side] = c.bytes_sent()
    return counted


@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_the_bytes_of_the_formula_are_those_that_the_busiest_rank_sends_on_both_sides(primitive):
    n = 4
    by_rank = run(_bytes_counted, n, primitive, n)
    for side in by_rank[0]:
        assert max(counted[side] for counted in by_rank) == sent_bytes(primitive, 96 * 4, ranks=n)


def test_bandwidths_are_bytes_over_time_and_busbw_has_the_factors_of_nccl_tests():
    assert algorithm_bandwidth(8e9, 2.0) == 4e9
    assert bus_bandwidth("all_reduce", 8e9, 2.0, ranks=4) == 6e9
    assert {name: bus_factor(name, 8) for name in PRIMITIVES} == {
        "all_reduce": 14 / 8,
        "all_gather": 7 / 8,
        "reduce_scatter": 7 / 8,
        "all_to_all": 7 / 8,
        "broadcast": 1,
        "reduce": 1,
        "send_recv": 1,
    }
    with pytest.raises(ValueError, match="'allreduce'; there are all_reduce"):
        bus_factor("allreduce", 8)


SIZES = [4e3, 64e3, 1e6, 16e6, 256e6]


@given(alpha=st.floats(1e-6, 1e-2), beta=st.floats(1e8, 1e12))
def test_the_fit_finds_latency_and_bandwidth_again(alpha, beta):
    found = fit(SIZES, [alpha + b / beta for b in SIZES])
    for b in SIZES:  # each alone drowns where the other rules every size; the times they give do not
        assert found.seconds(b) == pytest.approx(alpha + b / beta, rel=1e-6)


def test_the_fit_weighs_a_short_and_a_long_transfer_alike():
    """Both ends 10 % off to the same side: an absolute fit would hold to the long one and miss the short by far."""
    seconds = [1e-4 + b / 1e9 for b in SIZES]
    seconds[0] *= 1.1
    seconds[-1] *= 1.1
    found = fit(SIZES, seconds)
    errors = [found.seconds(b) / t - 1 for b, t in zip(SIZES, seconds, strict=True)]
    assert max(map(abs, errors)) < 0.1


@pytest.mark.parametrize(
    ("sent", "seconds", "model"),
    [
        ([1e6], [1e-3], Model(0.0, 1e9)),
        ([1e6, 1e6], [1e-3, 1e-3], Model(0.0, 1e9)),
        ([1e6, 2e6], [1e-3, 4e-3], None),
        ([1e6, 2e6], [2e-3, 1e-3], None),
    ],
    ids=["one size", "one size twice", "negative latency", "negative slope"],
)
def test_neither_latency_nor_bandwidth_is_ever_negative(sent, seconds, model):
    found = fit(sent, seconds)
    assert found.alpha_seconds >= 0 and found.beta_bytes_per_second > 0
    assert model is None or found == pytest.approx(model)


def test_times_and_sizes_that_make_no_model_are_refused():
    for sent, seconds in [([], []), ([1.0], []), ([1.0], [0.0])]:
        with pytest.raises(ValueError, match="do not make a model"):
            fit(sent, seconds)


@pytest.mark.parametrize(("size", "expected"), [(4e3, 1000), (1, 4), (4010, 1004)])
def test_a_full_tensor_is_cut_evenly_and_is_about_as_large_as_asked(size, expected):
    assert elements("all_reduce", size, ranks=4, item_bytes=4) == expected


def _slow_on_the_last_rank() -> dict[str, float]:
    return times({"a": lambda: time.sleep(0.05 * dist.get_rank())}, device="cpu", warmup=1, repeats=3)


def test_every_rank_is_told_the_time_of_the_slowest():
    """A sleep takes at least its time, however busy the machine."""
    first, second = run(_slow_on_the_last_rank, 2)
    assert first == second and first["a"] >= 0.05


def test_the_command_measures_every_case_on_both_sides_and_prints_what_it_keeps(tmp_path, capfd):
    kept = tmp_path / "records.json"
    sizes = ["--bytes", "1e3,8e3", "--dtypes", "float32,bfloat16", "--warmup", "0", "--repeats", "1"]
    main(["--ranks", "2", *sizes, "--json", str(kept)])
    records = [Record(**row) for row in json.loads(kept.read_text())]
    cases = {(r.primitive, r.side, r.dtype, r.full_bytes) for r in records}
    assert len(cases) == len(records) == 2 * 2 * (2 * len(PRIMITIVES) - 1)  # reduce has no side of ours
    assert all(r.seconds > 0 and r.ranks == 2 and r.backend == "gloo" for r in records)
    assert table(records) in capfd.readouterr().out


def _made(ranks: int, alpha: float, beta: float) -> list[Record]:
    return [
        Record(ranks, "gloo", "float32", name, side, int(b), alpha + bus_factor(name, ranks) * b / beta)
        for name in ("all_reduce", "broadcast")
        for side in ("ours", "torch")
        for b in SIZES
    ]


def test_each_primitive_and_side_has_a_model_of_its_own_whose_bandwidth_is_the_busbw_of_long_transfers():
    found = models([*_made(2, 1e-4, 1e9), *_made(4, 1e-3, 2e9)])
    assert len(found) == 8
    for (ranks, *_), model in found.items():
        assert model == pytest.approx((1e-4, 1e9) if ranks == 2 else (1e-3, 2e9), rel=1e-6)


def test_the_plot_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    plot(_made(2, 1e-4, 1e9), str(tmp_path / "busbw.png"))
    assert (tmp_path / "busbw.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_runs_and_names_the_extra(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        main(["--ranks", "2", "--plot", "busbw.png"])
    assert "megalite[plot]" in capsys.readouterr().err

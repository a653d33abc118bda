"""What the header says of a run before it begins."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megalite.data import Baselines
from megalite.mesh import Layout
from megalite.models.config import GPTConfig, MLPConfig
from megalite.train.check import check
from megalite.train.config import ClusterConfig, Config, LayoutConfig, LinkConfig, PhaseConfig, PipelineConfig
from megalite.train.expect import expected_memory
from megalite.train.header import (
    Peak,
    describe_batches,
    describe_layout,
    describe_link,
    header_lines,
    peak_of,
    size_text,
)


def lines_of(config: Config, ranks: int = 1, *, peak: Peak | None = None, available: int | None = None) -> list[str]:
    config = check(config, ranks)
    return header_lines(
        config,
        config.layout.fit(ranks),
        where="cpu",
        data="a text",
        baselines=Baselines(3.0, 2.5),
        peak=peak or Peak(None, "n/a on the CPU"),
        available=available,
    )


def test_the_layout_says_who_sits_together():
    config = check(replace(Config(), layout=LayoutConfig(tp=2)), 4)
    title, head, *rows = describe_layout(config, config.layout.fit(4))
    assert title == "dp=2 x cp=1 x tp=2 x pp=1 = 4 ranks, sequence parallel; ZeRO stage 0"
    assert head.split() == ["axis", "ranks", "who", "sits", "together"]
    assert rows == ["tp        2  [0, 1] [2, 3]", "dp        2  [0, 2] [1, 3]"]
    assert len(describe_layout(check(Config(), 1), Layout())) == 1


def test_a_large_world_is_abbreviated_and_takes_no_time():
    """16384 ranks: to list every group would take minutes."""
    config = replace(Config(), layout=LayoutConfig(dp=2048, tp=8))
    _, _, tp, dp = describe_layout(config, Layout(dp=2048, tp=8))
    assert tp == (
        "tp        8  [0, 1, 2, 3, 4, 5, 6, 7] [8, 9, 10, 11, 12, 13, 14, 15] [16, 17, 18, 19, 20, 21, 22, 23] "
        "[24, 25, 26, 27, 28, 29, 30, 31] and 2044 more"
    )
    assert dp.startswith("dp     2048  [0, 8, 16, 24, ... 16376] [1, 9, 17, 25, ... 16377]")
    assert dp.endswith("and 4 more")


def test_a_slow_link_is_said_and_the_network_as_it_is_is_not():
    assert describe_link(LinkConfig()) == ""
    assert describe_link(LinkConfig("tp", 0.5, 2.0)) == "tp is slowed down to 0.5 GB/s and 2 ms"


def test_the_batch_is_counted_in_what_the_model_takes():
    config = check(replace(Config(), micro_batch_size=2), 2)
    assert describe_batches(config)[0].endswith("2 data ranks x 4 micro-batches x 2 sequences")
    config = check(replace(Config(), model=MLPConfig(), global_batch_size=128), 2)
    assert describe_batches(config) == ["128 vectors a step: 2 data ranks x 1 micro-batches x 64"]


def test_a_ramp_says_when_the_tokens_of_a_step_change():
    config = check(replace(Config(), global_batch_size_ramp=[[50, 32]], seq_len_ramp=[[80, 256]]), 1)
    first, second, third = describe_batches(config)
    assert first.startswith("16 sequences x 128 = 2,048 tokens a step")
    assert second.startswith("from step 50: 32 sequences x 128 = 4,096 tokens a step")
    assert third.startswith("from step 80: 32 sequences x 256 = 8,192 tokens a step")
    phases = replace(config, data=replace(config.data, phases=[PhaseConfig(20, ["b.txt"])]))
    assert describe_batches(phases)[1] == "from step 20: as before, of the next of data.phases"
    steep = replace(config, global_batch_size_ramp=[[step, 8 * step] for step in range(2, 60)])
    assert len(describe_batches(steep)) == 5 and "more changes" in describe_batches(steep)[3]


def test_memory_and_bytes_are_said_before_they_are_taken():
    lines = lines_of(replace(Config(), layout=LayoutConfig(tp=2)), 4, available=2**30)
    memory, sends = (next(line for line in lines if line.startswith(name)) for name in ("memory", "sends"))
    assert "of 1 GiB a rank expected, at the step's highest moment (output layer): weights 962 KiB" in memory
    assert "gradients 962 KiB, moments 1.88 MiB; activations kept 12 MiB (by arXiv:2205.05198 8.5 MiB)" in memory
    assert sends.split()[1:3] == ["tp", "6.26"] and "dp 963 KiB, world 48 B a step and rank" in sends
    assert not any(line.startswith("warning") for line in lines)


@pytest.mark.parametrize(
    ("model", "available", "way_out"),
    [(GPTConfig(), 40 * 2**20, "micro_batch_size"), (GPTConfig(hidden_size=4096), 2**20, "zero.stage=3")],
    ids=["activations", "weights"],
)
def test_more_than_there_is_is_one_warning_with_what_would_help(model, available, way_out):
    config = replace(Config(), model=model)
    *_, last = lines_of(config, available=available)
    assert last.startswith("warning: a rank is expected to need") and size_text(available) in last and way_out in last
    assert not any(line.startswith("warning") for line in lines_of(config, available=None))


def piped(schedule: str, *, ranks: int = 2, **changes) -> Config:
    base = {"layout": LayoutConfig(pp=ranks), "pipeline": PipelineConfig(schedule), "micro_batch_size": 2}
    return replace(Config(), **(base | {"model": GPTConfig(num_hidden_layers=2 * ranks)} | changes))


def test_a_pipeline_says_its_stages_its_bubble_and_what_it_holds():
    """By the formulas, one rank idle for F of the other: (p-1)(F+B+W) over m (F+B+W) and that."""
    schedule, times = [line for line in lines_of(piped("1f1b"), 2) if line.startswith(("pipeline", " "))][-2:]
    assert schedule == "pipeline 1f1b: 2 stages on 2 ranks, layers 2 2; 8 micro-batches"
    assert times.strip() == (
        f"by layers at F=B=W, messages taking no time: bubble {1 / 9:.1%} of the ranks' time; rank by rank "
        "activations of 2 1 micro-batches at most"
    )
    assert not any(line.startswith(("pipeline", "warning")) for line in lines_of(Config()))
    lines = lines_of(piped("zb_v", ranks=4, model=GPTConfig(num_hidden_layers=8)), 4)
    assert any("8 stages on 4 ranks, layers 1 1 1 1 1 1 1 1; 8 micro-batches" in line for line in lines)


def test_a_head_that_counts_as_layers_counts_in_the_bubble():
    even = piped("gpipe", model=GPTConfig(num_hidden_layers=6), pipeline=PipelineConfig("gpipe", head_layers=2))
    (line,) = (line for line in lines_of(even, 2) if line.startswith("pipeline"))
    assert "layers 4 2" in line
    assert any(f"bubble {1 / 9:.1%}" in line for line in lines_of(even, 2))


def test_what_waits_from_b_to_w_is_said_and_that_recomputation_does_not_save_it():
    said = "".join(lines_of(piped("zb_h1"), 2))
    assert "the backward is split: up to " in said and "wait from B to W" in said and "recompute=full" not in said
    said = "".join(lines_of(piped("zb_h1", recompute="full"), 2))
    assert "recompute=full does not make less; pipeline.schedule=1f1b and interleaved hold none" in said
    assert "B to W" not in "".join(lines_of(piped("1f1b", recompute="full"), 2))


def test_fewer_micro_batches_than_a_schedule_is_shaped_for_are_one_warning():
    *_, last = lines_of(piped("zb_h2", micro_batch_size=8), 2)
    assert last.startswith(
        "warning: pipeline.schedule=zb_h2 over layout.pp=2 has its small bubble from 3 micro-batches"
    )
    assert "there are 2" in last and "micro_batch_size" in last
    assert not any(line.startswith("warning") for line in lines_of(piped("zb_h2", micro_batch_size=4), 2))


def test_memory_is_that_of_the_first_rank_and_of_the_one_that_needs_most():
    """The head's logits are the last one's, in front of as many layers."""
    config = piped("gpipe", model=GPTConfig(num_hidden_layers=4, vocab_size=5000))
    lines = lines_of(config, 2, available=2**30)
    place = next(place for place, line in enumerate(lines) if line.startswith("memory"))
    first, last = (expected_memory(check(config, 2), pp_rank=rank) for rank in range(2))
    assert f"{size_text(first.total)} of 1 GiB a rank expected" in lines[place]
    each = f"activations kept {size_text(first.kept)} a micro-batch (by arXiv:2205.05198 "
    assert each in lines[place] and lines[place].endswith(f", in flight {size_text(8 * first.kept)}")
    assert lines[place + 1].strip() == f"most on rank 1 of pp: {size_text(last.total)} ({last.peak.name})"
    *_, warning = lines_of(config, 2, available=(first.total + last.total) // 2)
    assert warning.startswith(f"warning: a rank is expected to need {size_text(last.total)}")
    (sends,) = (line for line in lines if line.startswith("sends"))
    message = 8 * 2 * 128 * 128 * 4
    assert f"pp {size_text(message + 8)}" in sends and sends.endswith("a step and rank, where it is most")


def test_the_peak_and_the_formula_of_mfu_are_named():
    mfu = [line for line in lines_of(Config()) if line.startswith("mfu")]
    assert "n/a on the CPU" in mfu[0] and "2.95 MFLOP a token" in mfu[0] and "6 N + 12 heads head_dim keys" in mfu[0]
    given = check(replace(Config(), cluster=ClusterConfig(peak_tflops=2.5)), 1)
    assert peak_of(given, "cpu") == Peak(2.5, "cluster.peak_tflops")
    assert peak_of(Config(), "cpu").tflops is None
    assert "over 2.5 TFLOPS a rank (cluster.peak_tflops)" in "".join(lines_of(given, peak=peak_of(given, "cpu")))


@pytest.mark.parametrize(
    ("name", "tflops", "says"), [("NVIDIA H200", 989, "NVIDIA H200, bf16, dense"), ("Tesla T4", None, "Tesla T4")]
)
def test_a_gpu_s_peak_is_looked_up_and_one_that_is_unknown_is_said(monkeypatch, name, tflops, says):
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
    config = replace(Config(), precision=replace(Config().precision, compute="bf16"))
    peak = peak_of(config, "cuda:0")
    assert peak.tflops == tflops and says in peak.source


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (36, "36 B"), (1536, "1.5 KiB"), (1023 * 1024, "0.999 MiB"), (3 * 2**50, "3 PiB")]
)
def test_sizes_have_three_digits(size, text):
    assert size_text(size) == text

"""The benchmarks' arithmetic: what they compare is the same job, and what they count is what was sent."""

from __future__ import annotations

import math
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import (
    gpu,
    gpu_pipeline,
    gpu_zero,
    harness,
    linear,
    overlap,
    peers,
    pipeline,
    pipeline_sleeping,
    train,
    zero,
)
from benchmarks.harness import Side
from benchmarks.work import Work
from megalite.comm import start_all_gather, start_all_reduce, start_reduce_scatter
from megalite.mesh import Layout, Mesh
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT
from megalite.train.memory_timeline import Change
from tests.counting import count
from tests.pipeline.sleeping import Job as SleepingJob
from tests.ranks import run

# Float32 sums in another order: some 1e-7 of a tensor's largest entry, and a wrong term is far above.
ROUNDING = 1e-5
SLEEP_SECONDS = 0.2


def small_work(**changes: object) -> Work:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    return Work(GPTConfig(**{**sizes, **heads, **changes}), batch=4, seq=16)


# ---- the harness


def test_a_ratio_is_the_median_of_paired_ratios_and_not_the_ratio_of_medians() -> None:
    assert harness.ratio([1.0, 10.0, 6.0], [1.0, 5.0, 2.0]).median == 2
    assert harness.ratio([4.0], [2.0]) == (2, 2, 2)


def test_sides_run_in_turn_and_a_round_takes_what_its_slowest_rank_took() -> None:
    """Rank 1 sleeps, for long enough to be told from rank 0, and burns nothing."""
    for times, order in run(_in_turn, 2, checked=False):
        assert order == ["a", "b"] * 3  # one round to warm up, two that count
        assert all(len(side.seconds) == len(side.cpu_seconds) == 2 for side in times.values())
        assert all(seconds >= SLEEP_SECONDS for seconds in times["a"].seconds)
        assert all(seconds < SLEEP_SECONDS for seconds in times["a"].cpu_seconds)


def _in_turn() -> tuple[dict[str, harness.Times], list[str]]:
    world = Mesh.build(Layout(dp=2)).world
    order: list[str] = []

    def a() -> None:
        order.append("a")
        time.sleep(world.rank * SLEEP_SECONDS)

    sides = {"a": Side(a, 2), "b": Side(lambda: order.append("b"), 2)}
    return harness.in_turn(sides, world=world, rounds=2, warm_up=1), order


def test_a_side_of_one_rank_does_not_run_on_the_others() -> None:
    assert run(_steps_of_one_rank, 2, checked=False) == [2, 0]  # one to warm up, one that counts


def _steps_of_one_rank() -> int:
    steps: list[int] = []
    harness.in_turn({"one": Side(lambda: steps.append(1), 1)}, world=Mesh.build(Layout(dp=2)).world, rounds=1)
    return len(steps)


def test_a_table_is_aligned() -> None:
    lines = harness.table(("side", "ms"), [("ours", "7"), ("a longer one", "12345")]).splitlines()
    assert lines[0].endswith("   ms") and lines[2].endswith("    7")
    assert len({len(line) for line in lines}) == 1


# ---- linear


def test_all_sides_of_linear_compute_the_plain_model_on_one_process() -> None:
    """Ours and torch's plans. What torch's plan for sequence parallelism sends is seen below DTensor as well: four
    all-gathers and four reduce-scatters a layer, and one of each around each end of the model."""
    for differences, kinds in run(_sides_of_linear, 2, small_work(), checked=False):
        assert len(differences) == 8
        assert all(max(difference) < ROUNDING for difference in differences.values()), differences
        assert kinds == [4 * 2 + 2] * 2


def _sides_of_linear(work: Work) -> tuple[dict[tuple[str, str], linear.Difference], list[int]]:
    mesh = Mesh.build(Layout(tp=2))
    subjects = linear.subjects(work, mesh)
    differences = linear.differences(subjects, work, mesh.world)
    with harness.bytes_sent() as counted:
        subjects[linear.SP, linear.LOSS_PARALLEL].step()
    return differences, [counted.calls(kind) for kind in ("all_gather", "reduce_scatter")]


@pytest.mark.parametrize("tp", [2, 4])
def test_ours_send_exactly_what_the_formulas_say(tp: int) -> None:
    for sent in run(_sent, tp, small_work(), checked=False):
        assert all(counted == formula for counted, formula in sent), sent


def _sent(work: Work) -> list[tuple[float, float]]:
    mesh = Mesh.build(Layout(tp=dist.get_world_size()))
    sent = []
    for layout in (
        {"sequence_parallel": False},
        {"sequence_parallel": True},
        {"sequence_parallel": True, "split": True},
    ):
        subject = linear.ours(work, mesh, **layout)
        with count() as counted:
            subject.step()
        sent.append((counted.bytes_sent(), sum(linear.formula_bytes(work, tp=mesh.tp.size, **layout).values())))
    return sent


def test_the_formulas_are_those_of_the_papers() -> None:
    """8, 10 and 12 b s h (t-1)/t elements a layer; b = 4, s = 16, h = 32, 2 layers, float32."""
    activation = 4 * 16 * 32 * 4
    for sequence_parallel, split, factor in ((False, False, 8), (True, False, 10), (True, True, 12)):
        for tp in (1, 2, 4):
            parts = linear.formula_bytes(small_work(), tp=tp, sequence_parallel=sequence_parallel, split=split)
            assert parts["layers"] == 2 * factor * activation * (tp - 1) / tp


def test_the_floor_communicates_nothing_and_leaves_everything_as_it_was() -> None:
    for inside, shapes, after in run(_floor, 2, checked=False):
        assert (inside, after) == (0, 3)
        assert shapes == [(2, 6), (4, 6), (1, 6)]


def _floor() -> tuple[int, list[tuple[int, ...]], int]:
    tp, x = Mesh.build(Layout(tp=2)).tp, torch.ones(2, 6)

    def all_three() -> list[torch.Tensor]:
        return [start(x.clone(), tp).wait() for start in (start_all_reduce, start_all_gather, start_reduce_scatter)]

    with count() as inside, linear.local_copies(2):
        results = all_three()
    with count() as after:
        all_three()
    return inside.calls(), [tuple(result.shape) for result in results], after.calls()


def test_every_weight_of_our_gpt_has_its_place_in_the_plain_model() -> None:
    """All of them, once: the elements of both add up to the same number."""
    work = small_work()
    plain, model = peers.Llama(work.config), GPT(work.config)
    named = peers.in_our_names(dict(plain.named_parameters()), work.config)
    assert {name: x.shape for name, x in named.items()} == {name: x.shape for name, x in model.named_parameters()}
    assert sum(x.numel() for x in named.values()) == sum(x.numel() for x in plain.parameters())


# ---- train


def test_zero_and_ddp_train_the_same_weights() -> None:
    """The same batch, clipping and AdamW. Adam divides by the gradient's size, so rounding grows: 1e-3 of a weight."""
    found = run(train.speed, 2, small_work(), 1, checked=False)[0]
    assert set(found.differences) == set(train.SIDES)
    assert all(difference < 1e-3 for difference in found.differences.values()), found.differences


def test_peak_live_bytes_is_the_highest_sum_and_not_the_total() -> None:
    def allocate() -> None:
        first = torch.empty(1000)
        del first
        both = torch.empty(500), torch.empty(700)
        del both

    assert train.peak_live_bytes(allocate) == 4 * 1200


def test_a_peak_within_a_range_is_its_own_and_sees_memory_that_a_storage_takes_back() -> None:
    """1000 floats are held all along; 500 more within the first range, and 2000 within the second, by resize_."""

    def allocate() -> None:
        kept, flat = torch.empty(1000), torch.empty(2000)
        flat.untyped_storage().resize_(0)
        with torch.profiler.record_function("mine"):
            torch.empty(500)
        with torch.profiler.record_function("mine"):
            flat.untyped_storage().resize_(8000)
            flat.untyped_storage().resize_(0)
        del kept

    assert train.peaks_within(allocate, "mine") == [4 * 1500, 4 * 3000]


def test_memory_whose_end_nobody_saw_has_ended_where_other_memory_is_in_its_place() -> None:
    changes = [Change(1, 100, 50), Change(2, 200, 10), Change(3, 120, 60), Change(4, 200, -10), Change(5, 500, -7)]
    assert train.live_bytes(changes) == [(1, 50), (2, 60), (3, 70), (4, 60), (5, 60)]


def test_the_buckets_of_ddp_count_as_memory() -> None:
    """They are allocated in C++ and are as large as all gradients; the weights, sent to all, pass through a copy."""
    gradients = 4 * sum(parameter.numel() for parameter in GPT(small_work().config).parameters())
    for peak in run(_bytes_of_ddp, 2, small_work(), checked=False):
        assert gradients <= peak <= 3 * gradients


def _bytes_of_ddp(work: Work) -> int:
    model = GPT(work.config, mesh=Mesh.build(Layout(dp=2)))
    wrapped: list[torch.nn.Module] = []
    return train.peak_live_bytes(lambda: wrapped.append(torch.nn.parallel.DistributedDataParallel(model)))


# ---- zero


@pytest.mark.parametrize("stage", zero.STAGES)
def test_each_stage_and_its_peer_train_the_same_weights_and_ours_sends_what_the_formula_says(stage: int) -> None:
    """As above, 1e-3 of a weight. Beside the formula there is the norm's all-reduce, a few numbers. What a peer is
    asked to send is never less; at stage 1 torch sends every weight from its owner to all, half as much again."""
    work = small_work()
    found = run(zero.speed, 2, work, stage, 1, checked=False)[0]
    assert found.difference < 1e-3
    formula = zero.formula_bytes(work, stage, ranks=2)
    assert formula <= found.sent[zero.OURS] <= formula + 64
    assert found.sent[zero.PEER] >= (1.4 if stage == 1 else 1) * formula


def test_the_peak_of_a_step_holds_what_the_stage_says_and_no_more_than_its_activations() -> None:
    """Of P float32 bytes: weights, gradients and two moments, 4 P whole at stage 0; at stage 3 on 2 ranks the masters
    are the shards, and at least weights and moments of half of everything are there: 1.5 P."""
    work = small_work()
    weights = 4 * sum(parameter.numel() for parameter in GPT(work.config, device="meta").parameters())
    whole, spread = (max(run(zero.live, 2, work, stage, zero.OURS, checked=False)) for stage in (0, 3))
    assert whole >= 4 * weights
    assert 1.5 * weights <= spread < whole - weights


# ---- overlap


def test_the_table_of_overlap_holds_both_ways_against_what_arithmetic_says() -> None:
    job = overlap.Job(2, layers=2, forward_seconds=0.01, backward_seconds=0.02, gather_seconds=0.01)
    text = overlap.report([job], steps=1, drawn=True)
    assert text.splitlines()[2].startswith("stage 2") and "reductions" in text and "F0" in text


# ---- pipeline


@pytest.mark.parametrize(("name", "model"), [("1f1b", "gpt"), ("interleaved", "plain"), ("zb_v", "plain")])
def test_both_sides_of_the_pipeline_have_the_same_loss_and_gradients_and_send_what_the_formula_says(
    name: str, model: str
) -> None:
    job = pipeline.Job(name, model, small_work(num_hidden_layers=5), microbatches=4, head_layers=1)
    found = run(pipeline.speed, 2, job, 1, checked=False)
    assert all(one.difference < ROUNDING for one in found)
    for side in pipeline.SIDES:
        assert sum(one.sent[side] for one in found) == pipeline.formula_bytes(job)
    ours, torchs = (max(one.losses[side] for one in found) for side in pipeline.SIDES)
    assert math.isclose(ours, torchs, rel_tol=ROUNDING)


def test_the_table_of_sleeping_stages_has_each_schedule_beside_the_simulator() -> None:
    jobs = [SleepingJob(name, 2, 2, *[0.002] * 3) for name in ("1f1b", "zb_v")]
    lines = pipeline_sleeping.report(jobs, repeats=1).splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["1f1b", "zb_v"]
    assert "simulator says" in lines[-1]


# ---- gpu


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("AMD Instinct MI300X", 1300),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_the_peak_is_that_of_the_named_device_and_of_no_slower_one(name: str, tflops: float | None) -> None:
    assert gpu.peak_flops(name) == (None if tflops is None else tflops * 1e12)


def test_token_flops_are_the_matrix_products_of_forward_and_backward() -> None:
    """Counted by torch on explicit attention, whose products are whole: 2 FLOPs a multiply-add, backward twice forward.
    The formula counts the norms' few weights as products too, hence 1%."""
    work = small_work(attn_implementation="eager", num_key_value_heads=8)
    model = GPT(work.config)
    with FlopCounterMode(display=False) as counted:
        model(None, work.microbatch()).backward()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    formula = gpu.token_flops(work.config, parameters=parameters, seq=work.seq) * work.tokens
    assert math.isclose(counted.get_total_flops(), formula, rel_tol=0.01)


def test_the_law_of_the_gpu_part_holds_on_the_cpu_and_its_bounds_catch_a_wrong_gradient() -> None:
    errors = run(gpu.law, 2, small_work(vocab_size=97), "cpu", checked=False)[0]
    assert len(errors) == 6
    gpu.report_law(errors)
    wrong = {**errors, "float32, tp": gpu.Error(errors["float32, tp"].loss, 0.5)}  # a summand of two left out
    with pytest.raises(SystemExit, match="float32, tp"):
        gpu.report_law(wrong)


def test_the_gpu_part_trains_in_bfloat16_and_reports_mfu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with what is asked of the GPU answered here: 1 TFLOP in 1 s on a device of 989.4 TFLOP/s."""
    answers = {"synchronize": None, "get_device_name": "NVIDIA H100 80GB HBM3", "max_memory_allocated": 5 * 10**9}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    work = small_work()
    found = run(gpu.train, 1, work, "cpu", 2, 60.0, checked=False)[0]
    assert found.parameters == sum(parameter.numel() for parameter in GPT(work.config).parameters())
    flops = gpu.token_flops(work.config, parameters=found.parameters, seq=work.seq) * work.tokens
    row = gpu.report_speed(found._replace(seconds=flops / 1e12), work).splitlines()[2]
    assert row.split()[-3:] == [f"{1 / 989.4:.3f}", "1.0", "5.0"]


def test_the_gpu_part_of_zero_finds_all_stages_equal_on_the_cpu_and_a_wrong_one_not() -> None:
    """float32: sums in another order, over three steps and two of warm-up."""
    found = run(gpu_zero.train, 2, small_work(), "cpu", 2, torch.float32, checked=False)[0]
    assert gpu_zero.report(found, dtype=torch.float32, allowed=1e-4).count("\nstage ") == 4
    wrong = [*found[:3], found[3]._replace(norms=[norm * 1.01 for norm in found[3].norms])]
    with pytest.raises(SystemExit, match="the stages do not agree"):
        gpu_zero.report(wrong, dtype=torch.float32, allowed=1e-4)


def test_the_gpu_part_of_pipelines_finds_all_schedules_equal_on_the_cpu_and_a_wrong_one_not() -> None:
    work = small_work(num_hidden_layers=5)
    found = run(gpu_pipeline.train, 2, work, "cpu", 1, torch.float32, checked=False)[0]
    allowed = ROUNDING, ROUNDING
    text = gpu_pipeline.report(found, dtype=torch.float32, allowed=allowed)
    assert all(f"\n{name} " in text for name in gpu_pipeline.SCHEDULES)
    with pytest.raises(SystemExit, match="not what one process computes: zb_v"):
        wrong = [one._replace(gradients=0.5) if one.name == "zb_v" else one for one in found]
        gpu_pipeline.report(wrong, dtype=torch.float32, allowed=allowed)


def test_without_a_gpu_its_benchmark_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    gpu.main([])
    assert capsys.readouterr().out.count("\n") == 1


def test_the_gpu_part_trains_the_preset_of_half_a_billion_parameters() -> None:
    config = gpu.model_config("llama-0.5b")
    model = GPT(config, device="meta")
    assert round(sum(parameter.numel() for parameter in model.parameters()) / 1e9, 1) == 0.5

"""What one rank of a pipeline holds: of parameters, of activations, from B to W, and at the highest moment."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.comm import start_all_reduce
from megalite.cost.activations import handed_on, stage_activations
from megalite.cost.deferred import deferred_activations
from megalite.cost.in_flight import Load, beside, most_in_flight, posted_receives
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.pipeline.schedule import held_at_most, parse
from megalite.pipeline.v_shaped import zb_v
from megalite.spec import init_parameters
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, LossConfig, PipelineConfig, PrecisionConfig, ZeroConfig
from megalite.train.expect import cut_of, expected_memory, expected_of_all, pass_of
from megalite.train.memory_measure import MemoryCheck, Survivors, live_bytes
from megalite.train.model import build_stages
from megalite.train.spans import spans_of
from megalite.weight_grad import WeightGradStore
from tests.cost.pipelines import Rank
from tests.cost.test_activations import ODD, RECOMPUTE, SHAPES, a_microbatch
from tests.cost.test_activations import config_of as alone
from tests.cost.test_memory import MODELS, exact
from tests.cost.test_peak import LARGE, recorded_peaks
from tests.ranks import run

BF16 = PrecisionConfig("bf16")


def config_of(model: GPTConfig | MLPConfig, ranks: int, schedule: str = "1f1b", *, split=None, **changes) -> Config:
    """On two ranks of pp unless `layout` says otherwise; 5 layers, so that stages are uneven."""
    base = {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 4 * ranks, "verify": False, "precision": BF16}
    base |= {"layout": LayoutConfig(pp=2), "pipeline": PipelineConfig(schedule, split=split)}
    return check(replace(Config(), model=replace(model, num_hidden_layers=5), **(base | changes)), ranks)


def measured(config: Config) -> tuple[int, int, dict[str, int]]:
    """This rank's places among those that share and on pp, and the bytes of its first step."""
    rank = Rank.build(config)
    told: list[dict[str, int]] = []
    with MemoryCheck(rank.stages, rank.zero, peak=False, done=told.append, offload=config.zero.offload):
        rank.backward()
        rank.zero.reduce()
        gradients = live_bytes(rank.zero)["gradients"]
        rank.zero.step()
        between = live_bytes(rank.zero)["gradients"]
    (found,) = told
    return (
        rank.zero.units[0].shards.rank if rank.zero.units else 0,
        rank.mesh.pp.rank,
        found | {"gradients": gradients, "gradients_between": between},
    )


def all_measured(configs: list[Config]) -> list[tuple[int, int, dict[str, int]]]:
    return [measured(config) for config in configs]


def assert_they_hold_what_is_expected(configs: list[Config], ranks: int) -> None:
    for of_rank in run(all_measured, ranks, configs, checked=False):
        for config, (shard_rank, pp_rank, found) in zip(configs, of_rank, strict=True):
            need = expected_memory(config, shard_rank=shard_rank, pp_rank=pp_rank)
            which = (config.model, config.pipeline, config.zero, config.recompute, pp_rank)
            assert found == exact(need.state) | {"kept": need.kept}, which


def test_every_placement_holds_what_is_expected_to_the_byte():
    """A tied weight is there once where both ends lie on one rank, and on both ranks where they do not."""
    cases = [(model, "1f1b", None) for model in MODELS.values()]
    cases += [(MODELS["gpt2"], schedule, split) for schedule, split in (("gpipe", [0, 5]), ("zb_h1", [5, 0]))]
    cases += [(MODELS["gpt2"], "zb_v", None), (MODELS["gpt2"], "interleaved", [2, 1, 1, 1])]
    cases += [(MODELS["mlp"], "zb_v", [1, 2, 1, 1]), (MODELS["mlp"], "gpipe", [5, 0])]
    cases += [(replace(MODELS["mlp"], hidden_act="relu"), "1f1b", None)]
    assert_they_hold_what_is_expected([config_of(model, 2, how, split=split) for model, how, split in cases], 2)


def test_recomputation_and_dropout_keep_of_a_stage_what_is_expected_to_the_byte():
    dropped = replace(MODELS["gpt2"], embd_pdrop=0.1)
    models = [MODELS["gpt2"], MODELS["llama"], MODELS["olmo2"], dropped, replace(dropped, resid_pdrop=0.1)]
    ways = {"norm, activation": "zb_v", "norm, mlp": "1f1b", "full": "interleaved", "every second": "zb_v"}
    configs = [config_of(model, 2, how, **RECOMPUTE[again]) for model in models[:3] for again, how in ways.items()]
    configs += [config_of(model, 2, **RECOMPUTE["full"]) for model in models[3:]]
    assert_they_hold_what_is_expected(configs, 2)


def kept_with_tensor_ranks(configs: list[Config]) -> list[tuple[int, int]]:
    """This rank's place on pp, and what its stages keep of inputs of the right size."""
    kept = []
    for config in configs:
        rank, total = Rank.build(config), 0
        cut, micro = cut_of(config, rank.mesh.pp.rank), pass_of(config, spans_of(config)[0])
        for stage, part in zip(rank.stages.values(), cut.stages(config.model), strict=True):
            batch, x = a_microbatch(config), None
            if not part.is_first:
                width = handed_on(config.model, cut, micro, part.layers.start) // (2 * micro.value_bytes)
                shape = (2, -1, 16) if isinstance(config.model, GPTConfig) else (2, -1)
                x = torch.ones(2, width, dtype=torch.float32).view(shape)
                if cut.sequence_parallel:  # in the order in which it is sent
                    x = x.transpose(0, 1).contiguous().transpose(0, 1)
                x.requires_grad_()
            with Survivors() as survivors:
                y = stage(x, batch)
            for _ in range(8):  # until then one of Gloo's threads holds what the last collective moved
                start_all_reduce(torch.zeros(1), rank.mesh.tp).wait()
            total += survivors.nbytes() - y.nbytes + (0 if x is None else x.nbytes)
        kept.append((rank.mesh.pp.rank, total))
    return kept


def test_with_tensor_ranks_a_stage_keeps_what_is_expected_to_the_byte():
    """Each stage by itself: what came from the one before lies in the sequence's order, as it was embedded."""
    fp32 = {"precision": PrecisionConfig("fp32")}
    configs = [
        config_of(MODELS[name], 4, how, layout=LayoutConfig(tp=2, pp=2, sequence_parallel=parallel), **fp32, **again)
        for name in ("one key head", "gpt2", "olmo2")
        for how, parallel, again in (("1f1b", True, {}), ("zb_v", False, {}), ("zb_v", True, RECOMPUTE["every second"]))
    ]
    configs += [config_of(MODELS["mlp"], 4, "zb_v", split=[1, 2, 1, 1], layout=LayoutConfig(tp=2, pp=2), **fp32)]
    for of_rank in run(kept_with_tensor_ranks, 4, configs, checked=False):
        for config, (pp_rank, found) in zip(configs, of_rank, strict=True):
            assert found == expected_memory(config, pp_rank=pp_rank).kept, (config.model, config.pipeline, pp_rank)


def test_data_ranks_of_a_stage_share_what_it_holds():
    zeros = [ZeroConfig(stage=stage) for stage in range(4)] + [ZeroConfig(stage=2, offload=True)]
    configs = [config_of(MODELS["gpt2"], 4, how, zero=zero) for zero in zeros for how in ("1f1b", "zb_v")]
    assert_they_hold_what_is_expected(configs, 4)


def deferred_bytes(config: Config) -> int:
    """Measured: what a model's B leaves, beside the batch and gradients that it has brought to their end."""
    model = build_stages(config, mesh=Mesh.build())[0]
    init_parameters(model, 0)
    batch, store = a_microbatch(config), WeightGradStore()
    with Survivors() as survivors:
        loss = model(None, batch)
        with store.open():
            (loss * 1.0).backward()
        del loss
    done = sum(parameter.grad.nbytes for parameter in model.parameters() if parameter.grad is not None)
    held = survivors.nbytes() - done
    store.run()
    return held


@pytest.mark.parametrize("shape", [*SHAPES, "eager", "relu", "mlp"])
def test_from_b_to_w_inputs_and_gradients_of_products_are_held_to_the_byte(shape):
    """However little was kept for B: with full recomputation they are 16 times that."""
    model = MLPConfig(hidden_size=64, num_hidden_layers=3) if shape == "mlp" else (SHAPES | ODD)[shape]
    ways = [{}, {"loss": LossConfig(chunk_tokens=7)}, RECOMPUTE["full"], RECOMPUTE["norm, mlp"]]
    for changes in ways if shape != "mlp" else ways[:1]:
        config = alone(model, precision=BF16, **changes)
        cut = cut_of(config)
        (part,) = cut.stages(model)
        assert deferred_bytes(config) == deferred_activations(model, cut, pass_of(config, spans_of(config)[0]), part), (
            changes
        )


def test_a_gpt_2_block_holds_sixteen_values_a_token_and_channel_from_b_to_w():
    wide = replace(SHAPES["gpt2"], intermediate_size=4 * 64)
    of_layers = {}
    for layers in (2, 3):
        config = alone(replace(wide, num_hidden_layers=layers), precision=BF16, recompute="full")
        cut, micro = cut_of(config), pass_of(config, spans_of(config)[0])
        of_layers[layers] = [
            work(config.model, cut, micro, cut.parts[0]) for work in (deferred_activations, stage_activations)
        ]
    message = 3 * 32 * 64 * 2
    assert [more - less for more, less in zip(of_layers[3], of_layers[2], strict=True)] == [16 * message, message]


def test_what_is_in_flight_is_counted_along_the_row():
    """With passes of one byte each, the schedules' own count; messages wait until something comes from their reader."""
    schedule = zb_v(4, 8)
    for rank in range(4):
        ones = {stage: Load(1, 1, 0, 0) for stage in schedule.stages_of(rank)}
        assert most_in_flight(schedule, rank, ones) == held_at_most(schedule.rows[rank])
    two = parse("F0@0 F1@0 B0@0 BW1@0 W0@0\nF0@1 BW0@1 F1@1 BW1@1")
    load = {0: Load(kept=100, deferred=10, reads=0, gives=1)}
    assert beside(two, 0, load) == {("F", 0): 101, ("B", 0): 100, ("BW", 0): 10, ("W", 0): 0}
    assert most_in_flight(two, 0, load) == 200 and posted_receives(two, 0, load) == 1
    assert beside(two, 1, {1: Load(100, 10, reads=1, gives=0)}) == {("F", 1): 0, ("BW", 1): 0}


def large(name: str, ranks: int, schedule: str, recompute: str = "none", **changes) -> Config:
    base = {"seq_len": 128, "micro_batch_size": 4, "global_batch_size": 8 * ranks, "pipeline": PipelineConfig(schedule)}
    base |= {"layout": LayoutConfig(pp=2), "precision": BF16, "verify": False, **RECOMPUTE[recompute]}
    return check(replace(Config(), model=replace(LARGE[name], num_hidden_layers=4), **(base | changes)), ranks)


def all_peaks(configs: list[Config]) -> list[int]:
    ranks = [Rank.build(config) for config in configs]
    return recorded_peaks([(list(rank.stages.values()), rank.zero, rank.step) for rank in ranks], times=2)


def assert_peaks(configs: list[Config], ranks: int) -> None:
    for number, of_rank in enumerate(run(all_peaks, ranks, configs, checked=False, timeout=100)):
        for config, found in zip(configs, of_rank, strict=True):
            need = expected_memory(config, pp_rank=2 * number // ranks)  # pp is outermost
            within = 0.1 if config.recompute == "none" else 0.15
            assert need.total == pytest.approx(found, rel=within), (config.pipeline, need.peak, number)


@pytest.mark.parametrize("model", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_the_highest_moment_of_each_rank_of_a_pipeline(model):
    """Within 10%, 15% where blocks are computed again; mostly within 3%."""
    schedules = ("1f1b", "zb_h1", "zb_v", "interleaved")
    configs = [large(model, 2, schedule, again) for schedule in schedules for again in ("none", "full")]
    assert_peaks(configs, 2)


@pytest.mark.slow
def test_the_highest_moment_of_tensor_and_data_ranks_of_a_pipeline():
    tensor = {"layout": LayoutConfig(tp=2, pp=2, sequence_parallel=True), "precision": PrecisionConfig("fp32")}
    tensor |= {"global_batch_size": 16}
    configs = [large("llama", 4, "1f1b", again, **tensor) for again in ("none", "full")]
    configs += [large("llama", 4, "zb_v", **tensor)]
    configs += [large("llama", 4, how, zero=ZeroConfig(stage=stage)) for how, stage in (("1f1b", 2), ("zb_v", 3))]
    assert_peaks(configs, 4)


def test_a_split_backward_costs_full_recomputation_what_it_saves():
    """1f1b holds the blocks' inputs of each micro-batch, zb_h1 what their products read as well."""
    needs = {how: expected_of_all(large("gpt2", 2, how, "full")) for how in ("1f1b", "zb_h1")}
    assert [need.deferred for need in needs["1f1b"]] == [0, 0]
    assert all(need.deferred for need in needs["zb_h1"])
    assert needs["zb_h1"][1].in_flight > 3 * needs["1f1b"][1].in_flight


def test_the_first_rank_of_1f1b_holds_most_micro_batches():
    needs = expected_of_all(large("llama", 4, "1f1b", layout=LayoutConfig(pp=4)))
    assert [round(need.in_flight / need.kept) for need in needs] == [4, 3, 2, 1]


def test_what_stages_keep_adds_up_to_what_the_model_keeps():
    """Each has cos and sin of its own; the input of a stage is what the one before gave."""
    whole = alone(SHAPES["llama"], precision=BF16, micro_batch_size=1)
    halves = check(replace(whole, layout=LayoutConfig(pp=2)), 2)
    cosines_and_sines = 32 * 16 * 4
    assert sum(need.kept for need in expected_of_all(halves)) == expected_memory(whole).kept + cosines_and_sines

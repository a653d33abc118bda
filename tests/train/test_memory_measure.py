"""A run measures its own memory in its first two steps, says it beside what was expected, and stays the same run."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.models.config import GPTConfig
from megalite.train.config import Config, LayoutConfig, PipelineConfig, PrecisionConfig, ZeroConfig
from megalite.train.expect import expected_memory
from megalite.train.header import describe_measured
from megalite.train.memory_measure import MemoryCheck, highest
from megalite.train.memory_timeline import Change
from megalite.zero import Zero
from tests.cost.pipelines import Rank
from tests.cost.test_activations import SHAPES, a_microbatch, config_of
from tests.cost.test_memory import build
from tests.ranks import run

EXACT = ("weights", "masters", "gradients", "moments", "host")


def train(config: Config, model: torch.nn.Module, zero: Zero, steps: int) -> None:
    each = config.micro_batch_size or config.global_batch_size // config.layout.dp
    number = config.global_batch_size // config.layout.dp // each
    for _ in range(steps):
        zero.begin(microbatches=number)
        for _ in range(number):
            model(None, a_microbatch(config)).backward()
        zero.step(max_norm=1.0)
        model.eval()  # an evaluation in between is none of a step's forwards
        with torch.no_grad():
            model(None, a_microbatch(config))
        model.train()


def found(config: Config, steps: int, *, peak: bool) -> list[dict[str, int]]:
    """What the check told, and when it tells nothing more."""
    model, zero = build(config)
    told: list[dict[str, int]] = []
    with MemoryCheck({0: model}, zero, peak=peak, done=told.append, offload=config.zero.offload):
        train(config, model, zero, steps)
    return told


@pytest.mark.parametrize("recompute", [{}, {"recompute": "full"}])
def test_what_is_measured_is_what_was_expected(recompute):
    config = config_of(SHAPES["llama"], micro_batch_size=1, precision=PrecisionConfig("bf16"), **recompute)
    need = expected_memory(config)
    (measured,) = found(config, 4, peak=True)
    assert {kind: measured[kind] for kind in EXACT} == {kind: getattr(need.state, kind) for kind in EXACT}
    assert measured["kept"] == need.kept
    assert measured["peak"] == pytest.approx(need.total, rel=0.1)


@pytest.mark.parametrize(
    ("steps", "peak", "kinds"), [(0, True, None), (1, True, "kept"), (2, True, "peak"), (3, False, "kept")]
)
def test_a_short_run_tells_what_it_has_seen(steps, peak, kinds):
    told = found(config_of(SHAPES["llama"], precision=PrecisionConfig("bf16")), steps, peak=peak)
    assert len(told) == (kinds is not None)
    assert all(kinds in measured and ("peak" in measured) == (kinds == "peak") for measured in told)


def measured_on_ranks(config: Config) -> dict[str, int]:
    (measured,) = found(config, 2, peak=False)
    return measured


def measured_in_a_pipeline(config: Config) -> tuple[int, dict[str, int]]:
    rank = Rank.build(config)
    told: list[dict[str, int]] = []
    with MemoryCheck(rank.stages, rank.zero, peak=True, done=told.append):
        for _ in range(3):
            rank.step()
    (found,) = told
    return rank.mesh.pp.rank, found


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_a_rank_of_a_pipeline_measures_one_micro_batch_in_each_of_its_stages(schedule):
    model = replace(SHAPES["gpt2"], num_hidden_layers=5, vocab_size=500, hidden_size=128)
    changes = {"precision": PrecisionConfig("bf16"), "micro_batch_size": 4, "seq_len": 128, "global_batch_size": 16}
    pipeline = {"layout": LayoutConfig(pp=2), "pipeline": PipelineConfig(schedule)}
    config = config_of(model, 2, **changes, **pipeline)
    for pp_rank, found in run(measured_in_a_pipeline, 2, config, checked=False):
        need = expected_memory(config, pp_rank=pp_rank)
        assert {kind: found[kind] for kind in EXACT} == {kind: getattr(need.state, kind) for kind in EXACT}
        assert found["kept"] == need.kept
        assert found["peak"] == pytest.approx(need.total, rel=0.1)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_gradients_are_seen_where_they_are_there(stage):
    """At stages 2 and 3 between steps there are none."""
    config = config_of(SHAPES["llama"], 2, zero=ZeroConfig(stage=stage), global_batch_size=4)
    (measured, _) = run(measured_on_ranks, 2, config, checked=False)
    state = expected_memory(config).state
    assert {kind: measured[kind] for kind in EXACT} == {kind: getattr(state, kind) for kind in EXACT}


def test_the_run_stays_the_same_to_the_bit_and_no_hook_stays():
    config = config_of(SHAPES["gpt2"])
    weights = []
    for checks in (False, True):
        model, zero = build(config)
        if checks:
            with MemoryCheck({0: model}, zero, peak=True, done=lambda _: None):
                train(config, model, zero, 3)
        else:
            train(config, model, zero, 3)
        weights.append(torch.cat([unit.masters for unit in zero.units]))
    assert torch.equal(*weights)
    model, zero = build(config)
    before = len(model._forward_hooks), len(model._forward_pre_hooks)
    with pytest.raises(KeyboardInterrupt), MemoryCheck({0: model}, zero, peak=True, done=lambda _: None):
        raise KeyboardInterrupt
    assert (len(model._forward_hooks), len(model._forward_pre_hooks)) == before


def test_measured_and_expected_stand_beside_each_other():
    need = expected_memory(config_of(GPTConfig()))
    measured = {kind: getattr(need.state, kind) for kind in EXACT} | {"kept": need.kept, "peak": need.total * 11 // 10}
    first, second = describe_measured(need, measured)
    assert first.startswith("memory   measured on rank 0: weights") and first.count("(as expected)") == 3
    assert "activations kept" in second and "(as expected)" in second and "+10.0%)" in second


def test_an_end_that_nobody_saw_is_seen_when_its_place_is_taken_again():
    """Nor does what was there before, and is freed now, make room for what is counted."""
    assert highest([Change(0, 1, 10), Change(1, 2, 5), Change(2, 1, 10), Change(3, 9, -100), Change(4, 3, 2)]) == 17
    assert highest([]) == 0

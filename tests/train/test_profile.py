"""A profile shows what a run does, and changes none of it."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megalite.comm import Call, Observer, observe
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import Microbatch
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, PipelineConfig, PrecisionConfig, ProfileConfig
from megalite.train.launch import World
from megalite.train.memory_timeline import KINDS
from megalite.train.model import build_stages, build_zero
from megalite.train.profile import Profile
from megalite.train.strict import ConfigError
from tests.ranks import run
from tests.train.composing import ROOT

PROGRAM = importlib.util.spec_from_file_location("train_program", ROOT / "train.py")
train = importlib.util.module_from_spec(PROGRAM)
PROGRAM.loader.exec_module(train)

MICROBATCHES, BATCH, SEQ = 2, 4, 32
# Not narrower than its vocabulary: else the logits, at the end of forward, are more than any layer's backward needs.
GPT = GPTConfig(hidden_size=64, intermediate_size=128, vocab_size=64, num_hidden_layers=2, resid_pdrop=0.1)


def config_of(out_dir: Path, steps: list[int], **changes) -> Config:
    profile = ProfileConfig(steps, **changes.pop("profile", {}))
    base = Config(model=GPT, seq_len=SEQ, global_batch_size=MICROBATCHES * BATCH, steps=4, profile=profile)
    return check(replace(base, out_dir=str(out_dir), **changes), ranks())


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def trained(
    config: Config, *, rank: int = 0, fails_in: int | None = None, observer: Observer | None = None
) -> dict[str, Any]:
    """The loop of train.py on tokens from nowhere: the losses, and what is left of the model."""
    mesh = Mesh.build(config.layout.fit(ranks()))
    model = build_stages(config, mesh=mesh)[0]
    zero = build_zero(config, {0: model}, mesh=mesh, device="cpu")
    generator = torch.Generator().manual_seed(1)
    losses = []
    with observe(observer or Observer()), Profile(config, rank=rank, zero=zero, stages={0: model}) as profile:
        for step in range(1, config.last_step + 1):
            profile.at(step)
            zero.begin(microbatches=MICROBATCHES)
            for number in range(MICROBATCHES):
                tokens = torch.randint(64, (BATCH, SEQ), generator=generator)
                ids = torch.arange(BATCH) + number * BATCH
                microbatch = Microbatch(tokens, tokens.roll(-1, 1), torch.arange(SEQ), ids, step)
                with profile.range(f"F{number}"):
                    loss = model(None, microbatch) / (MICROBATCHES * BATCH * SEQ)
                if step == fails_in:
                    raise ArithmeticError("in the middle")
                with profile.range(f"BW{number}"):
                    loss.backward()
                losses.append(loss.item())
            zero.step(max_norm=1.0)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return {"losses": losses, "weights": weights, "zero": zero, "model": model}


def trace(config: Config, rank: int = 0) -> list[dict[str, Any]]:
    with gzip.open(Path(config.out_dir, "profile", f"rank{rank}.json.gz")) as file:
        return json.load(file)["traceEvents"]


def names(config: Config, rank: int = 0) -> Counter[str]:
    return Counter(event["name"] for event in trace(config, rank) if event.get("cat") == "user_annotation")


def memory(config: Config) -> dict[str, Any]:
    return json.loads(Path(config.out_dir, "profile", "rank0-memory.json").read_text())


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_profiled_run_has_the_bits_of_one_that_is_not_and_leaves_nothing_on_the_model(tmp_path, recompute):
    plain = trained(config_of(tmp_path / "plain", [], recompute=recompute))
    seen = trained(config_of(tmp_path / "seen", [2, 3], recompute=recompute))
    assert seen["losses"] == plain["losses"]
    assert all(torch.equal(seen["weights"][name], weight) for name, weight in plain["weights"].items())
    assert not any("forward" in vars(module) for module in seen["model"].modules())
    assert not any(parameter._backward_hooks for parameter in seen["model"].parameters())
    assert not (tmp_path / "plain").exists()


def test_a_trace_names_the_chosen_steps_their_actions_layers_and_gradients_each_as_often_as_they_happened(tmp_path):
    config = config_of(tmp_path, [2, 3])
    trained(config)
    found = names(config)
    assert {name for name in found if name.startswith("step")} == {"step 2", "step 3"}
    assert {name: found[name] for name in ("F0", "F1", "BW0", "BW1")} == dict.fromkeys(("F0", "F1", "BW0", "BW1"), 2)
    often = dict.fromkeys(("embedding", "blocks.1", "blocks.0.attention", "blocks.1.mlp.up", "norm"), 2 * MICROBATCHES)
    assert {name: found[name] for name in often} == often
    assert found["gradient of blocks.1.mlp.up.weight"] == 2 * MICROBATCHES


def test_a_layer_lies_within_its_action_and_the_action_within_its_step(tmp_path):
    config = config_of(tmp_path, [2, 2])
    trained(config)
    events = [event for event in trace(config) if event.get("cat") == "user_annotation"]
    one = {event["name"]: (event["ts"], event["ts"] + event["dur"]) for event in events}  # F1's are the last
    for inner, outer in (("blocks.1.mlp.up", "blocks.1"), ("blocks.1", "F1"), ("F1", "step 2"), ("BW1", "step 2")):
        assert one[outer][0] <= one[inner][0] <= one[inner][1] <= one[outer][1], (inner, outer)
    assert one["BW1"][0] <= one["gradient of blocks.1.mlp.up.weight"][0] <= one["BW1"][1]


def test_full_recomputation_is_seen_as_layers_within_backward(tmp_path):
    config = config_of(tmp_path, [2, 2], recompute="full")
    trained(config)
    assert names(config)["blocks.0.attention"] == 2 * MICROBATCHES
    assert names(config)["blocks.0"] == MICROBATCHES  # the block is entered once; its parts are computed again


class Counting(Observer):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def issuing(self, call: Call) -> None:
        self.calls[f"issue {call}: {call.payload_bytes:,} bytes"] += 1

    def waiting(self, call: Call) -> None:
        self.calls[f"wait {call}: {call.payload_bytes:,} bytes"] += 1


def with_collectives(out_dir: Path) -> tuple[Counter[str], Counter[str], list[float]]:
    config = config_of(out_dir, [1, 4], layout=LayoutConfig(tp=2), profile={"ranks": [1]})
    counting = Counting()
    losses = trained(config, rank=dist.get_rank(), observer=counting)["losses"]
    found = names(config, rank=1) if dist.get_rank() == 1 else Counter()
    ranges = {name: number for name, number in found.items() if name.startswith(("issue ", "wait "))}
    return counting.calls, Counter(ranges), losses


def test_every_collective_of_a_chosen_rank_is_issued_and_waited_for_by_name_with_its_bytes(tmp_path):
    (_, none, losses), (calls, found, same) = run(with_collectives, 2, tmp_path)
    activation_bytes = BATCH * SEQ * GPT.hidden_size * 4 // 2  # of sequence parallelism
    assert found[f"issue all_gather over tp: {activation_bytes:,} bytes"] > 0
    assert found == calls and not none
    assert losses == same  # one rank is profiled and one is not
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == [
        "rank1-memory.json",
        "rank1-memory.png",
        "rank1.json.gz",
    ]


def test_a_run_that_raises_or_ends_inside_the_recording_leaves_its_profile_and_its_own_error(tmp_path):
    config = config_of(tmp_path / "raises", [2, 4])
    with pytest.raises(ArithmeticError, match="in the middle"):
        trained(config, fails_in=3)
    assert {name for name in names(config) if name.startswith("step")} == {"step 2", "step 3"}
    config = config_of(tmp_path / "ends", [4, 4])
    trained(config)
    assert names(config)["step 4"] == 1


def test_an_error_of_the_run_is_not_hidden_by_one_of_writing(tmp_path):
    (tmp_path / "profile").write_text("a file where the folder should be")
    config = config_of(tmp_path, [2, 4])
    with pytest.warns(UserWarning, match="could not be written"), pytest.raises(ArithmeticError):
        trained(config, fails_in=3)
    with pytest.raises(FileExistsError):
        trained(config)


@pytest.mark.parametrize(("compute", "parameter_bytes"), [("fp32", 4), ("bf16", 2 + 4)])
def test_parameters_gradients_and_optimizer_are_the_bytes_that_are_live(tmp_path, compute, parameter_bytes):
    """Half precision holds weights and float32 masters; AdamW two float32 moments, and a step count a tensor."""
    config = config_of(tmp_path, [1, 2], precision=PrecisionConfig(compute))
    zero = trained(config)["zero"]
    numel = sum(unit.weights.tensor.numel() for unit in zero.units)
    optimizer = 8 * numel + sum(4 for group in zero.optimizer.param_groups for _ in group["params"])
    steps = memory(config)["steps"]
    for name, state in (("step 1", 0), ("step 2", optimizer)):
        for moment in ("begin", "peak"):
            found = steps[name][moment]["bytes"]
            assert (found["parameters"], found["optimizer"]) == (parameter_bytes * numel, state), (name, moment)
        assert steps[name]["begin"]["bytes"]["gradients"] == 4 * numel
        assert steps[name]["end"]["bytes"]["optimizer"] == optimizer
        assert "BW" in steps[name]["peak"]["in"][1]


def test_before_the_first_update_there_is_no_optimizer_state_and_a_gradient_in_flight_is_one(tmp_path):
    config = config_of(tmp_path, [1, 1])
    zero = trained(config)["zero"]
    found = memory(config)
    backward_end = next(end for name, _, end in found["ranges"] if name == f"BW{MICROBATCHES - 1}")
    rows = range(len(found["microseconds"]))
    assert not any(found["bytes"]["optimizer"][row] for row in rows if found["microseconds"][row] <= backward_end)
    largest = max(slot.gradient.nbytes for unit in zero.units for slot in unit.slots)
    flat = sum(unit.gradients.tensor.nbytes for unit in zero.units)
    assert min(found["bytes"]["gradients"]) == flat
    assert max(found["bytes"]["gradients"]) >= flat + largest


def test_every_byte_allocated_within_the_window_is_of_one_kind(tmp_path):
    config = config_of(tmp_path, [2, 3])
    trained(config)
    found = memory(config)
    totals = [sum(levels) for levels in zip(*(found["bytes"][kind] for kind in KINDS), strict=True)]
    changes = [event for event in trace(config) if event["name"] == "[memory]"]
    changes.sort(key=lambda event: event["ts"])
    running = [event["args"]["Total Allocated"] for event in changes]
    assert len(running) > 100
    assert [total - totals[0] for total in totals[1:]] == [
        total - running[0] + changes[0]["args"]["Bytes"] for total in running
    ]


def test_what_lives_from_forward_into_backward_is_activations_and_recomputation_holds_less_of_it(tmp_path):
    peaks = {}
    for recompute in ("none", "full"):
        config = config_of(tmp_path / recompute, [2, 2], recompute=recompute)
        trained(config)
        found = memory(config)
        peaks[recompute] = max(found["bytes"]["activations"])
        assert found["bytes"]["activations"][-1] < 100  # a loss is still in a variable
    assert peaks["full"] < peaks["none"] / 2
    block_inputs = BATCH * SEQ * GPT.hidden_size * 4 * GPT.num_hidden_layers
    assert peaks["full"] > block_inputs


def test_without_memory_there_is_a_trace_alone(tmp_path):
    config = config_of(tmp_path, [2, 2], profile={"memory": False})
    trained(config)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0.json.gz"]
    assert not any(event["name"] == "[memory]" for event in trace(config))


def test_a_memory_profile_that_nothing_can_draw_is_refused_before_training_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"profile.memory=true .* pip install 'megalite\[plot\]'"):
        trained(config_of(tmp_path, [2, 2]), rank=0)
    config = config_of(tmp_path, [2, 2])
    with pytest.raises(ConfigError):
        Profile(config, rank=1, zero=None, stages={})
    trained(config_of(tmp_path, [2, 2], profile={"memory": False}))
    trained(config_of(tmp_path, []))


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_the_program_profiles_what_the_configuration_asks_for_and_its_rows_stay_the_same(tmp_path, schedule):
    """Each weight's gradient is there once a micro-batch and step, also where it is put off from B to W."""
    rows = {}
    for name, steps in (("plain", []), ("seen", [2, 3])):
        config = Config(model=MLPConfig(hidden_size=16, num_hidden_layers=3), global_batch_size=8, steps=4)
        config = replace(config, pipeline=PipelineConfig(schedule))
        config = check(replace(config, out_dir=str(tmp_path / name), profile=ProfileConfig(steps)), 1)
        train.main(config, World(0, 1, "cpu", "gloo", 1, tmp_path / "cache"))
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        rows[name] = [
            {key: value for key, value in json.loads(line).items() if key.startswith("train/")} for line in lines
        ]
    assert rows["seen"] == rows["plain"]
    found = names(config)
    backward = "BW0@0" if schedule == "1f1b" else "W0@0"
    assert (found["step 2"], found["step 3"], found["F0@0"], found[backward], found["layers.2"]) == (1, 1, 2, 2, 2)
    assert found["gradient of layers.2.weight"] == 2
    assert Path(config.out_dir, "profile", "rank0-memory.png").stat().st_size > 10_000

"""What a rank is expected to hold is what a model that was built holds, to the byte, at every stage and recipe."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.cost.memory import RECIPES, Sharing, State
from megalite.cost.peak import most_gradients, most_weights
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, OptimConfig, PrecisionConfig, ZeroConfig
from megalite.train.expect import available_bytes, expected_memory, recipe_of, training_of
from megalite.train.memory_measure import live_bytes
from megalite.train.model import build_stages, build_zero
from megalite.train.spans import spans_of
from megalite.zero import Zero
from tests.cost.test_activations import a_microbatch
from tests.ranks import run

TINY = GPTConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=3)
# Between them every kind of parameter that a model has.
MODELS = {
    "llama": TINY,
    "gpt2": replace(
        TINY,
        norm_type="layernorm",
        position_embedding_type="absolute",
        attention_bias=True,
        mlp_bias=True,
        is_gated_act=False,
        tie_word_embeddings=True,
    ),
    "one key head": replace(TINY, num_key_value_heads=1, attention_bias=True, qk_norm="head", attention_out_bias=False),
    "olmo2": replace(TINY, num_key_value_heads=2, qk_norm="full", norm_placement="post", norm_type="layernorm"),
    "olmo1": replace(TINY, norm_type="layernorm_nonparametric", qk_norm="full"),
    "mlp": MLPConfig(hidden_size=16, num_hidden_layers=3),
}


RECIPE_KEYS = {
    "bf16": PrecisionConfig("bf16"),
    "bf16-16-bytes": PrecisionConfig("bf16", gradients="bf16"),
    "bf16-12-bytes": PrecisionConfig("bf16", gradients="bf16", moments="bf16"),
    "fp32": PrecisionConfig("fp32"),
    "fp64": PrecisionConfig("fp64"),
}


def config_of(model: str, ranks: int = 1, **changes) -> Config:
    base = {"seq_len": 8, "global_batch_size": 4, "optim": OptimConfig(betas=[0.9, 0.95]), "verify": False}
    return check(replace(Config(), model=MODELS[model], **(base | changes)), ranks)


def build(config: Config) -> tuple[Any, Zero]:
    mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp))
    model = build_stages(config, mesh=mesh)[0]
    return model, build_zero(config, {0: model}, mesh=mesh, device="cpu")


def one_step(config: Config, model: Any, zero: Zero) -> None:
    each = config.micro_batch_size or config.global_batch_size // config.layout.dp
    number = config.global_batch_size // config.layout.dp // each
    zero.begin(microbatches=number)
    for _ in range(number):
        model(None, a_microbatch(config)).backward()
    zero.reduce()


def measured(config: Config) -> tuple[int, dict[str, int]]:
    """This rank's place among those that share, and bytes: gradients at the end of backward; the rest after a step."""
    model, zero = build(config)
    one_step(config, model, zero)
    found = live_bytes(zero)["gradients"]
    zero.step()
    after = live_bytes(zero, offload=config.zero.offload)
    return zero.units[0].shards.rank, {**after, "gradients": found, "gradients_between": after["gradients"]}


def exact(state: State) -> dict[str, int]:
    names = ("weights", "masters", "gradients", "gradients_between", "moments", "host")
    return {name: getattr(state, name) for name in names}


def expected(config: Config, shard_rank: int = 0) -> dict[str, int]:
    return exact(expected_memory(config, shard_rank=shard_rank).state)


@pytest.mark.parametrize("recipe", RECIPE_KEYS)
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_holds_what_is_expected(model, recipe):
    config = config_of(model, precision=RECIPE_KEYS[recipe])
    assert measured(config) == (0, expected(config))


def all_measured(configs: list[Config]) -> list[tuple[int, dict[str, int]]]:
    return [measured(config) for config in configs]


def assert_they_hold_what_is_expected(configs: list[Config], ranks: int) -> None:
    for of_rank in run(all_measured, ranks, configs, checked=False):
        for config, (shard_rank, found) in zip(configs, of_rank, strict=True):
            assert found == expected(config, shard_rank), (config.zero, config.precision, config.layout)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 4)])
def test_every_tensor_rank_holds_what_is_expected(ranks, tp, sequence_parallel):
    """Vocabulary 11 is padded to 12; tp = 4 shares key heads."""
    names = ("gpt2", "one key head", "olmo2", *(["mlp"] if not sequence_parallel else []))
    layout = LayoutConfig(tp=tp, sequence_parallel=sequence_parallel)
    bf16 = PrecisionConfig("bf16")
    assert_they_hold_what_is_expected([config_of(name, ranks, layout=layout, precision=bf16) for name in names], ranks)


@pytest.mark.parametrize(("ranks", "tp", "over"), [(2, 1, None), (3, 1, None), (4, 2, None), (4, 1, 2)])
def test_every_stage_and_recipe_holds_what_is_expected_of_each_rank(ranks, tp, over):
    """Three ranks divide no unit, so shards are padded and the last rank has fewer moments."""
    names = {2: tuple(RECIPE_KEYS), 3: ("bf16", "fp32"), 4: ("bf16",)}[ranks]
    configs = [
        config_of(
            model,
            ranks,
            layout=LayoutConfig(tp=tp),
            zero=ZeroConfig(stage=stage, shard_over=over if stage else None),
            precision=precision,
            global_batch_size=12 // tp,
        )
        for stage in range(4)
        for precision in (RECIPE_KEYS[name] for name in names)
        for model in ("gpt2", "llama")
    ]
    assert_they_hold_what_is_expected(configs, ranks)


def test_what_is_offloaded_lies_in_the_cpu_s_memory_alone():
    configs = [
        config_of("llama", 2, zero=ZeroConfig(stage=stage, offload=True), precision=precision)
        for stage in (0, 3)
        for precision in (RECIPE_KEYS["bf16"], RECIPE_KEYS["fp32"])
    ]
    assert_they_hold_what_is_expected(configs, 2)
    assert expected(configs[0])["moments"] == 0 < expected(configs[0])["host"]


@pytest.mark.parametrize(("momentum", "moments"), [(0.9, 1), (0.0, 0)])
def test_sgd_keeps_its_momentum_alone(momentum, moments):
    config = config_of("llama", optim=OptimConfig(name="sgd", betas=[momentum, 0.9]))
    assert measured(config) == (0, expected(config))
    assert expected(config)["moments"] == moments * expected(config)["weights"]


@pytest.mark.parametrize(
    ("name", "per_parameter"), [("bf16", 18), ("bf16-16-bytes", 16), ("bf16-12-bytes", 12), ("fp32", 16)]
)
def test_a_recipe_takes_the_bytes_a_parameter_in_its_name(name, per_parameter):
    """On live tensors of one rank, and the recipe that a run takes from its file is the one that is named."""
    written = yaml.safe_load((Path(__file__).parents[2] / "configs/precision" / f"{name}.yaml").read_text()) or {}
    config = config_of("llama", precision=PrecisionConfig(**written))
    assert recipe_of(config) == RECIPES[name] and RECIPES[name].per_parameter() == per_parameter
    _, found = measured(config)
    held = sum(found[kind] for kind in ("weights", "masters", "gradients", "moments"))
    assert held == per_parameter * config.model.parameter_count()


def most_within_a_step(config: Config) -> tuple[int, dict[str, int]]:
    """The most weights, and the most gradients, that are live at any gradient's arrival and any block's forward."""
    model, zero = build(config)
    most: dict[str, int] = defaultdict(int)

    def look(*_: Any) -> None:
        for kind, size in live_bytes(zero).items():
            most[kind] = max(most[kind], size)

    for _ in range(2):  # the second knows what comes next
        hooks = [parameter.register_hook(look) for parameter in model.parameters()]
        hooks += [block.register_forward_hook(look) for block in model.modules()]
        one_step(config, model, zero)
        for hook in hooks:
            hook.remove()
        zero.step()
    return zero.units[0].shards.rank, dict(most)


def all_most(configs: list[Config]) -> list[tuple[int, dict[str, int]]]:
    return [most_within_a_step(config) for config in configs]


def test_within_a_step_no_more_is_held_than_the_bound_says():
    """And the bound is no idle one: of weights it is reached where there is no tie. Gradients are looked at as they
    arrive, and a unit's buffer is taken after its last."""
    zeros = [ZeroConfig(stage=stage) for stage in range(4)]
    zeros += [ZeroConfig(stage=3, prefetch=prefetch) for prefetch in (0, 2)]
    zeros += [ZeroConfig(stage=3, reshard_after_forward=False), ZeroConfig(stage=3, reshard="step")]
    configs = [
        config_of(model, 2, zero=zero, precision=PrecisionConfig("bf16"), micro_batch_size=1)
        for zero in zeros
        for model in ("llama", "gpt2")
    ]
    for of_rank in run(all_most, 2, configs, checked=False):
        for config, (shard_rank, most) in zip(configs, of_rank, strict=True):
            training = training_of(config, spans_of(config)[0], shard_rank=shard_rank)
            bounds = {"weights": most_weights(training), "gradients": most_gradients(training)}
            for kind, bound in bounds.items():
                assert most[kind] <= bound, (kind, config.zero)
                if not config.model.tie_word_embeddings:
                    assert most[kind] >= (0.9 if kind == "weights" else 0.6) * bound, (kind, config.zero)


def test_padding_is_shared_and_has_no_moments():
    sharing = Sharing(stage=1, data_ranks=4)
    assert [replace(sharing, rank=rank).trained_share(9) for rank in range(4)] == [3, 3, 3, 0]
    assert sharing.padded(9) == 12 and sharing.share(9) == 3
    assert Sharing(stage=0, data_ranks=4).padded(9) == 9


def test_the_expectation_follows_the_longest_of_a_ramp_s_micro_batches():
    short = config_of("llama")
    ramp = config_of("llama", seq_len_ramp=[[5, 16]])
    assert expected_memory(ramp).kept > 1.9 * expected_memory(short).kept
    assert expected(ramp) == expected(short)


def test_what_a_rank_can_have_is_its_share_of_what_the_machine_has_left(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   80 kB\n")
    assert available_bytes("cpu", root=tmp_path) == 80 * 1024
    assert available_bytes("cpu", local_ranks=4, root=tmp_path) == 20 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("50000\n")
    (group / "memory.stat").write_text("anon 20000\ninactive_file 30000\n")
    assert available_bytes("cpu", root=tmp_path) == 80 * 1024
    (group / "memory.max").write_text("60000\n")
    assert available_bytes("cpu", root=tmp_path) == 40000
    assert available_bytes("cpu", root=tmp_path / "nowhere") is None

"""The bytes that a formula gives for a training step are those that are counted in one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import pytest

from megalite.models.config import GPTConfig
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, LossConfig, PipelineConfig, PrecisionConfig, ZeroConfig
from megalite.train.expect import sent_bytes
from megalite.train.spans import spans_of
from tests.cost.pipelines import Rank
from tests.cost.test_memory import MODELS
from tests.counting import count
from tests.ranks import run

AXES = {
    "tp": "tp",
    "dense_data": "dp",
    "world": "world",
    "pp": "pp",
    "activation lane": "pp",
    "gradient lane": "pp",
    "tie": "pp",
}
"""What a group's description begins with -> the axis under which its bytes are shown; a part counts to the whole."""


class Counted(NamedTuple):
    """Of one rank: its places among those that share and on pp, and axis -> bytes that it sends in the second step.

    The first step learns how often gradients come, and which shapes travel, for which the ranks talk once.
    """

    shard_rank: int
    pp_rank: int
    sent: dict[str, float]


def counted(config: Config) -> Counted:
    rank = Rank.build(config)
    rank.step()
    with count() as c:
        rank.step()
        for unit in rank.zero.units:
            unit.wait()
    sums: dict[str, float] = defaultdict(float)
    for call in c.record:
        sums[next(axis for name, axis in AXES.items() if call.group.startswith(name))] += call.sent
    return Counted(rank.zero.units[0].shards.rank, rank.mesh.pp.rank, dict(sums))


def all_counted(configs: list[Config]) -> list[Counted]:
    return [counted(config) for config in configs]


def send_what_is_expected(configs: list[Config], ranks: int) -> None:
    for of_rank in run(all_counted, ranks, configs, checked=False):
        for config, (shard_rank, pp_rank, sent) in zip(configs, of_rank, strict=True):
            expected = sent_bytes(config, spans_of(config)[0], shard_rank=shard_rank, pp_rank=pp_rank)
            # Sums of fractions of bytes, in another order.
            assert sent == pytest.approx(expected, rel=1e-12), (config.model, config.zero, config.pipeline)


LAYOUTS = {
    "dp2": (2, LayoutConfig()),
    "tp2": (2, LayoutConfig(tp=2, sequence_parallel=False)),
    "tp2 sp": (2, LayoutConfig(tp=2, sequence_parallel=True)),
    "tp4 sp": (4, LayoutConfig(tp=4, sequence_parallel=True)),
    "dp4": (4, LayoutConfig()),
    "dp2 tp2": (4, LayoutConfig(tp=2, sequence_parallel=False)),
    "dp2 tp2 sp": (4, LayoutConfig(tp=2, sequence_parallel=True)),
}
CASES = [
    *((layout, "llama", {}) for layout in LAYOUTS if layout != "dp4"),
    ("tp2", "gpt2", {"recompute": "full"}),
    ("tp2 sp", "llama", {"recompute": "full"}),
    ("tp4 sp", "one key head", {"recompute": "full", "recompute_every": 2, "precision": PrecisionConfig("bf16")}),
    ("tp2 sp", "olmo2", {"recompute": "full", "loss": LossConfig(label_smoothing=0.1)}),
    ("tp4 sp", "olmo2", {"recompute": "selective", "recompute_ops": ["mlp", "norm"]}),
    ("dp2 tp2", "olmo1", {"micro_batch_size": 1, "precision": PrecisionConfig("fp64")}),
    ("dp2 tp2 sp", "gpt2", {"loss": LossConfig(chunk_tokens=5), "precision": PrecisionConfig("bf16")}),
    ("tp2", "one key head", {}),
    ("tp2", "mlp", {"micro_batch_size": 2}),
    ("dp2 tp2", "mlp", {}),
]


@pytest.mark.parametrize(("layout", "model", "changes"), CASES)
def test_each_axis_sends_the_bytes_of_its_formula(layout, model, changes):
    ranks, cut = LAYOUTS[layout]
    config = replace(Config(), model=MODELS[model], seq_len=8, global_batch_size=4, layout=cut, verify=False)
    config = replace(config, **changes)  # verify would compare gradients, in the first step alone
    config = check(config, ranks)
    send_what_is_expected([config], ranks)


@pytest.mark.parametrize(("layout", "over"), [("dp2", None), ("dp2 tp2 sp", None), ("dp4", 2)])
def test_each_stage_sends_the_bytes_of_its_formula(layout, over):
    """With one micro-batch and several, tied and not, gradients in fp32 and in bf16."""
    ranks, cut = LAYOUTS[layout]
    zeros = [ZeroConfig(stage=stage, shard_over=over if stage else None) for stage in range(4)]
    zeros += [ZeroConfig(stage=3, reshard_after_forward=False), ZeroConfig(stage=3, reshard="step", prefetch=0)]
    base = {"seq_len": 8, "global_batch_size": 12, "layout": cut, "verify": False}
    recipes = (PrecisionConfig("bf16"), PrecisionConfig("bf16", gradients="bf16"))
    configs = [
        check(replace(Config(), model=MODELS[model], zero=zero, precision=recipe, micro_batch_size=each, **base), ranks)
        for zero in zeros
        for model, each, recipe in (("llama", 1, recipes[0]), ("gpt2", 12 // ranks * cut.tp, recipes[1]))
    ]
    if cut.tp > 1:  # summands, of which a rank sums its share alone
        configs = [replace(config, model=MODELS["one key head"]) for config in configs[2:8:2]] + configs[3:8:2]
    send_what_is_expected(configs, ranks)


def test_the_deep_mlp_s_last_layer_stays_whole_into_its_backward():
    zero = ZeroConfig(stage=3)
    config = replace(Config(), model=MODELS["mlp"], zero=zero, global_batch_size=4, micro_batch_size=1, verify=False)
    send_what_is_expected([check(config, 2)], 2)


def piped(model: str, ranks: int, schedule: str = "1f1b", *, tp: int = 1, **changes) -> Config:
    """Two ranks of pp, four micro-batches; the layers make an odd number, so that stages are uneven."""
    base = {"seq_len": 8, "micro_batch_size": 2, "global_batch_size": 4 * ranks // tp, "verify": False}
    base |= {"layout": LayoutConfig(tp=tp, pp=2), "pipeline": PipelineConfig(schedule), "zero": ZeroConfig()}
    base |= {"model": replace(MODELS[model], num_hidden_layers=5), "precision": PrecisionConfig("bf16")}
    return check(replace(Config(), **(base | changes)), ranks)


def test_every_placement_sends_the_bytes_of_its_formula():
    """A tied weight is summed over two ranks, unless both ends lie on one; neighbours on one rank send nothing."""
    cases = [("gpt2", "1f1b", None), ("gpt2", "zb_v", None), ("llama", "interleaved", None), ("mlp", "1f1b", [1, 4])]
    cases += [("gpt2", "gpipe", [0, 5]), ("gpt2", "zb_h1", [5, 0]), ("mlp", "zb_v", [1, 2, 1, 1])]
    pipelines = [(model, PipelineConfig(schedule, split=split)) for model, schedule, split in cases]
    send_what_is_expected([piped(model, 2, pipeline=pipeline) for model, pipeline in pipelines], 2)


def test_with_tensor_ranks_each_sends_its_tokens_and_a_split_backward_gathers_twice():
    configs = [
        piped(model, 4, schedule, tp=2, layout=LayoutConfig(tp=2, pp=2, sequence_parallel=parallel))
        for model, parallel in (("one key head", True), ("gpt2", True), ("gpt2", False))
        for schedule in ("1f1b", "zb_v")
    ]
    mlp = {"layout": LayoutConfig(tp=2, pp=2), "pipeline": PipelineConfig("zb_v", split=[1, 2, 1, 1])}
    again = {"recompute": "full", "recompute_every": 2}
    send_what_is_expected([*configs, piped("mlp", 4, tp=2, **mlp), piped("llama", 4, "zb_h1", tp=2, **again)], 4)


@pytest.mark.parametrize("reshard", [{}, {"reshard_after_forward": False}, {"reshard": "step"}, {"prefetch": 2}])
def test_at_stage_3_a_row_of_actions_says_how_often_weights_are_gathered(reshard):
    """What a pass ends with and the next begins with is fetched once."""
    zero = ZeroConfig(stage=3, **reshard)
    schedules = ("1f1b", "gpipe", "zb_v", "interleaved") if reshard != {"reshard": "step"} else ("zb_v",)
    configs = [piped(model, 4, schedule, zero=zero) for model in ("gpt2", "llama") for schedule in schedules]
    configs += [
        piped("llama", 4, pipeline=PipelineConfig("zb_h1", split=split), zero=zero) for split in ([0, 5], [5, 0])
    ]
    send_what_is_expected(configs, 4)


def test_at_stage_2_every_micro_batch_s_gradients_are_sent():
    configs = [
        piped("gpt2", 4, schedule, zero=ZeroConfig(stage=stage)) for schedule in ("1f1b", "zb_v") for stage in (1, 2)
    ]
    send_what_is_expected(configs, 4)


def test_a_boundary_sends_b_s_h_each_way_where_tensor_ranks_send_8_b_s_h_for_every_layer():
    """Of t = 2 tensor ranks (t-1)/t of that: two all-reduces forward and two backward, each twice its message."""
    batch, seq, hidden, layers, value_bytes = 4, 2048, 4096, 32, 2
    model = GPTConfig(
        vocab_size=100, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8
    )
    base = Config(
        model=model, seq_len=seq, global_batch_size=batch, micro_batch_size=batch, precision=PrecisionConfig("bf16")
    )
    message = batch * seq * hidden * value_bytes

    def sent(axis: str, ranks: int, rank: int = 0, **layout) -> float:
        config = check(replace(base, layout=LayoutConfig(**layout)), ranks)
        return sent_bytes(config, spans_of(config)[0], pp_rank=rank)[axis]

    loss = 2 * 3 * 8 / 4  # one number, summed over all of them
    assert [sent("pp", 4, rank, pp=4) - loss for rank in range(4)] == [message, 2 * message, 2 * message, message]
    of_layers = sent("tp", 2, tp=2, sequence_parallel=False)
    eight = layers * 8 * message / 2
    assert eight < of_layers < 1.02 * eight  # and the embedding's and the head's
    assert of_layers / (sent("pp", 2, pp=2) - loss) > 100

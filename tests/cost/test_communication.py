"""The bytes that a formula gives for a training step are those that are counted in one."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from megalite.comm import start_all_reduce
from megalite.mesh import Mesh
from megalite.models.config import MLPConfig
from megalite.models.microbatch import Microbatch, VectorMicrobatch
from megalite.train.batches import start_count
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, LossConfig, PrecisionConfig, ZeroConfig
from megalite.train.expect import sent_bytes
from megalite.train.model import build_stages, build_zero
from megalite.train.spans import spans_of
from tests.cost.test_memory import MODELS
from tests.counting import count
from tests.ranks import run

AXES = {"tp": "tp", "dense_data": "dp", "world": "world"}
"""What a group's description begins with -> the axis under which its bytes are shown; a part counts to the whole."""


def microbatches(config: Config) -> list[Microbatch] | list[VectorMicrobatch]:
    """As many and as large as the configuration says, of anything: bytes depend on shapes alone."""
    each = config.micro_batch_size or config.global_batch_size // config.layout.dp
    number = config.global_batch_size // (config.layout.dp * each)
    ids = torch.arange(each)
    if isinstance(config.model, MLPConfig):
        vectors = torch.ones(each, config.model.hidden_size)
        return [VectorMicrobatch(vectors, vectors, ids, 1)] * number
    tokens = torch.ones(each, config.seq_len, dtype=torch.int64)
    return [Microbatch(tokens, tokens, torch.arange(config.seq_len), ids, 1)] * number


def counted(config: Config) -> tuple[int, dict[str, float]]:
    """This rank's place among those that share, and axis -> bytes that it sends in the second step.

    The first one learns how often gradients come, for which the ranks talk once.
    """
    mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp))
    model = build_stages(config, mesh=mesh)[0]
    zero = build_zero(config, {0: model}, mesh=mesh, device="cpu")
    for _ in range(2):
        with count() as c:
            batch = microbatches(config)
            number = start_count(batch, mesh=mesh, device="cpu")
            zero.begin(microbatches=len(batch))
            losses = []
            for microbatch in batch:
                loss = model(None, microbatch) / number.wait()
                loss.backward()
                losses.append(loss.detach().double())
            zero.step(max_norm=1.0)
            start_all_reduce(sum(losses), mesh.data()).wait()
        for unit in zero.units:
            unit.wait()
    sums: dict[str, float] = defaultdict(float)
    for call in c.record:
        sums[next(axis for name, axis in AXES.items() if call.group.startswith(name))] += call.sent
    return zero.units[0].shards.rank, dict(sums)


def all_counted(configs: list[Config]) -> list[tuple[int, dict[str, float]]]:
    return [counted(config) for config in configs]


def send_what_is_expected(configs: list[Config], ranks: int) -> None:
    for of_rank in run(all_counted, ranks, configs, checked=False):
        for config, (shard_rank, sent) in zip(configs, of_rank, strict=True):
            expected = sent_bytes(config, spans_of(config)[0], shard_rank=shard_rank)
            # Sums of fractions of bytes, in another order.
            assert sent == pytest.approx(expected, rel=1e-12), (config.model, config.zero)


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

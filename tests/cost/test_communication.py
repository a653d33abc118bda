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
from megalite.train.config import Config, LayoutConfig, LossConfig, PrecisionConfig
from megalite.train.expect import sent_bytes
from megalite.train.model import build_model, build_zero
from megalite.train.spans import spans_of
from tests.cost.test_memory import MODELS
from tests.counting import count
from tests.ranks import run

GROUPS = {"tp": "tp", "dense_data": "dp", "world": "world"}
"""Group's description -> the axis under which its bytes are shown; a part of tp counts to it."""


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


def counted(config: Config) -> dict[str, float]:
    """Axis -> bytes that this rank sends in one step."""
    mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp))
    model = build_model(config, mesh=mesh)
    zero = build_zero(config, model, mesh=mesh, device="cpu")
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
    sums: dict[str, float] = defaultdict(float)
    for call in c.record:
        sums[GROUPS.get(call.group, "tp")] += call.sent
    return dict(sums)


LAYOUTS = {
    "dp2": (2, LayoutConfig()),
    "tp2": (2, LayoutConfig(tp=2, sequence_parallel=False)),
    "tp2 sp": (2, LayoutConfig(tp=2, sequence_parallel=True)),
    "tp4 sp": (4, LayoutConfig(tp=4, sequence_parallel=True)),
    "dp2 tp2": (4, LayoutConfig(tp=2, sequence_parallel=False)),
    "dp2 tp2 sp": (4, LayoutConfig(tp=2, sequence_parallel=True)),
}
CASES = [
    *((layout, "llama", {}) for layout in LAYOUTS),
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
    expected = sent_bytes(config, spans_of(config)[0])
    for sent in run(counted, ranks, config):
        assert sent == pytest.approx(expected, rel=1e-12)  # sums of fractions of bytes, in another order

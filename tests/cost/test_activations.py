"""What a forward leaves in memory is what the formulas of `megalite.cost.activations` say."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.comm import start_all_reduce
from megalite.cost.activations import kept_activations
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import Microbatch, VectorMicrobatch
from megalite.spec import init_parameters
from megalite.train.check import check
from megalite.train.config import Config, DataConfig, LayoutConfig, LossConfig, PrecisionConfig
from megalite.train.expect import cut_of, pass_of
from megalite.train.memory_measure import Survivors
from megalite.train.model import build_stages
from megalite.train.spans import spans_of
from tests.ranks import run

PLAIN = GPTConfig(vocab_size=300, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4)
SHAPES = {
    "gpt2": replace(
        PLAIN,
        norm_type="layernorm",
        position_embedding_type="absolute",
        attention_bias=True,
        mlp_bias=True,
        is_gated_act=False,
        hidden_act="gelu",
        tie_word_embeddings=True,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
    ),
    "llama": PLAIN,
    "grouped queries": replace(PLAIN, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen3": replace(PLAIN, num_key_value_heads=2, qk_norm="head", head_dim=32),
    "olmo2": replace(PLAIN, qk_norm="full", norm_placement="post"),
    "one key head": replace(PLAIN, num_key_value_heads=1, hidden_act="relu", attention_bias=True),
}
# What else changes what is kept, each once or twice.
ODD = {
    "eager": replace(SHAPES["gpt2"], attn_implementation="eager", attention_dropout=0.1),
    "eager, grouped": replace(SHAPES["grouped queries"], attn_implementation="eager"),
    "window": replace(PLAIN, sliding_window=8),
    "clipped": replace(PLAIN, clip_qkv=1.0, norm_type="layernorm_nonparametric"),
    "clipped, absolute": replace(SHAPES["gpt2"], clip_qkv=1.0),
    "clipped, qwen3": replace(SHAPES["qwen3"], clip_qkv=1.0),
    "olmo2 with layer norm": replace(SHAPES["olmo2"], norm_type="layernorm", num_key_value_heads=2),
    "olmo1 with norms of q and k": replace(PLAIN, norm_type="layernorm_nonparametric", qk_norm="full"),
    "relu": replace(PLAIN, is_gated_act=False, hidden_act="relu"),
    "absolute, grouped": replace(SHAPES["gpt2"], num_key_value_heads=2),
}
RECOMPUTE = {
    "none": {},
    "attention": {"recompute": "selective"},
    "norm, activation": {"recompute": "selective", "recompute_ops": ["norm", "activation"]},
    "norm, mlp": {"recompute": "selective", "recompute_ops": ["norm", "mlp", "attention"]},
    "full": {"recompute": "full"},
    "every second": {"recompute": "full", "recompute_every": 2},
}


def config_of(model: GPTConfig | MLPConfig, ranks: int = 1, **changes) -> Config:
    return check(replace(Config(), model=model, **({"seq_len": 32, "global_batch_size": 3} | changes)), ranks)


def a_microbatch(config: Config) -> Microbatch | VectorMicrobatch:
    batch = config.micro_batch_size or config.global_batch_size // config.layout.dp
    ids = torch.arange(batch)
    if isinstance(config.model, MLPConfig):
        vectors = torch.ones(batch, config.model.hidden_size, dtype=getattr(torch, config.dtype))
        return VectorMicrobatch(vectors, vectors, ids, 1)
    tokens = torch.arange(batch * config.seq_len).view(batch, -1) % config.model.vocab_size
    documents = torch.zeros_like(tokens) if config.data.documents == "separate" else None
    return Microbatch(tokens, tokens, torch.arange(config.seq_len), ids, 1, documents)


def kept_bytes(config: Config) -> int:
    """Measured: all that a forward made and that its end leaves, but for the loss."""
    mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp))
    model = build_stages(config, mesh=mesh)[0]
    init_parameters(model, 0)
    batch = a_microbatch(config)
    with Survivors() as survivors:
        loss = model(None, batch)
    for _ in range(8):  # until then one of Gloo's threads holds what the last collective moved
        start_all_reduce(torch.zeros(1), mesh.tp).wait()
    return survivors.nbytes() - loss.nbytes


def predicted(config: Config) -> int:
    return kept_activations(config.model, cut_of(config), pass_of(config, spans_of(config)[0]))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("shape", [*SHAPES, *ODD])
def test_a_forward_keeps_what_is_expected_to_the_byte(shape, precision):
    for recompute, changes in RECOMPUTE.items():
        config = config_of((SHAPES | ODD)[shape], precision=PrecisionConfig(precision), **changes)
        assert kept_bytes(config) == predicted(config), recompute


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        (PLAIN, {"data": DataConfig(documents="separate")}),
        (ODD["eager"], {"data": DataConfig(documents="separate")}),
        (PLAIN, {"loss": LossConfig(chunk_tokens=7)}),
        (PLAIN, {"loss": LossConfig(label_smoothing=0.1, z_loss=0.1)}),
        (SHAPES["gpt2"], {"precision": PrecisionConfig("fp64")}),
        (SHAPES["llama"], {"global_batch_size": 1}),
        (MLPConfig(hidden_size=64, num_hidden_layers=3), {}),
        (MLPConfig(hidden_size=64, num_hidden_layers=4, hidden_act="relu"), {}),
    ],
)
def test_documents_chunks_and_the_deep_mlp_too(model, changes):
    assert kept_bytes(config_of(model, **changes)) == predicted(config_of(model, **changes))


def all_kept(configs: list[Config]) -> list[int]:
    return [kept_bytes(config) for config in configs]


@pytest.mark.parametrize("tp", [2, 4])
def test_every_tensor_rank_keeps_what_is_expected_to_the_byte(tp):
    """Where a batch has one sequence, memory has one order, with sequence parallelism too. tp=4 shares key heads."""
    ways = [("none", True, 4), ("none", False, 4), ("norm, activation", True, 4), ("full", True, 4), ("none", True, 1)]
    names = [*SHAPES, "eager", "olmo2 with layer norm"]
    configs = [
        config_of(
            (SHAPES | ODD)[name],
            tp,
            layout=LayoutConfig(tp=tp, sequence_parallel=sequence_parallel),
            precision=PrecisionConfig("bf16"),
            global_batch_size=batch,
            **RECOMPUTE[recompute],
        )
        for name in names
        for recompute, sequence_parallel, batch in (ways if tp == 2 else ways[:1])
    ]
    for of_rank in run(all_kept, tp, configs, checked=False):
        assert of_rank == [predicted(config) for config in configs]


def test_what_is_alive_is_what_autograd_saved():
    """Two instruments agree: storages that outlive the forward, and what its saved-tensor hooks see, inputs aside.

    Hooks see nothing under hooks of others, as recomputation has them, so this is without.
    """
    config = config_of(SHAPES["qwen3"])
    model = build_stages(config, mesh=Mesh.build())[0]
    init_parameters(model, 0)
    batch = a_microbatch(config)
    others = {x.untyped_storage().data_ptr() for x in (*model.parameters(), batch.tokens, batch.labels)}
    saved: dict[int, torch.Tensor] = {}  # by storage: what several keep counts once

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(None, batch)
    assert sum(x.untyped_storage().nbytes() for place, x in saved.items() if place not in others) == kept_bytes(config)
    assert loss.requires_grad

"""What a rank is expected to hold is what a model that was built holds, to the byte."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.cost.memory import Memory, Pass, gpt_activations
from megalite.cost.weights import Cut
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.microbatch import Microbatch
from megalite.spec import init_parameters
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, OptimConfig, PrecisionConfig
from megalite.train.expect import available_bytes, expected_memory
from megalite.train.model import build_model, build_zero
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


def config_of(model: str, ranks: int = 1, **changes) -> Config:
    return check(replace(Config(), model=MODELS[model], seq_len=8, global_batch_size=4, **changes), ranks)


def live_bytes(config: Config) -> dict[str, int]:
    """By kind, of what one rank holds after a step; the optimizer's step counters, of one number each, left out."""
    mesh = Mesh.build(config.layout.fit(config.layout.dp * config.layout.tp))
    zero = build_zero(config, build_model(config, mesh=mesh), mesh=mesh, device="cpu")
    zero.begin(microbatches=1)
    zero.step()  # of zeros: the optimizer makes its moments here
    moments = [
        value
        for state in zero.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    ]
    held = {
        kind: sum(tensor.nbytes for unit in zero.units for tensor in unit.live()[kind])
        for kind in ("weights", "masters", "gradients")
    }
    return held | {"moments": sum(moment.nbytes for moment in moments)}


def exact(need: Memory) -> dict[str, int]:
    return {name: getattr(need, name) for name in ("weights", "masters", "gradients", "moments")}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize("model", MODELS)
def test_one_rank_holds_what_is_expected(model, precision):
    config = config_of(model, precision=PrecisionConfig(precision))
    assert live_bytes(config) == exact(expected_memory(config))


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize(("ranks", "tp"), [(2, 2), (4, 4), (4, 2)])
def test_every_rank_of_a_layout_holds_what_is_expected(ranks, tp, sequence_parallel):
    """Vocabulary 11 is padded to 12; tp = 4 shares key heads."""
    for model in ("gpt2", "one key head", "olmo2", *(["mlp"] if not sequence_parallel else [])):
        layout = LayoutConfig(tp=tp, sequence_parallel=sequence_parallel)
        config = config_of(model, ranks, layout=layout, precision=PrecisionConfig("bf16"))
        assert run(live_bytes, ranks, config) == [exact(expected_memory(config))] * ranks


@pytest.mark.parametrize(("momentum", "moments"), [(0.9, 1), (0.0, 0)])
def test_sgd_keeps_its_momentum_alone(momentum, moments):
    config = config_of("llama", optim=OptimConfig(name="sgd", betas=[momentum, 0.9]))
    assert live_bytes(config) == exact(expected_memory(config))
    assert expected_memory(config).moments == moments * expected_memory(config).weights


def test_activations_are_the_paper_s_figures():
    """Table 2 of arXiv:2205.05198 for its 22B model: s=2048, a=64, h=6144, b=4, 48 layers, t=8; 34 + 5as/h bytes."""
    gpt = GPTConfig(hidden_size=6144, num_attention_heads=64, num_hidden_layers=1, attn_implementation="eager")
    micro, sbh = Pass(batch=4, seq_len=2048, value_bytes=2), 2048 * 4 * 6144
    scores = 5 * 64 * 2048 / 6144
    alone, tensor, sequence = Cut(), Cut(8), Cut(8, sequence_parallel=True)
    selective, full = (
        replace(micro, recompute=mode, ops=ops, recomputed_layers=1)
        for mode, ops in (("selective", ("attention",)), ("full", ()))
    )
    assert gpt_activations(gpt, alone, micro) == pytest.approx(sbh * (34 + scores))
    assert gpt_activations(gpt, tensor, micro) == pytest.approx(sbh * (10 + 24 / 8 + scores / 8))
    assert gpt_activations(gpt, sequence, micro) == pytest.approx(sbh / 8 * (34 + scores))
    assert gpt_activations(gpt, sequence, selective) == pytest.approx(sbh * 34 / 8)
    assert gpt_activations(replace(gpt, attn_implementation="sdpa"), sequence, micro) == pytest.approx(sbh * 34 / 8)
    many = replace(gpt, num_hidden_layers=48)
    one_block = sbh * (34 + scores)
    assert gpt_activations(many, alone, replace(full, recomputed_layers=48)) == pytest.approx(
        48 * 2 * sbh + one_block - 2 * sbh
    )


def saved_bytes(config: Config) -> int:
    """What autograd keeps of one micro-batch, parameters left out."""
    model = build_model(config, mesh=Mesh.build())
    init_parameters(model, 0)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}  # by storage: what several keep counts once

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    tokens = torch.zeros(config.global_batch_size, config.seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = Microbatch(tokens, tokens, torch.arange(config.seq_len), torch.arange(config.global_batch_size), 1)
        loss = model(None, batch)
    del loss
    return sum(tensor.untyped_storage().nbytes() for place, tensor in saved.items() if place not in parameters)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_estimate_is_near_what_autograd_keeps_of_the_paper_s_block(precision):
    """Within a quarter: the paper's block has dropout masks, which are not stored here, and no copies for layouts."""
    block = GPTConfig(
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=4,
        norm_type="layernorm",
        is_gated_act=False,
        hidden_act="gelu",
        position_embedding_type="absolute",
        resid_pdrop=0.1,
    )
    config = check(
        replace(Config(), model=block, seq_len=128, global_batch_size=2, precision=PrecisionConfig(precision)), 1
    )
    need = expected_memory(config)
    assert saved_bytes(config) == pytest.approx(need.activations + need.logits, rel=0.25)


def test_the_estimate_follows_the_longest_of_a_ramp_s_micro_batches():
    short = config_of("llama")
    ramp = config_of("llama", seq_len_ramp=[[5, 16]])
    assert expected_memory(ramp).activations == 2 * expected_memory(short).activations
    assert exact(expected_memory(ramp)) == exact(expected_memory(short))


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

"""From a configuration to a model in training: in which precision it is kept, and what of it decays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from megalite.mesh import Mesh
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT
from megalite.models.microbatch import IGNORED, Microbatch
from megalite.train.check import check
from megalite.train.config import Config, LayoutConfig, OptimConfig, PrecisionConfig
from megalite.train.model import build_stages, build_zero
from megalite.zero import Zero
from tests.ranks import run

TINY = GPTConfig(vocab_size=11, hidden_size=16, intermediate_size=24, num_hidden_layers=2)
# Between them every kind of parameter that a GPT has: biases fused, shared and plain, norms of one dim and of two.
MODELS = {
    "layer norms, learned positions, biases": replace(
        TINY,
        norm_type="layernorm",
        position_embedding_type="absolute",
        attention_bias=True,
        mlp_bias=True,
        is_gated_act=False,
        qk_norm="full",
    ),
    "rms norms, one key head, tied": replace(
        TINY, num_key_value_heads=1, attention_bias=True, mlp_bias=True, qk_norm="head", tie_word_embeddings=True
    ),
}


def built(model: GPTConfig, *, tp: int = 1, **changes) -> tuple[GPT, Zero]:
    """What train.py builds of this model."""
    config = check(replace(Config(), model=model, seq_len=8, layout=LayoutConfig(tp=tp), **changes), tp)
    mesh = Mesh.build(config.layout.fit(tp))
    model = build_stages(config, mesh=mesh)[0]
    return model, build_zero(config, {0: model}, mesh=mesh, device="cpu")


def microbatch(*, ignored: bool = False) -> Microbatch:
    tokens, labels = torch.randint(11, (2, 4, 8), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(labels, IGNORED) if ignored else labels
    return Microbatch(tokens, labels, torch.arange(8), torch.arange(4), 1)


def one_step(model: GPT, zero: Zero, batch: Microbatch) -> float:
    zero.begin(microbatches=1)
    (model(None, batch) / max(batch.valid(), 1)).backward()
    return zero.step(max_norm=1.0).item()


def shrunk(model: GPTConfig) -> dict[str, float]:
    """Parameter -> by what a step without any gradient multiplies it. None begins at 0, where decay would not show."""
    built_model, zero = built(
        model, tp=2, precision=PrecisionConfig("fp64"), optim=OptimConfig(lr=0.1, weight_decay=0.5)
    )
    with torch.no_grad():
        for parameter in built_model.parameters():
            parameter.fill_(0.5)
    assert one_step(built_model, zero, microbatch(ignored=True)) == 0.0
    factors = {name: parameter.detach() / 0.5 for name, parameter in built_model.named_parameters()}
    assert all(torch.equal(factor, factor.flatten()[:1].expand_as(factor)) for factor in factors.values())
    return {name: factor.flatten()[0].item() for name, factor in factors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_matrices_decay_and_norms_and_biases_do_not_whatever_their_number_of_dims(name):
    for factors in run(shrunk, 2, MODELS[name]):
        spared = {name for name in factors if name.endswith("bias") or "norm" in name}
        assert spared and spared < factors.keys()
        for parameter, factor in factors.items():
            expected = 1.0 if parameter in spared else 1 - 0.1 * 0.5
            assert factor == pytest.approx(expected, rel=1e-15), parameter


def test_in_bfloat16_masters_and_moments_are_float32_and_norms_move_by_steps_that_bfloat16_would_round_away():
    model, zero = built(TINY, precision=PrecisionConfig("bf16"), optim=OptimConfig(lr=1e-3, weight_decay=0.0))
    for _ in range(50):
        one_step(model, zero, microbatch())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    flat = [tensor for unit in zero.units for tensor in (unit.masters, unit.gradients.tensor)]
    assert {tensor.dtype for tensor in flat} == {torch.float32}
    moments = [entry[name] for entry in zero.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert moments and {moment.dtype for moment in moments} == {torch.float32}
    norms = {name: parameter for name, parameter in model.named_parameters() if "norm" in name}
    assert len(norms) == 5
    for name, weight in norms.items():
        # below 1 the numbers of bfloat16 are 1/256 apart: a single step of 1e-3 from 1.0 is rounded back to 1.0
        assert (weight != 1).any(), name

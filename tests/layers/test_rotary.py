"""Rotary positions equal Hugging Face's, in float64 angles whatever the precision."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.layers.rotary import Rotary, rotary_frequencies, rotate
from megalite.models.config import RopeScaling
from tests.law import assert_equal, draw, transposed

BATCH, SEQ, HEADS, HEAD_DIM, THETA = 2, 8, 3, 16, 500000.0
LONG = {"factor": 8.0, "original_max_position_embeddings": 2048}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {"rope_type": "none"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONG},
    "yarn": {"rope_type": "yarn", **LONG},
    "yarn, other ramp": {"rope_type": "yarn", "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False, **LONG},
    "yarn, factor given": {"rope_type": "yarn", "attention_factor": 1.2, **LONG},
    "yarn, mscale": {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 1.3, **LONG},
    "yarn, steep ramp": {"rope_type": "yarn", "beta_fast": 1.001, "beta_slow": 1.0, **LONG},
}


def same(x: Tensor) -> Tensor:
    return x


def exact(positions: Tensor, head_dim: int = HEAD_DIM, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """cos and sin by definition, in float64."""
    pairs = torch.arange(head_dim // 2, dtype=torch.float64)
    angles = positions.double()[..., None] * theta ** (-2 * pairs / head_dim)
    return angles.cos(), angles.sin()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of channels as a complex number, times e^(i angle)."""
    x1, x2 = x.chunk(2, dim=-1)
    y = torch.complex(x1, x2) * torch.complex(cos, sin).unsqueeze(-2)
    return torch.cat((y.real, y.imag), dim=-1)


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_and_attention_factor_are_hugging_faces(name: str, head_dim: int) -> None:
    """1e-6: theirs are computed in float32."""
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = {"rope_theta": THETA, "rope_scaling": None if name == "none" else dict(SCALINGS[name])}
    config = LlamaConfig(
        hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim, max_position_embeddings=16384, **theirs
    )
    reference = LlamaRotaryEmbedding(config)
    ours, attention_factor = rotary_frequencies(head_dim, THETA, scaling=RopeScaling(**SCALINGS[name]))
    assert_equal(torch.from_numpy(ours), reference.inv_freq.double(), name, tolerance=1e-6)
    relative = torch.from_numpy(ours) / reference.inv_freq.double() - 1
    assert relative.abs().max() < 1e-6
    assert abs(attention_factor - reference.attention_scaling) < 1e-6

    positions = torch.arange(SEQ)
    cos, sin = Rotary(head_dim, THETA, scaling=RopeScaling(**SCALINGS[name]))(positions)
    expected = reference(torch.ones(1), positions[None])
    for value, other in zip((cos, sin), expected, strict=True):
        assert torch.allclose(value, other[0, :, : head_dim // 2], rtol=0, atol=1e-5)


def test_the_turn_is_hugging_faces() -> None:
    pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    x, (cos, sin) = draw(BATCH, SEQ, HEADS, HEAD_DIM), exact(torch.arange(SEQ))
    doubled = [torch.cat((table, table), -1)[None] for table in (cos, sin)]
    expected, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), *doubled)
    assert_equal(rotate(x, cos, sin), expected.transpose(1, 2), "rotate")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_are_exact_whatever_the_precision(dtype: torch.dtype) -> None:
    """In bfloat16 position 4095 is 4096, and an angle of 4095 radians is off by 1."""
    positions = torch.tensor([1, 769, 4095, 131071])
    with torch.device("meta"):
        module = torch.nn.Sequential(Rotary(HEAD_DIM, THETA))
    module = copy.deepcopy(module.to_empty(device="cpu").to(dtype))
    assert module[0].frequencies.dtype == "float64"
    for value, expected in zip(module[0](positions, dtype), exact(positions), strict=True):
        assert value.dtype == torch.float32
        assert_equal(value.double(), expected, "cos, sin", tolerance=torch.finfo(torch.float32).eps)


def test_a_float64_model_has_float64_angles() -> None:
    positions = torch.tensor([1, 769, 4095, 131071])
    for value, expected in zip(Rotary(HEAD_DIM, THETA)(positions, torch.float64), exact(positions), strict=True):
        assert_equal(value, expected, "cos, sin")


@pytest.mark.parametrize("order", [same, transposed, lambda x: x.repeat(1, 1, 1, 3)[..., :HEAD_DIM]])
@pytest.mark.parametrize("per_sequence", [False, True])
def test_rotate_turns_each_pair_in_any_memory_order_and_backward_turns_back(
    order: Callable[[Tensor], Tensor], per_sequence: bool
) -> None:
    positions = torch.arange(SEQ)
    cos, sin = exact(positions + 5 * torch.arange(BATCH)[:, None] if per_sequence else positions)
    x = order(draw(BATCH, SEQ, HEADS, HEAD_DIM)).requires_grad_()
    gradient = order(draw(BATCH, SEQ, HEADS, HEAD_DIM, seed=1))
    y = rotate(x, cos, sin)
    assert_equal(y, turned(x, cos, sin), "y")
    (dx,) = torch.autograd.grad(y, x, gradient)
    assert_equal(dx, turned(gradient, cos, -sin), "dx")


def test_gradients_are_exact_with_an_attention_factor() -> None:
    cos, sin = (1.3 * table for table in exact(torch.arange(3), 4))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), draw(2, 3, 2, 4).requires_grad_())


def test_several_dims_may_lie_between_seq_and_head_dim() -> None:
    """Such as (kv_heads, queries a kv head) of a fused projection."""
    x, (cos, sin) = draw(BATCH, SEQ, 2, HEADS, HEAD_DIM), exact(torch.arange(SEQ))
    assert torch.equal(rotate(x, cos, sin).flatten(2, 3), rotate(x.flatten(2, 3), cos, sin))


def test_scores_depend_on_distances_only() -> None:
    q, k = draw(1, 1, 1, HEAD_DIM), draw(1, 1, 1, HEAD_DIM, seed=1)

    def score(at: int, to: int) -> Tensor:
        return (rotate(q, *exact(torch.tensor([at]))) * rotate(k, *exact(torch.tensor([to])))).sum()

    assert_equal(score(1007, 1000), score(7, 0), "score")
    assert (score(7, 0) - score(8, 0)).abs() > 1e-3


def test_half_precision_is_rounded_once() -> None:
    x = draw(BATCH, SEQ, HEADS, HEAD_DIM).bfloat16().requires_grad_()
    cos, sin = Rotary(HEAD_DIM, THETA)(torch.arange(4000, 4000 + SEQ), x.dtype)
    y = rotate(x, cos, sin)
    gradient = draw(BATCH, SEQ, HEADS, HEAD_DIM, seed=1).bfloat16()
    (dx,) = torch.autograd.grad(y, x, gradient)
    assert torch.equal(y, turned(x.float(), cos, sin).bfloat16())
    assert torch.equal(dx, turned(gradient.float(), cos, -sin).bfloat16())


def test_nothing_of_x_is_stored() -> None:
    stored: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        rotate(draw(BATCH, SEQ, HEADS, HEAD_DIM).requires_grad_(), *exact(torch.arange(SEQ)))
    assert [tuple(t.shape) for t in stored] == [(SEQ, HEAD_DIM // 2)] * 2


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim=15 must be even"):
        rotary_frequencies(15, THETA)
    with pytest.raises(ValueError, match=r"rope_type=dynamic.*none, linear, llama3 or yarn"):
        rotary_frequencies(16, THETA, scaling=RopeScaling(rope_type="dynamic"))
    with pytest.raises(ValueError, match="rope_type=yarn needs original_max_position_embeddings"):
        rotary_frequencies(16, THETA, scaling=RopeScaling(rope_type="yarn", factor=2.0))
    with pytest.raises(ValueError, match=r"mscale=0.7 and mscale_all_dim=None"):
        rotary_frequencies(16, THETA, scaling=RopeScaling(rope_type="yarn", mscale=0.7, **LONG))

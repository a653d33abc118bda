"""The MLP: its formula, and the memory order that it keeps."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN

from megalite.layers.feed_forward import FeedForward, activation
from megalite.layers.rows import sequence_first
from megalite.mesh import Axis
from tests.law import draw


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
def test_an_activation_is_what_hugging_face_calls_so(name):
    x = draw(100)
    torch.testing.assert_close(activation(name)(x), ACT2FN[name](x), rtol=1e-12, atol=1e-15)


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ValueError, match=r"model.hidden_act=swish is unknown; take one of silu, gelu"):
        activation("swish")


def test_the_gated_mlp_is_swiglu_and_the_other_is_not_gated():
    x = draw(2, 5, 8)
    gated = FeedForward(8, 12, tp=Axis("tp"), dtype=torch.float64)
    gate, up = gated.up.weight
    torch.testing.assert_close(gated(x), (F.silu(x @ gate.t()) * (x @ up.t())) @ gated.down.weight.t())
    plain = FeedForward(8, 12, tp=Axis("tp"), act="gelu", gated=False, bias=True, dtype=torch.float64)
    inside = F.gelu(x @ plain.up.weight[0].t() + plain.up.bias[0])
    torch.testing.assert_close(plain(x), inside @ plain.down.weight.t() + plain.down.bias)


def test_the_memory_order_of_the_input_comes_out_again():
    x = draw(5, 2, 8).transpose(0, 1)
    mlp = FeedForward(8, 12, tp=Axis("tp"), dtype=torch.float64)
    assert sequence_first(mlp(x)) and not sequence_first(mlp(x.contiguous()))


def test_an_inside_that_tp_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="out_features=10 cannot be cut over tp=4"):
        FeedForward(8, 10, tp=Axis("tp", 4))

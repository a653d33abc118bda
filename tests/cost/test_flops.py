"""Operations a token, and what is known of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megalite.cost.flops import flops_per_token, mfu, multiplied_parameters, peak_tflops
from megalite.mesh import Mesh
from megalite.models.config import GPTConfig, MLPConfig
from megalite.models.gpt import GPT
from megalite.models.microbatch import Microbatch
from megalite.spec import init_parameters

TINY = GPTConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, attn_implementation="eager")


def counted(model: GPTConfig, *, seq: int) -> int:
    """By torch, for one sequence forward and backward: products of matrices alone."""
    gpt = GPT(model, mesh=Mesh.build())
    init_parameters(gpt, 0)
    tokens = torch.zeros(1, seq, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        gpt(None, Microbatch(tokens, tokens, torch.arange(seq), torch.arange(1), 1)).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_the_formula_is_what_the_products_of_matrices_cost(tied, kv_heads):
    """The explicit attention here computes what the mask then throws away: twice the causal share. Norms are no
    matrix products, and are in the formula's N."""
    model = replace(TINY, tie_word_embeddings=tied, num_key_value_heads=kv_heads)
    seq = 8
    norms = 6 * 5 * model.hidden_size
    attention = 12 * model.num_hidden_layers * model.hidden_size * seq / 2
    assert (flops_per_token(model, seq_len=seq) + attention - norms) * seq == counted(model, seq=seq)


def test_a_parameter_that_is_only_looked_up_costs_nothing():
    untied, tied = TINY, replace(TINY, tie_word_embeddings=True)
    learned = replace(TINY, position_embedding_type="absolute")
    counts = {multiplied_parameters(model) for model in (untied, tied, learned)}
    assert counts == {untied.parameter_count() - 32 * 16}


def test_a_window_shortens_attention_and_one_as_long_as_the_sequence_does_not():
    free = flops_per_token(TINY, seq_len=64)
    assert flops_per_token(replace(TINY, sliding_window=64), seq_len=64) == free
    assert flops_per_token(replace(TINY, sliding_window=100), seq_len=64) == free
    dense = 6 * multiplied_parameters(TINY)
    window, keys = 8, sum(min(i + 1, 8) for i in range(64)) / 64  # what each query sees, itself included
    attention = flops_per_token(replace(TINY, sliding_window=window), seq_len=64) - dense
    assert attention == pytest.approx(12 * 2 * 16 * keys, rel=0.07)  # half a key more each, as in s/2 for (s+1)/2


def test_the_deep_mlp_costs_six_operations_a_weight():
    assert flops_per_token(MLPConfig(hidden_size=16, num_hidden_layers=3), seq_len=128) == 6 * 3 * 16 * 16


def test_a_device_that_does_all_it_can_has_mfu_1():
    assert mfu(flops_per_token=2e9, tokens_per_second_per_rank=500, peak_tflops=1) == 1


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100 80GB PCIe", 312),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA B200", 2250),
        ("NVIDIA L4", 121),
        ("NVIDIA L40S", 362),
        ("NVIDIA L400", None),
        ("Tesla T4", None),
    ],
)
def test_a_device_is_known_by_its_whole_name(name, tflops):
    assert peak_tflops(name, "bf16") == tflops


def test_wider_arithmetic_is_slower_and_tf32_has_half_of_bf16():
    for name in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"):
        bf16, tf32 = peak_tflops(name, "bf16"), peak_tflops(name, "fp32", tf32=True)
        assert bf16 == peak_tflops(name, "fp16") == 2 * tf32
        assert tf32 > peak_tflops(name, "fp32") >= peak_tflops(name, "fp64")

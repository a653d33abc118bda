"""A model's config alone: what it refuses, and what follows from it by arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megalite.models.config import GPTConfig, MLPConfig, RopeScaling
from megalite.models.gpt import GPT
from megalite.models.mlp import MLP
from megalite.spec import param_specs

# Narayanan et al. (arXiv:2104.04473): P = 12 l h^2 (1 + 13 / 12h + (V + s) / 12 l h) for GPT-3's kind of model
GPT_3 = GPTConfig(
    vocab_size=51200,
    max_position_embeddings=2048,
    hidden_act="gelu",
    is_gated_act=False,
    mlp_bias=True,
    norm_type="layernorm",
    position_embedding_type="absolute",
    attention_bias=True,
    tie_word_embeddings=True,
)


@pytest.mark.parametrize(("layers", "hidden", "heads"), [(12, 768, 12), (96, 12288, 96), (105, 20480, 128)])
def test_the_count_of_a_gpt_3_is_the_papers_formula_and_the_last_norm(layers, hidden, heads):
    config = replace(
        GPT_3,
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
    )
    by_formula = 12 * layers * hidden**2 + 13 * layers * hidden + (51200 + 2048) * hidden
    assert config.parameter_count() == by_formula + 2 * hidden


VARIANTS = [
    GPTConfig(),
    GPT_3,
    GPTConfig(num_key_value_heads=2, head_dim=48, attention_bias=True, attention_out_bias=False, qk_norm="head"),
    GPTConfig(norm_placement="post", qk_norm="full", mlp_bias=True, tie_word_embeddings=True, vocab_size=101),
    GPTConfig(norm_type="layernorm_nonparametric", attention_bias=True, is_gated_act=False),
    GPTConfig(norm_type="layernorm", num_key_value_heads=1, qk_norm="full"),
]


@pytest.mark.parametrize("config", [*VARIANTS, MLPConfig()], ids=range(len(VARIANTS) + 1))
def test_the_count_is_what_the_model_that_is_built_has(config):
    model = GPT(config, device="meta") if isinstance(config, GPTConfig) else MLP(config, device="meta")
    assert config.parameter_count() == sum(spec.numel for spec in param_specs(model).values())


def test_every_default_makes_a_legal_model_that_tp_1_2_and_4_can_cut():
    for config in (GPTConfig(), MLPConfig()):
        config.validate()
        for tp in (1, 2, 4):
            config.validate_cut(tp, sequence_parallel=tp > 1, seq_len=128)


def test_nulls_follow_from_the_other_sizes():
    config = GPTConfig(hidden_size=96, num_attention_heads=6, attention_bias=True)
    assert (config.kv_heads, config.dim_per_head, config.out_bias) == (6, 16, True)
    config = replace(config, num_key_value_heads=2, head_dim=32, attention_out_bias=False)
    assert (config.kv_heads, config.dim_per_head, config.out_bias) == (2, 32, False)


def test_a_window_is_of_every_layer_unless_layer_types_says_which():
    assert [GPTConfig().window(layer) for layer in range(2)] == [None, None]
    assert [GPTConfig(sliding_window=8).window(layer) for layer in range(2)] == [8, 8]
    config = GPTConfig(sliding_window=8, layer_types=["full_attention", "sliding_attention"])
    config.validate()
    assert [config.window(layer) for layer in range(2)] == [None, 8]


YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=64)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": 130}, "model.hidden_size=130 is not a multiple of model.num_attention_heads=4"),
        ({"num_key_value_heads": 3}, "model.num_attention_heads=4 is not a multiple of model.num_key_value_heads=3"),
        ({"num_hidden_layers": 0}, "model.num_hidden_layers=0 must be above 0"),
        ({"hidden_act": "swish"}, "model.hidden_act=swish is unknown; take one of silu, gelu"),
        ({"norm_type": "batchnorm"}, "model.norm_type=batchnorm is unknown"),
        ({"attention_dropout": 0.1}, "model.attention_dropout=0.1 needs model.attn_implementation=eager, not sdpa"),
        ({"resid_pdrop": 1.0}, "model.resid_pdrop=1.0 must be a probability in [0, 1)"),
        ({"rms_norm_eps": 0.0}, "model.rms_norm_eps=0.0 must be above 0"),
        ({"head_dim": 33}, "model.head_dim=33 must be even"),
        ({"clip_qkv": -1.0}, "model.clip_qkv=-1.0 must be above 0"),
        ({"layer_types": ["full_attention"]}, "model.layer_types has 1 entries and model.num_hidden_layers=2"),
        ({"layer_types": ["full_attention", "none"]}, "model.layer_types has none"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "model.sliding_window=None and model.layer_types"),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "with 0 sliding_attention entries"),
        ({"position_embedding_type": "absolute", "rope_scaling": YARN}, "rope_type=yarn needs model.position"),
        ({"rope_scaling": RopeScaling(factor=8.0)}, "factor=8.0 does nothing while model.rope_scaling.rope_type=none"),
        ({"rope_scaling": RopeScaling("linear", factor=0.5)}, "model.rope_scaling.factor=0.5 must be at least 1"),
        ({"rope_scaling": RopeScaling("llama3", factor=8.0)}, "original_max_position_embeddings=None must be"),
        ({"rope_scaling": replace(YARN, beta_slow=64.0)}, "beta_slow=64.0 must be above 0 and below"),
        ({"rope_scaling": replace(YARN, rope_type="dynamic")}, "model.rope_scaling.rope_type=dynamic is unknown"),
    ],
)
def test_what_makes_no_model_is_refused_in_one_line_with_its_key(changes, says):
    with pytest.raises(ValueError, match=re.escape(says)) as refusal:
        replace(GPTConfig(), **changes).validate()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "tp", "seq_len", "says"),
    [
        ({}, 3, 128, "model.num_attention_heads=4 cannot be cut over layout.tp=3; take layout.tp from [1, 2, 4]"),
        ({}, 8, 128, "model.num_attention_heads=4 cannot be cut over layout.tp=8; take layout.tp from [1, 2, 4]"),
        ({"intermediate_size": 6}, 4, 128, "model.intermediate_size=6 cannot be cut over layout.tp=4; take layout.tp"),
        ({}, 4, 126, "seq_len=126 cannot be cut over layout.tp=4 under layout.sequence_parallel=true"),
        ({}, 1, 4096, "seq_len=4096 is longer than model.max_position_embeddings=2048"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "hidden_size": 192},
            4,
            120,
            "model.num_key_value_heads=3 is neither a multiple nor a divisor of layout.tp=4; "
            "take layout.tp from [1, 3, 6, 12]",
        ),
    ],
)
def test_what_tp_cannot_cut_is_refused_with_both_numbers_and_the_legal_ones(changes, tp, seq_len, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        replace(GPTConfig(), **changes).validate_cut(tp, sequence_parallel=tp > 1, seq_len=seq_len)


def test_fewer_key_value_heads_than_tp_are_legal_where_each_serves_whole_ranks():
    config = GPTConfig(num_key_value_heads=1)
    config.validate_cut(4, sequence_parallel=False, seq_len=127)
    config = replace(config, num_attention_heads=8, num_key_value_heads=2)
    config.validate_cut(8, sequence_parallel=True, seq_len=128)


def test_the_width_of_the_deep_mlp_must_be_divisible():
    with pytest.raises(ValueError, match=re.escape("model.hidden_size=1024 cannot be cut over layout.tp=3")):
        MLPConfig().validate_cut(3, sequence_parallel=False, seq_len=128)
    assert MLPConfig().parameter_count() == 4 * 1024**2

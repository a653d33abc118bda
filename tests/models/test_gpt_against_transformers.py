"""One GPT is GPT-2, Llama, Qwen, OLMo and Mistral by its config alone: equal to Hugging Face's own code for each.

For each family a small model of theirs gets random weights, ours the same weights, and logits, loss and the gradient of
every parameter are compared. The configs are ours; what they and a config of theirs both have a name for, theirs gets
from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from megalite.models.config import GPTConfig, RopeScaling
from megalite.models.gpt import GPT
from megalite.models.microbatch import IGNORED, Microbatch
from megalite.spec import param_specs
from tests.law import assert_equal

transformers = pytest.importorskip("transformers")

BATCH, SEQ = 2, 16
BASE = GPTConfig(
    vocab_size=29,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rope_theta=100.0,
    rms_norm_eps=1e-3,  # large enough to be seen
    layer_norm_epsilon=1e-3,
)
# With this theta, either scaling keeps the first of the four pairs, stretches the last, and has others between.
LLAMA3_SCALING = RopeScaling("llama3", factor=4.0, original_max_position_embeddings=128)
YARN = RopeScaling("yarn", factor=4.0, original_max_position_embeddings=512, beta_slow=4.0)

# Our module -> theirs, * being the layer; several where ours is one fused weight.
LLAMA: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens",),
    "blocks.*.attention_norm": ("model.layers.*.input_layernorm",),
    "blocks.*.attention.qkv": tuple(f"model.layers.*.self_attn.{part}_proj" for part in "qkv"),
    "blocks.*.attention.q_norm": ("model.layers.*.self_attn.q_norm",),
    "blocks.*.attention.k_norm": ("model.layers.*.self_attn.k_norm",),
    "blocks.*.attention.out": ("model.layers.*.self_attn.o_proj",),
    "blocks.*.mlp_norm": ("model.layers.*.post_attention_layernorm",),
    "blocks.*.mlp.up": ("model.layers.*.mlp.gate_proj", "model.layers.*.mlp.up_proj"),
    "blocks.*.mlp.down": ("model.layers.*.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
OLMO2 = LLAMA | {
    "blocks.*.attention_norm": ("model.layers.*.post_attention_layernorm",),
    "blocks.*.mlp_norm": ("model.layers.*.post_feedforward_layernorm",),
}
GPT2: dict[str, tuple[str, ...]] = {
    "embedding": ("transformer.wte",),
    "positions": ("transformer.wpe",),
    "blocks.*.attention_norm": ("transformer.h.*.ln_1",),
    "blocks.*.attention.qkv": tuple(f"transformer.h.*.attn.{part}" for part in "qkv"),
    "blocks.*.attention.out": ("transformer.h.*.attn.c_proj",),
    "blocks.*.mlp_norm": ("transformer.h.*.ln_2",),
    "blocks.*.mlp.up": ("transformer.h.*.mlp.c_fc",),
    "blocks.*.mlp.down": ("transformer.h.*.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
}


@dataclass(frozen=True)
class Family:
    """model: Hugging Face's class. more: what its config has under another name, or alone."""

    model: str
    config: GPTConfig
    names: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LLAMA)
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oracle(self) -> Any:
        return getattr(transformers, self.model)


FAMILIES = {
    "GPT-2": Family(
        "GPT2LMHeadModel",
        replace(
            BASE,
            hidden_size=28,  # an odd head_dim, which only rotary positions refuse
            num_key_value_heads=None,
            hidden_act="gelu_new",
            is_gated_act=False,
            mlp_bias=True,
            norm_type="layernorm",
            position_embedding_type="absolute",
            attention_bias=True,
            tie_word_embeddings=True,
        ),
        GPT2,
        {"n_inner": BASE.intermediate_size, "activation_function": "gelu_new", "attn_pdrop": 0.0},
    ),
    "Llama 2": Family("LlamaForCausalLM", replace(BASE, num_key_value_heads=None)),
    "Llama 3.1": Family("LlamaForCausalLM", replace(BASE, rope_scaling=LLAMA3_SCALING)),
    "Llama with linear scaling, every bias and GELU": Family(
        "LlamaForCausalLM",
        replace(
            BASE,
            rope_scaling=RopeScaling("linear", factor=4.0),
            attention_bias=True,
            mlp_bias=True,
            hidden_act="gelu",
        ),
    ),
    "Qwen 2": Family(
        "Qwen2ForCausalLM",
        replace(BASE, num_key_value_heads=1, attention_bias=True, attention_out_bias=False, tie_word_embeddings=True),
    ),
    "Qwen 2 with YaRN and a window in one layer": Family(
        "Qwen2ForCausalLM",
        replace(
            BASE,
            attention_bias=True,
            attention_out_bias=False,
            rope_scaling=YARN,
            sliding_window=5,
            layer_types=["full_attention", "sliding_attention"],
        ),
        more={"use_sliding_window": True},
    ),
    "Qwen 3": Family("Qwen3ForCausalLM", replace(BASE, qk_norm="head", head_dim=16)),
    "OLMo 1": Family(
        "OlmoForCausalLM",
        replace(BASE, norm_type="layernorm_nonparametric", layer_norm_epsilon=1e-5, clip_qkv=0.7),
    ),
    "OLMo 2": Family("Olmo2ForCausalLM", replace(BASE, norm_placement="post", qk_norm="full"), OLMO2),
    "Mistral": Family("MistralForCausalLM", replace(BASE, sliding_window=5, hidden_act="gelu_pytorch_tanh")),
}


class Outcome(NamedTuple):
    """What a model gives for the batch, parameters and gradients by name."""

    parameters: dict[str, Tensor]
    logits: Tensor
    loss: Tensor
    gradients: dict[str, Tensor]


@contextmanager
def float32_means_float64() -> Iterator[None]:
    """Hugging Face's norms, softmax, rotary angles and loss are in float32 by name, whatever the model's dtype."""
    default = torch.get_default_dtype()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(Tensor, "float", Tensor.double)
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def batch() -> tuple[Tensor, Tensor]:
    """Tokens, and the same as labels, some of them left out."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(BASE.vocab_size, (BATCH, SEQ), generator=generator)
    return tokens, tokens.masked_fill(torch.rand(BATCH, SEQ, generator=generator, dtype=torch.float64) < 0.3, IGNORED)


def microbatch() -> Microbatch:
    """As ours has it: each token with the label of the next."""
    tokens, labels = batch()
    return Microbatch(tokens, F.pad(labels, (0, 1), value=IGNORED)[:, 1:], torch.arange(SEQ), torch.arange(BATCH), 1)


def their_keywords(family: Family) -> dict[str, Any]:
    """Our config under their names: the same."""
    known = family.oracle.config_class()
    ours = {name: value for name, value in asdict(family.config).items() if value is not None}
    scaling = {name: value for name, value in ours.pop("rope_scaling").items() if value is not None}
    keywords = {name: value for name, value in ours.items() if hasattr(known, name) and name != "model_type"}
    if family.config.position_embedding_type == "rope":
        keywords["rope_theta"] = ours["rope_theta"]
        keywords["rope_scaling"] = scaling if scaling["rope_type"] != "none" else None
    return keywords | {"attn_implementation": "eager"} | dict(family.more)


@functools.cache
def theirs(name: str) -> Outcome:
    """The sum of the loss is theirs, a mean, times the number of labels that count."""
    family = FAMILIES[name]
    oracle = family.oracle  # imported out here, since an import keeps what float32 means at the time
    with float32_means_float64():
        model = oracle(oracle.config_class(**their_keywords(family))).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for path, parameter in model.named_parameters():
                scale = path.endswith(".weight") and parameter.ndim == 1  # a norm's, drawn too lest it go unseen
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + scale)
        tokens, labels = batch()
        output = model(input_ids=tokens, labels=labels, use_cache=False)
        loss = output.loss * microbatch().valid()
        loss.backward()
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {tensor.dtype for tensor in (*parameters.values(), output.logits, loss)} == {torch.float64}
    return Outcome(parameters, output.logits.detach(), loss.detach(), gradients)


def untangled(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """GPT-2's matrices are [in, out], with q, k and v side by side."""
    out = {}
    for name, tensor in tensors.items():
        tensor = tensor.T if tensor.ndim == 2 and ".c_" in name else tensor
        if ".c_attn." in name:
            out |= {name.replace("c_attn", part): piece for part, piece in zip("qkv", tensor.chunk(3), strict=True)}
        else:
            out[name] = tensor
    return out


def as_ours(tensors: dict[str, Tensor], family: Family, model: GPT) -> dict[str, Tensor]:
    """Their parameters as ours. Entries only change places, so their gradients become ours in the same way."""
    tensors = untangled(tensors) if family.names is GPT2 else dict(tensors)
    config, out = family.config, {}
    for name, spec in param_specs(model).items():
        module, _, leaf = name.rpartition(".")
        layer = next((part for part in module.split(".") if part.isdigit()), "*")
        sources = family.names[module.replace(layer, "*")]
        parts = [tensors.pop(f"{source.replace('*', layer)}.{leaf}") for source in sources]
        if module.endswith(".qkv"):  # each group's queries, its key, its value
            heads = {"g": config.kv_heads, "d": config.dim_per_head}
            whole = torch.cat([rearrange(part, "(g p d) ... -> g p d ...", **heads) for part in parts], dim=1)
        elif module.endswith(".up"):
            whole = torch.stack(parts)
        else:
            (whole,) = parts
        out[name] = whole.reshape(spec.shape)
    assert not tensors, f"theirs alone: {list(tensors)}"
    return out


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_loss_and_every_gradient_are_hugging_faces(name: str, implementation: str) -> None:
    family, expected = FAMILIES[name], theirs(name)
    config = replace(family.config, attn_implementation=implementation)
    model = GPT(config, dtype=torch.float64)
    parameters = as_ours(expected.parameters, family, model)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            parameter.copy_(parameters[path])
    loss = model(None, microbatch())
    loss.backward()
    assert_equal(model.logits(microbatch()).detach(), expected.logits, "logits")
    assert_equal(loss.detach(), expected.loss, "loss")
    gradients = as_ours(expected.gradients, family, model)
    for path, parameter in model.named_parameters():
        assert parameter.grad is not None, path
        assert_equal(parameter.grad, gradients[path], path)

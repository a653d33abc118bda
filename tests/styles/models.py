"""transformers' Llama and GPT-2, tiny, from a config, with the styles that cut them over tp."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.styles.training import VOCAB, Recipe

transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, KV_HEADS = 32, 4, 2

LLAMA = {
    "model.embed_tokens": "embedding",
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "lm_head": "column_gather",
}
LLAMA_ONE_COPY = LLAMA | {"*.self_attn": "copy", "*.mlp": "copy"}
LLAMA_SEQUENCE = LLAMA | {
    "model.layers.0": "split_seq",
    "*.self_attn": "gather_seq",
    "*.mlp": "gather_seq",
    "*layernorm": "norm",
    "model.norm": "norm",
}
QWEN3 = LLAMA | {"*.[qk]_norm": "head_norm"}

GPT2 = {
    "transformer.wte": "embedding",
    "*.c_attn": "column:3",
    "*.attn.c_proj": "row",
    "*.c_fc": "column",
    "*.mlp.c_proj": "row",
    "lm_head": "column_gather",
}
GPT2_SEQUENCE = GPT2 | {
    "transformer.h.0": "split_seq",
    "*.attn": "gather_seq",  # but not *.mlp: its column gathers for itself
    "*.ln_[12]": "norm",
    "transformer.ln_f": "join_seq",
}
GPT2_ATTRIBUTES = {"*.attn": ("num_heads", "split_size")}


def _drawn(model: nn.Module) -> nn.Module:
    """Values from a generator of its own; a norm's and a bias's too, lest they go unseen."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            scale = path.endswith(".weight") and parameter.ndim == 1
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator) + scale)
    return model.double().train()


def _build(name: str, **options: Any) -> nn.Module:
    oracle = getattr(transformers, f"{name}ForCausalLM", None) or getattr(transformers, f"{name}LMHeadModel")
    sizes = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    return _drawn(oracle(oracle.config_class(**sizes, max_position_embeddings=16, **options)))


def llama(kv_heads: int = KV_HEADS, **options: Any) -> nn.Module:
    return _build(
        "Llama", intermediate_size=40, num_key_value_heads=kv_heads, rope_theta=100.0, rms_norm_eps=1e-3,
        tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, **options,
    )  # fmt: skip


def qwen3() -> nn.Module:
    sizes = {"intermediate_size": 40, "num_key_value_heads": KV_HEADS, "head_dim": 16, "tie_word_embeddings": True}
    return _build("Qwen3", rms_norm_eps=1e-3, bos_token_id=1, eos_token_id=2, **sizes)


def gpt2() -> nn.Module:
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return _build("GPT2", layer_norm_epsilon=1e-3, bos_token_id=1, eos_token_id=2, **drops)


def _all_biases() -> nn.Module:
    return llama(attention_bias=True, mlp_bias=True, pad_token_id=3)


def _recomputed() -> nn.Module:
    model: Any = llama()
    (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    return model


def _multi_head() -> nn.Module:
    return llama(HEADS)


class TorchEncoder(nn.Module):
    """torch's own encoder, which calls none of its attention's linears, between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(HIDDEN, HEADS, 40, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


def torch_encoder() -> nn.Module:
    return _drawn(TorchEncoder())


def mlp() -> nn.Module:
    """Linear, activation in place, dropout, linear: as torchvision's MLP is made."""
    block = nn.Sequential(nn.Linear(HIDDEN, 64), nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Linear(64, HIDDEN))
    norm, head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB)
    return _drawn(nn.Sequential(nn.Embedding(VOCAB, HIDDEN), norm, block, nn.LayerNorm(HIDDEN), head))


MLP = {"0": "embedding", "2.0": "column", "2.3": "row", "4": "column_gather"}
MLP_SEQUENCE = MLP | {"1": "norm", "3": "norm"} | {"[1]": "split_seq"}

RECIPES = {
    "Llama": Recipe(llama, LLAMA, unit="LlamaDecoderLayer"),
    "Llama, one copy": Recipe(llama, LLAMA_ONE_COPY, unit="LlamaDecoderLayer"),
    "Llama, sequence": Recipe(llama, LLAMA_SEQUENCE, unit="LlamaDecoderLayer"),
    "Llama with biases and padding, sequence": Recipe(_all_biases, LLAMA_SEQUENCE, unit="LlamaDecoderLayer"),
    "Llama recomputed, sequence": Recipe(_recomputed, LLAMA_SEQUENCE, unit="LlamaDecoderLayer"),
    "Llama of 4 key heads": Recipe(_multi_head, LLAMA, unit="LlamaDecoderLayer"),
    "Llama of 4 key heads, sequence": Recipe(_multi_head, LLAMA_SEQUENCE, unit="LlamaDecoderLayer"),
    "Qwen 3": Recipe(qwen3, QWEN3, unit="Qwen3DecoderLayer"),
    "MLP": Recipe(mlp, MLP, is_theirs=False),
    "MLP, sequence": Recipe(mlp, MLP_SEQUENCE, is_theirs=False),
    "GPT-2": Recipe(gpt2, GPT2, GPT2_ATTRIBUTES, "GPT2Block"),
    "GPT-2, sequence": Recipe(gpt2, GPT2_SEQUENCE, GPT2_ATTRIBUTES, "GPT2Block"),
}
ENCODER = Recipe(torch_encoder, {}, unit="TransformerEncoderLayer", is_theirs=False)

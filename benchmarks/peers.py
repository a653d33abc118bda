"""The other side of the comparisons: a plain Llama as a user of torch writes it, and torch's own ways to spread it.

Plans are those of torch's documentation (pytorch.org/tutorials, "Large Scale Transformer model training with Tensor
Parallel"): q, k and v apart, each a column-parallel linear of its own, as are the gate and up projections.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from megalite.models.config import GPTConfig
from megalite.models.microbatch import Microbatch
from megalite.spec import param_specs


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.dim_per_head
        self.wq = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(hidden, config.kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(hidden, config.kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        # As many heads as the linears give: all of them, or this rank's.
        q, k, v = (rearrange(wx(x), "b s (h d) -> b h s d", d=self.head_dim) for wx in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(
            _rotate(q, cos, sin), _rotate(k, cos, sin), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.wo(rearrange(y, "b h s d -> b s (h d)"))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class FeedForward(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.w2 = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.w3 = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TransformerBlock(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.ffn_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), cos, sin)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """The plain model of a `GPTConfig` with rope, RMS norm, SwiGLU: ids (batch, seq) -> logits (batch, seq, vocab)."""

    def __init__(self, config: GPTConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(TransformerBlock(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in (p for p in self.parameters() if p.ndim > 1):
                parameter.normal_(0, config.initializer_range, generator=generator)
        dim = config.dim_per_head
        frequencies = config.rope_theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), frequencies)
        self.register_buffer("cos", torch.cat((angles, angles), -1).cos().float(), persistent=False)
        self.register_buffer("sin", torch.cat((angles, angles), -1).sin().float(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, cos, sin)
        return self.output(self.norm(h))


def loss_sum(model: nn.Module, microbatch: Microbatch) -> Tensor:
    """Summed cross entropy of the valid tokens."""
    logits = model(microbatch.tokens)
    return F.cross_entropy(logits.flatten(0, 1), microbatch.labels.flatten(), reduction="sum")


def tensor_parallel(model: Llama, mesh: DeviceMesh, *, loss_parallel: bool) -> Llama:
    """The documented plan for tensor parallelism, in place. Without loss_parallel the logits are gathered."""
    block: dict[str, ParallelStyle] = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
    }
    output = ColwiseParallel(use_local_output=False) if loss_parallel else ColwiseParallel(output_layouts=Replicate())
    whole: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
        "output": output,
    }
    return _parallelize(model, mesh, block, whole)


def sequence_parallel(model: Llama, mesh: DeviceMesh) -> Llama:
    """The documented plan for tensor, sequence and loss parallelism together, in place."""
    tokens_cut, whole_tokens = (Shard(1), None, None), (Replicate(), None, None)
    block: dict[str, ParallelStyle] = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=tokens_cut, desired_input_layouts=whole_tokens),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    }
    whole: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    return _parallelize(model, mesh, block, whole)


def _parallelize(
    model: Llama, mesh: DeviceMesh, block: dict[str, ParallelStyle], whole: dict[str, ParallelStyle]
) -> Llama:
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    parallelize_module(model, mesh, whole)
    return model


def in_our_names(plain: Mapping[str, Tensor], config: GPTConfig) -> dict[str, Tensor]:
    """Whole tensors of a `Llama`, its weights or their gradients, under the names and in the shapes of our `GPT`."""
    heads = {"g": config.kv_heads, "d": config.dim_per_head}
    ours = {
        "embedding.weight": plain["tok_embeddings.weight"],
        "norm.weight": plain["norm.weight"],
        "head.weight": plain["output.weight"],
    }
    for layer in range(config.num_hidden_layers):
        theirs = {
            name.removeprefix(f"layers.{layer}."): x for name, x in plain.items() if name.startswith(f"layers.{layer}.")
        }
        q, k, v = (
            rearrange(theirs[f"attention.{name}.weight"], "(g p d) hidden -> g p d hidden", **heads)
            for name in ("wq", "wk", "wv")
        )
        block = {
            "attention_norm.weight": theirs["attention_norm.weight"],
            "attention.qkv.weight": torch.cat((q, k, v), dim=1),
            "attention.out.weight": theirs["attention.wo.weight"],
            "mlp_norm.weight": theirs["ffn_norm.weight"],
            "mlp.up.weight": torch.stack((theirs["feed_forward.w1.weight"], theirs["feed_forward.w3.weight"])),
            "mlp.down.weight": theirs["feed_forward.w2.weight"],
        }
        ours |= {f"blocks.{layer}.{name}": x for name, x in block.items()}
    return ours


def this_rank(whole: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """What of whole tensors under our names is this rank's, as `model` cuts them."""
    return {name: whole[name][spec.box()] for name, spec in param_specs(model).items()}


def copy_weights(plain: Llama, model: nn.Module) -> None:
    """Gives our `model` the weights of a plain one that no plan has touched yet."""
    mine = this_rank(in_our_names(dict(plain.named_parameters()), plain.config), model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(mine[name])


def whole_gradients(plain: nn.Module) -> dict[str, Tensor]:
    """Every gradient of a plain model, put together from all ranks where it is a DTensor. All ranks must call it."""
    gradients = {name: parameter.grad for name, parameter in plain.named_parameters()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in gradients.items() if g is not None}

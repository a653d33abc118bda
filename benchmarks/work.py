"""What the benchmarks compute: one model and one batch, by options with the same names everywhere."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from megalite.comm import start_all_reduce
from megalite.mesh import Axis
from megalite.models.config import GPTConfig
from megalite.models.microbatch import Microbatch
from megalite.spec import param_specs


class Work(NamedTuple):
    """A model, and the shape of its global batch of random tokens: `batch` sequences of `seq`."""

    config: GPTConfig
    batch: int
    seq: int

    @property
    def tokens(self) -> int:
        return self.batch * self.seq

    def microbatch(self, *, device: torch.device | str = "cpu") -> Microbatch:
        """The whole batch, the same on every rank."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(self.config.vocab_size, (self.batch, self.seq + 1), generator=generator).to(device)
        positions, samples = (torch.arange(n, device=device) for n in (self.seq, self.batch))
        return Microbatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, samples, 1)

    def part(self, dp: Axis, *, device: torch.device | str = "cpu") -> Microbatch:
        """This data rank's sequences. ValueError if the axis does not divide the batch."""
        whole, mine = self.microbatch(device=device), dp.part(self.batch)
        return Microbatch(whole.tokens[mine], whole.labels[mine], whole.positions, whole.sample_ids[mine], whole.step)

    def __str__(self) -> str:
        config = self.config
        return (
            f"hidden {config.hidden_size}, ffn {config.intermediate_size}, {config.num_hidden_layers} layers, "
            f"vocab {config.vocab_size}, batch {self.batch} x {self.seq} tokens"
        )


def add_work(parser: argparse.ArgumentParser) -> None:
    """The options that `work_of` reads."""
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--ffn", type=int, help="default 3 x hidden")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, help="default: as many as heads")
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--seq", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="sequences, over all ranks")


def work_of(options: argparse.Namespace) -> Work:
    """A Llama: rope, RMS norm, SwiGLU, no bias."""
    config = GPTConfig(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=options.ffn or 3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        max_position_embeddings=options.seq,
    )
    return Work(config, options.batch, options.seq)


def partial_parameters(model: nn.Module, tp: Axis) -> list[nn.Parameter]:
    """Those whose gradient on this rank is only a summand over tp."""
    specs = param_specs(model)
    return [parameter for name, parameter in model.named_parameters() if tp in specs[name].partial]


def sum_gradients(parameters: Sequence[nn.Parameter], tp: Axis) -> None:
    """One sum over tp of all their gradients, in place. In training, `Zero` does it."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        return
    total = start_all_reduce(torch.cat([gradient.flatten() for gradient in gradients]), tp).wait()
    for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view(gradient.shape))

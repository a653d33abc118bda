"""A model whose parameters hold matrices in every way that there is, and torch's own Muon and Adafactor on them, in one
process, as Hugging Face would have them: an oracle that shares no code with `megalite.zero`."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from megalite.layers.attention import GroupedQueryAttention, HeadCut
from megalite.layers.feed_forward import FeedForward
from megalite.mesh import Mesh
from megalite.spec import init_parameters, param_specs
from megalite.zero import Adafactor, Muon
from tests.zero.training import DECAY, LR, MAX_NORM, STEPS, WIDTH, global_batch

HEADS, KV_HEADS, FFN = 4, 2, 24
RULES: dict[str, Any] = {
    "muon": Muon(lr=LR, weight_decay=DECAY, exclude=("leave.*",)),
    "adafactor": Adafactor(lr=LR, weight_decay=DECAY, exclude=("leave.*",)),
}
MULTIPLIERS = {"mlp.*": 0.5}


class Everything(nn.Module):
    """Plain matrices, one used twice, one frozen, one of a single row and one large; heads and an MLP cut over tp."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        tp, plain = mesh.tp, {"dtype": torch.float64}
        self.twice = nn.Linear(WIDTH, WIDTH, **plain)
        self.frozen = nn.Linear(WIDTH, WIDTH, **plain).requires_grad_(False)
        self.large, self.small = nn.Linear(WIDTH, 64, **plain), nn.Linear(64, 1, **plain)
        self.leave = nn.Linear(WIDTH, WIDTH, **plain)
        cut = HeadCut.even(tp) if tp.size <= KV_HEADS else HeadCut(tp, *mesh.divide(tp, KV_HEADS))
        heads: dict[str, Any] = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": 2, "bias": True}
        self.attention = GroupedQueryAttention(WIDTH, cut=cut, **heads, **plain)
        self.mlp = FeedForward(WIDTH, FFN, tp=tp, bias=True, **plain)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.twice(torch.tanh(self.twice(self.frozen(x)))))
        x = x + self.attention(x)
        x = x + self.mlp(x) * self.small(torch.tanh(self.large(x)))
        return self.leave(x)


def indices(name: str, parameter: Tensor) -> list[tuple[Any, ...]]:
    """Where in a parameter of `Everything` in one process Hugging Face's matrices are."""
    if name == "attention.qkv.weight":
        queries = parameter.shape[1] - 2
        return [(slice(None), slice(queries)), (slice(None), queries), (slice(None), queries + 1)]
    return [(0,), (1,)] if name == "mlp.up.weight" else [()]


@contextmanager
def not_rounded() -> Iterator[None]:
    """torch's Muon makes orthogonal in bfloat16 always; here it does so in the matrix's own dtype."""
    with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
        yield


def oracle(name: str, matrices: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "muon":
        return torch.optim.Muon(matrices, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    return torch.optim.Adafactor(matrices, weight_decay=DECAY)


def one_process(name: str, build: Any = Everything) -> dict[str, Tensor]:
    """Weights by logical name after clipped steps, by torch's optimizers on whole matrices."""
    torch.manual_seed(0)
    model = build(Mesh.build())
    init_parameters(model, 7)
    trained = {key: p for key, p in model.named_parameters() if p.requires_grad}
    excluded = RULES[name].exclude
    wholes = [
        (key, index, nn.Parameter(p.detach()[index].reshape(-1, p.shape[-1]).clone()))
        for key, p in trained.items()
        if key.endswith("weight") and p.ndim > 1 and not any(fnmatch.fnmatch(key, pattern) for pattern in excluded)
        for index in indices(key, p)
    ]
    rest = {key: p for key, p in trained.items() if key not in {of for of, _, _ in wholes}}
    decays = {key: spec.decay for key, spec in param_specs(model).items()}
    adamw = torch.optim.AdamW(
        [_group(key, p) | {"weight_decay": DECAY if decays[key] else 0.0} for key, p in rest.items()], lr=LR
    )
    optimizer = oracle(name, [_group(key, whole) for key, _, whole in wholes])
    for step in range(STEPS):
        batch = global_batch(step)
        (batch.loss(model) / batch.mask.sum()).backward()
        norm = nn.utils.clip_grad_norm_(trained.values(), MAX_NORM)
        assert norm > MAX_NORM, "each step must clip"
        for key, index, whole in wholes:
            whole.grad = trained[key].grad[index].reshape(whole.shape)
        with not_rounded():
            optimizer.step()
        adamw.step()
        with torch.no_grad():
            for key, index, whole in wholes:
                trained[key][index] = whole.view_as(trained[key][index])
        model.zero_grad()
    return {key: p.detach().clone() for key, p in model.named_parameters()}


def _group(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    factor = next((by for pattern, by in MULTIPLIERS.items() if fnmatch.fnmatch(name, pattern)), 1.0)
    return {"params": [parameter], "lr": LR * factor}

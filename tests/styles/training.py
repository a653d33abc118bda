"""A user's language model, trained for three clipped AdamW steps: cut by styles under `Zero`, and as it is by torch.

The global batch is a pure function of the step: (SAMPLES, SEQ) tokens, and labels of which some are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite import Layout, Mesh, Zero, parallelize, param_specs
from tests.models.test_gpt_against_transformers import float32_means_float64

VOCAB, SAMPLES, SEQ = 29, 8, 8  # no tp but 1 divides the vocabulary
STEPS, LR, DECAY, MAX_NORM = 3, 0.02, 0.1, 0.5
IGNORED = -100


class Recipe(NamedTuple):
    """How a model is built, in float64 and with the same weights each time, and what `parallelize` is told of it.

    unit: what is a unit of its own for `Zero`. is_theirs: transformers' code, which has float32 written in it.
    """

    build: Callable[[], nn.Module]
    styles: Mapping[str, str]
    attributes: Mapping[str, str | Sequence[str]] = {}
    unit: str = ""
    is_theirs: bool = True


class Record(NamedTuple):
    """Of each step the logits of the rank's samples, raw gradients and norm; the weights at the end; each parameter's
    logical name, shape and box."""

    logits: list[Tensor]
    gradients: list[dict[str, Tensor]]
    norms: list[float]
    weights: dict[str, Tensor]
    places: dict[str, tuple[str, tuple[int, ...], tuple[slice, ...], tuple[slice, ...]]]


def global_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (SAMPLES, SEQ), generator=generator)
    labels = torch.randint(VOCAB, (SAMPLES, SEQ), generator=generator)
    return tokens, labels.masked_fill(torch.rand(SAMPLES, SEQ, generator=generator) < 0.3, IGNORED)


def run_model(model: nn.Module, tokens: Tensor, labels: Tensor, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Logits, and the loss summed over the labels that count."""
    output = model(input_ids=tokens, use_cache=False).logits if recipe.is_theirs else model(tokens)
    loss = F.cross_entropy(output.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")
    return output, loss


def oracle(recipe: Recipe) -> Any:
    return float32_means_float64() if recipe.is_theirs else nullcontext()


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([g | {"weight_decay": DECAY if g["decay"] else 0.0} for g in groups], lr=LR)


def train(recipe: Recipe, layout: Layout, options: dict[str, Any], microbatches: int = 1) -> Record:
    with oracle(recipe):
        mesh = Mesh.build(layout)
        model = recipe.build()
        if recipe.styles:
            parallelize(model, recipe.styles, mesh, attributes=recipe.attributes)
        units = tuple({type(m) for m in model.modules() if type(m).__name__ == recipe.unit})
        zero = Zero(model, mesh, units=units, optimizer=adamw, **options)
        places = {name: (*spec.logical(name), spec.valid_box()) for name, spec in param_specs(model).items()}
        record = Record([], [], [], {}, places)
        for step in range(STEPS):
            batch = global_batch(step)
            count = (batch[1] != IGNORED).sum()
            mine = [part.chunk(mesh.dp.size)[mesh.dp.rank].chunk(microbatches) for part in batch]
            zero.begin(microbatches=microbatches)
            logits = []
            for tokens, labels in zip(*mine, strict=True):
                output, loss = run_model(model, tokens, labels, recipe)
                (loss / count).backward()
                logits.append(output.detach())
            record.logits.append(torch.cat(logits))
            record.gradients.append({name: g.clone() for name, g in zero.raw_gradients().items()})
            record.norms.append(zero.step(max_norm=MAX_NORM).item())
        with zero.gathered():
            record.weights.update({name: p.detach().clone() for name, p in model.named_parameters()})
        return record


def reference(recipe: Recipe) -> Record:
    """The untouched model in one process, by torch's own optimizer and clipping."""
    with oracle(recipe):
        model = recipe.build()
        named = dict(model.named_parameters())
        groups = [{"params": [p for p in named.values() if (p.ndim > 1) == d], "decay": d} for d in (True, False)]
        optimizer = adamw(groups)
        record = Record([], [], [], {}, {})
        for step in range(STEPS):
            tokens, labels = global_batch(step)
            output, loss = run_model(model, tokens, labels, recipe)
            (loss / (labels != IGNORED).sum()).backward()
            record.logits.append(output.detach())
            record.gradients.append({n: (0 * p if p.grad is None else p.grad).clone() for n, p in named.items()})
            record.norms.append(nn.utils.clip_grad_norm_(named.values(), MAX_NORM).item())
            optimizer.step()
            optimizer.zero_grad()
        record.weights.update({name: p.detach().clone() for name, p in named.items()})
        assert {weight.dtype for weight in record.weights.values()} == {torch.float64}
        return record


def assert_equals_the_plain_model(records: Sequence[Record], one: Record, dp: int = 1) -> None:
    """Each rank's logits, its part of each raw gradient, the norm and the weights after the last step, to 1e-10 of the
    larger of the tensor's norm and 1e-3 of the global one; and all parts together are all of each parameter."""
    per_replica = len(records) // dp
    for rank, record in enumerate(records):
        for step, logits in enumerate(record.logits):
            expected = one.logits[step].chunk(dp)[rank // per_replica]
            assert logits.shape == expected.shape
            assert (logits - expected).norm() <= 1e-10 * expected.norm(), f"logits in step {step}"
            assert abs(record.norms[step] - one.norms[step]) <= 1e-10 * one.norms[step], "norm"
            for name, gradient in record.gradients[step].items():
                least = 1e-3 * one.norms[step]
                _assert_part(name, gradient, record, one.gradients[step], least, f"gradient of {name} in step {step}")
        for name, weight in record.weights.items():
            _assert_part(name, weight, record, one.weights, 1e-3, f"weight {name}")
    for name, whole in one.weights.items():
        covered = torch.zeros(whole.shape, dtype=torch.bool)
        for record in records:
            for logical, shape, box, _ in record.places.values():
                if logical == name:
                    assert shape == tuple(whole.shape), name
                    covered[box] = True
        assert covered.all(), f"{name} is not held as a whole"


def _assert_part(name: str, part: Tensor, record: Record, whole: Mapping[str, Tensor], least: float, what: str) -> None:
    logical, _, box, valid = record.places[name]
    expected = whole[logical]
    error = (part[valid] - expected[box]).norm().item()
    assert error <= 1e-10 * max(expected.norm().item(), least), f"{what} is off by {error:.3g}"
    padding = part.clone()
    padding[valid] = 0
    assert not padding.any(), f"{what}: padding is not zero"

"""Evaluation is a mean of sums: one number for a set of tokens, however they are cut into batches and over ranks."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from megalite.mesh import Layout, Mesh
from megalite.models.microbatch import IGNORED, Microbatch, VectorMicrobatch
from megalite.pipeline.execute import Pipeline
from megalite.pipeline.straight import gpipe
from megalite.train.evaluate import evaluate
from tests.ranks import run


class Nats(nn.Module):
    """The loss of a token is its number, in nats; in training a hundred more."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, _: None, microbatch: Microbatch) -> Tensor:
        counted = microbatch.labels != IGNORED
        return (microbatch.tokens.double() + 100 * self.training)[counted].sum()


def alone(model: nn.Module) -> Pipeline:
    """A model as the only stage."""
    return Pipeline({0: model}, gpipe(1, 1))


def batch(tokens: list[int], ignored: int = 0, label_bytes: float | None = None) -> Microbatch:
    row = torch.tensor([tokens])
    labels = torch.ones_like(row)
    labels[:, :ignored] = IGNORED
    return Microbatch(
        row, labels, torch.arange(len(tokens)), torch.zeros(1, dtype=torch.int64), 0, None, None, label_bytes
    )


def test_tokens_weigh_alike_in_batches_of_any_length():
    """A mean of the batches' means would be 4."""
    batches = [[batch([1, 1, 1, 1]), batch([9, 9, 5], ignored=2)], [batch([8, 8], ignored=2)]]
    found = evaluate(alone(Nats()), batches, mesh=Mesh.build())
    assert found == {"val/loss": 9 / 5, "val/perplexity": pytest.approx(math.exp(9 / 5), rel=1e-15)}


def test_bits_per_byte_is_the_information_over_the_bytes_and_only_where_all_are_known():
    batches = [[batch([2, 2], label_bytes=5.0), batch([4], label_bytes=3.0)]]
    found = evaluate(alone(Nats()), batches, mesh=Mesh.build())
    assert found["val/bits_per_byte"] == pytest.approx(8 / math.log(2) / 8, rel=1e-15)
    batches[0].append(batch([1]))
    assert "val/bits_per_byte" not in evaluate(alone(Nats()), batches, mesh=Mesh.build())


def test_a_loss_past_what_an_exponential_can_hold_has_an_infinite_perplexity():
    assert evaluate(alone(Nats()), [[batch([1000])]], mesh=Mesh.build())["val/perplexity"] == math.inf


def test_nothing_to_evaluate_is_a_loss_of_zero_and_no_division():
    assert evaluate(alone(Nats()), [], mesh=Mesh.build()) == {"val/loss": 0.0}


def test_vectors_have_a_loss_alone():
    model = nn.Linear(2, 2)
    model.forward = lambda _, microbatch: microbatch.inputs.sum()  # type: ignore[assignment]
    vectors = VectorMicrobatch(torch.ones(1, 2), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64), 0)
    assert evaluate(alone(model), [[vectors]], mesh=Mesh.build()) == {"val/loss": 1.0}


def test_training_mode_comes_back_and_is_off_meanwhile():
    model = Nats()
    assert evaluate(alone(model), [[batch([3])]], mesh=Mesh.build())["val/loss"] == 3.0 and model.training
    model.eval()
    evaluate(alone(model), [[batch([3])]], mesh=Mesh.build())
    assert not model.training


def on_two_ranks() -> list[dict[str, float]]:
    """Rank 1 has fewer tokens, and in the second case does not know their bytes."""
    mesh = Mesh.build(Layout(dp=2))
    mine = [batch([1, 1, 1], label_bytes=3.0)] if mesh.rank == 0 else [batch([6], label_bytes=1.0)]
    unknown = mine if mesh.rank == 0 else [batch([6])]
    return [evaluate(alone(Nats()), [part], mesh=mesh) for part in (mine, unknown)]


def test_all_ranks_have_the_numbers_of_all_their_tokens():
    for known, unknown in run(on_two_ranks, 2):
        assert known["val/loss"] == 9 / 4 and known["val/bits_per_byte"] == pytest.approx(
            9 / math.log(2) / 4, rel=1e-15
        )
        assert unknown["val/loss"] == 9 / 4 and "val/bits_per_byte" not in unknown

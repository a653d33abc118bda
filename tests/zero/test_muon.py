"""The arithmetic of Muon, beside its definition and torch's."""

from __future__ import annotations

import pytest
import torch

from megalite.zero.muon import Muon, orthogonalized
from tests.zero.whole_matrices import not_rounded


def matrix(rows: int, columns: int, *, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(6, 6), (4, 16), (16, 4), (1, 8), (8, 1)])
def test_singular_vectors_stay_and_singular_values_come_near_one(shape):
    x = matrix(*shape)
    u, s, v = torch.linalg.svd(x, full_matrices=False)
    a, b, c = 3.4445, -4.7750, 2.0315
    values = s / s.norm()
    for _ in range(5):
        values = a * values + b * values**3 + c * values**5  # the definition, on singular values
    torch.testing.assert_close(orthogonalized(x), u @ values.diag() @ v, rtol=1e-10, atol=1e-12)
    assert values[s > 0.05 * s.norm()].min() > 0.6 and values.max() < 1.25


def test_zero_stays_zero():
    assert not orthogonalized(torch.zeros(3, 5)).any()


def test_in_bfloat16_the_result_is_that_of_float64_but_for_the_rounding():
    x = matrix(12, 20)
    rounded = orthogonalized(x.bfloat16())
    assert rounded.dtype == torch.bfloat16
    # 8 bits a number, five steps each of three products
    assert (rounded.double() - orthogonalized(x)).norm() < 0.05 * orthogonalized(x).norm()


@pytest.mark.parametrize("nesterov", [True, False])
def test_three_steps_are_torchs(nesterov):
    rule = Muon(lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=nesterov)
    mine, other = matrix(4, 6), torch.nn.Parameter(matrix(4, 6))
    adjust = {"adjust_lr_fn": "match_rms_adamw"}
    theirs = torch.optim.Muon([other], lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=nesterov, **adjust)
    state: dict[str, torch.Tensor] = {}
    for step in range(3):
        other.grad = matrix(4, 6, seed=step + 1)
        (direction,) = rule.directions([rule.elementwise(other.grad.clone(), state)], [], theirs)
        mine = mine * (1 - 0.1 * 0.2) + rule.factor((4, 6), lr=0.1, rms=0.0) * direction
        with not_rounded():
            theirs.step()
    torch.testing.assert_close(mine, other.detach(), rtol=1e-12, atol=1e-12)

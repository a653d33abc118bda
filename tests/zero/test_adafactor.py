"""The arithmetic of Adafactor beside torch's, and what it would be on a part of a matrix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megalite.zero.adafactor import Adafactor

LR = 0.05


def uneven(seed: int) -> Tensor:
    """A gradient whose rows and columns differ in size, as those of a language model do."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(2, 32, dtype=torch.float64, generator=generator).exp()
    return torch.randn(32, 32, dtype=torch.float64, generator=generator) * scales[0][:, None] * scales[1]


def moved(start: Tensor, gradients: list[Tensor]) -> Tensor:
    """By torch's Adafactor."""
    weight = nn.Parameter(start.clone())
    optimizer = torch.optim.Adafactor([weight], lr=LR, weight_decay=0.0)
    for gradient in gradients:
        weight.grad = gradient
        optimizer.step()
    return weight.detach() - start


def test_three_steps_are_torchs_though_torch_never_sees_the_weights():
    rule = Adafactor(lr=LR)
    start = uneven(10)
    mine, stand_in = start.clone(), nn.Parameter(torch.zeros(()).double().expand(32, 32))
    optimizer = rule.optimizer([{"params": [stand_in], "lr": LR}])
    gradients = [uneven(step) for step in range(3)]
    for gradient in gradients:
        (direction,) = rule.directions([gradient], [stand_in], optimizer)
        rms = mine.norm().item() / mine.numel() ** 0.5
        mine = mine + rule.factor((32, 32), lr=LR, rms=rms) * direction
    torch.testing.assert_close(mine - start, moved(start, gradients), rtol=1e-10, atol=1e-14)


def test_between_steps_what_stands_for_a_matrix_takes_no_memory():
    rule = Adafactor()
    stand_in = nn.Parameter(torch.zeros(()).double().expand(32, 32))
    optimizer = rule.optimizer([{"params": [stand_in], "lr": LR}])
    rule.directions([uneven(0)], [stand_in], optimizer)
    assert stand_in.shape == (32, 32) and stand_in.grad is None and stand_in.untyped_storage().nbytes() == 8
    assert {tuple(value.shape) for value in optimizer.state[stand_in].values()} == {(), (32, 1), (1, 32)}


def test_on_flat_shards_it_would_be_another_optimizer():
    """Why matrices travel: means over the rows and columns of a part, or none, are not those of the matrix."""
    start, gradients = uneven(10), [uneven(step) for step in range(3)]
    whole = moved(start, gradients)
    flat = moved(start.flatten(), [gradient.flatten() for gradient in gradients])
    halves = [moved(start[:, part], [g[:, part] for g in gradients]) for part in (slice(16), slice(16, 32))]
    for wrong, least in ((flat.view(32, 32), 0.3), (torch.cat(halves, dim=1), 0.05)):
        assert (wrong - whole).norm() > least * whole.norm()

"""What "equals the same thing on one rank" means, and what tests of it share."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.mesh import Axis, Layout, Mesh


def assert_equal(value: Tensor, reference: Tensor, what: str, *, tolerance: float = 1e-10) -> None:
    """|value - reference| <= tolerance times the reference's largest entry. 1e-10: float64 sums in another order differ
    by some 1e-15 of that, and a wrong term by far more."""
    assert value.shape == reference.shape, f"{what}: shape {tuple(value.shape)} for {tuple(reference.shape)}"
    assert value.dtype == reference.dtype, f"{what}: {value.dtype} for {reference.dtype}"
    error = (value - reference).abs().max().item() if value.numel() else 0.0
    largest = reference.abs().max().item() if value.numel() else 0.0
    assert error <= tolerance * max(largest, 1e-300), f"{what}: off by {error:.3g}, entries of up to {largest:.3g}"


def tp_axis() -> Axis:
    """All ranks of this world as one tensor axis."""
    return Mesh.build(Layout(tp=dist.get_world_size())).tp


def axes(name: str, size: int) -> list[Axis]:
    """An axis as each of its ranks sees it, without processes: enough for whatever does not communicate."""
    return [Axis(name, size, rank) for rank in range(size)]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Float64 from N(0, 1), the same on each rank that names the same seed."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def transposed(x: Tensor) -> Tensor:
    """The same values with the first two dims swapped in memory."""
    y = x.transpose(0, 1).contiguous().transpose(0, 1)
    assert min(x.shape[:2]) == 1 or not y.is_contiguous()
    return y

"""What is brought into a module, and what the first step must show."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite import parallelize
from megalite.mesh import Axis, Layout, Mesh
from tests.law import assert_equal, draw
from tests.ranks import RanksFailed, run

WIDTH, SEQ = 8, 4


class Block(nn.Module):
    """norm -> up -> tanh -> down; `reads` uses down's weight without calling it, as torch's attention does."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2))
        self.reads = reads

    def forward(self, flag: int, *, scores: list[Tensor], hidden: Tensor, mask: Tensor) -> Tensor:
        x = torch.tanh(self.up(self.norm(hidden)))
        return hidden + (F.linear(x, self.down.weight) if self.reads else self.down(x))


class Model(nn.Module):
    """A block whose hidden states come by keyword, between numbers, lists and a mask of whole numbers."""

    def __init__(self, *, reads: bool = False) -> None:
        super().__init__()
        self.block = Block(reads=reads)
        self.last = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(1, scores=[x], mask=torch.ones(SEQ, dtype=torch.int64), hidden=x)
        return self.last(y)


STYLES = {"block": "split_seq", "*.norm": "norm", "*.up": "column", "*.down": "row", "last": "join_seq"}


def outcome(tp: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    model = parallelize(Model(), STYLES, Mesh.build(Layout(tp=tp)))
    x = draw(2, SEQ, WIDTH).requires_grad_()
    y = model(x)
    (y**2).sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


def test_the_hidden_states_are_found_among_keywords_and_other_arguments():
    (expected, gradient), *_ = run(outcome, 1, 1)
    for y, dx in run(outcome, 2, 2):
        assert_equal(y, expected, "y")
        assert_equal(dx, gradient, "dx")


def test_a_call_without_hidden_states_is_refused_by_name():
    model = parallelize(nn.Sequential(nn.Identity()), {"0": "copy"}, Mesh.build())
    with pytest.raises(ValueError, match=r"0 \(copy, pattern '0'\): no argument is a floating-point tensor"):
        model(torch.zeros(1, 2, dtype=torch.int64))


def odd_sequence() -> None:
    parallelize(Model(), STYLES, Mesh.build(Layout(tp=2)))(draw(2, 3, WIDTH))


def test_a_sequence_that_tp_does_not_divide_is_refused_with_both_numbers():
    with pytest.raises(RanksFailed, match=r"block \(split_seq, .*\): 3 tokens cannot be cut over tp=2: take a length"):
        run(odd_sequence, 2)

    """Also on one rank, where nothing is wrong yet."""
    styles = {"*.up": "column", "*.down": "row"}
    model = parallelize(Model(reads=True), styles, Mesh.build())
    with pytest.raises(RuntimeError, match=r"not called in the first forward: block.down \(row, pattern '\*.down'\); "):
        model(draw(2, SEQ, WIDTH))


def test_what_only_a_later_forward_leaves_out_is_no_error_and_the_watch_has_gone():
    model = parallelize(Model(), {"*.up": "column", "*.down": "row"}, Mesh.build())
    model(draw(2, SEQ, WIDTH))
    model.block.reads = True
    model(draw(2, SEQ, WIDTH))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


class Backwards(nn.Module):
    """Two linears that are called in the other order than they are registered in."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Sequential(nn.LayerNorm(WIDTH, dtype=torch.float64)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.second(x))


def test_an_order_of_calls_that_is_not_that_of_registration_is_seen_in_the_first_forward():
    styles = {"first": "split_seq", "*.0": "norm"}
    model = parallelize(Backwards(), styles, Mesh.build())
    with pytest.raises(RuntimeError, match=r"second.0 .* was called where the sequence is whole, and by the order"):
        model(draw(2, SEQ, WIDTH))


def test_a_forward_that_failed_is_not_the_first_one():
    model = parallelize(Model(), STYLES, Mesh.build())
    with pytest.raises(RuntimeError):
        model(draw(2, SEQ, WIDTH + 1))
    assert model(draw(2, SEQ, WIDTH)).shape == (2, SEQ, WIDTH)


def test_a_pattern_over_all_layers_that_splits_again_is_refused():
    model = nn.Sequential(*(nn.Sequential(nn.LayerNorm(WIDTH)) for _ in range(2)))
    with pytest.raises(ValueError, match=r"1 .*: the sequence is cut here already; end the part before with join_seq"):
        parallelize(model, {"[01]": "split_seq", "*.0": "norm"}, SimpleNamespace(tp=Axis("tp", 2, 0)))

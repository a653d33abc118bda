"""Norms equal torch's own in value and gradients, whatever the memory order, the precision and what tp cuts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.layers.norm import LayerNorm, RMSNorm, SequenceParallelLayerNorm, SequenceParallelRMSNorm
from megalite.layers.rows import sequence_first
from megalite.mesh import Axis
from tests.counting import count
from tests.law import assert_equal, draw, tp_axis, transposed
from tests.ranks import run

BATCH, SEQ, HIDDEN = 2, 8, 24
KINDS = {"layernorm": LayerNorm, "rmsnorm": RMSNorm}


def same(x: Tensor) -> Tensor:
    return x


def reference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, *, kind: str) -> Tensor:
    """The norm by torch, in the dtype of x."""
    if kind == "layernorm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def drawn(norm: nn.Module, *, part: slice = slice(None)) -> nn.Module:
    """Weights that are neither 1 nor 0, of which this rank holds `part`."""
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            shape = (*norm.shape[:-1], norm.shape[-1])
            parameter.copy_((1 + 0.3 * draw(*shape, seed=10 + seed))[part])
    return norm


def outcome(norm: Callable[[Tensor], Tensor], x: Tensor, gradient: Tensor, *parameters: Tensor) -> list[Tensor]:
    """y, dx and the parameters' gradients."""
    x = x.detach().requires_grad_()
    y = norm(x)
    return [y.detach(), *torch.autograd.grad(y, (x, *parameters), gradient)]


def outcome_by_torch(norm: nn.Module, x: Tensor, gradient: Tensor, *, kind: str) -> list[Tensor]:
    """The same in float64 by torch's functions, with this norm's weights."""
    leaves = [p.detach().double().requires_grad_() for p in norm.parameters()]
    weight, bias = [*leaves, None, None][:2]
    return outcome(lambda x: reference(x, weight, bias, norm.eps, kind=kind), x.double(), gradient.double(), *leaves)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("order", "gradient_order"), [(same, same), (transposed, transposed), (transposed, same)])
def test_a_norm_equals_torchs_in_value_and_gradients(
    kind: str, affine: bool, order: Callable[[Tensor], Tensor], gradient_order: Callable[[Tensor], Tensor]
) -> None:
    norm = drawn(KINDS[kind](HIDDEN, elementwise_affine=affine, dtype=torch.float64))
    x, gradient = order(draw(BATCH, SEQ, HIDDEN)), gradient_order(draw(BATCH, SEQ, HIDDEN, seed=1))
    ours = outcome(norm, x, gradient, *norm.parameters())
    for value, expected in zip(ours, outcome_by_torch(norm, x, gradient, kind=kind), strict=True):
        assert_equal(value, expected, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_exact(kind: str) -> None:
    norm = drawn(KINDS[kind](5, eps=0.1, dtype=torch.float64))
    assert torch.autograd.gradcheck(norm, transposed(draw(3, 2, 5)).requires_grad_())
    assert torch.autograd.gradcheck(
        lambda w: torch.func.functional_call(norm, {"weight": w}, draw(3, 5)), draw(5).requires_grad_()
    )


class Copies(TorchDispatchMode):
    """Counts the operators that write a tensor out in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func._opname in ("clone", "copy_", "_to_copy", "contiguous"):
            self.seen.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_order_is_kept_and_nothing_is_copied(kind: str) -> None:
    norm = KINDS[kind](HIDDEN, dtype=torch.float64)
    x, gradient = transposed(draw(BATCH, SEQ, HIDDEN)), transposed(draw(BATCH, SEQ, HIDDEN, seed=1))
    with Copies() as copies:
        y, dx, *_ = outcome(norm, x, gradient, *norm.parameters())
    assert sequence_first(y) and sequence_first(dx)
    assert copies.seen == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_only_the_rounding_of_what_goes_in_and_out(kind: str, dtype: torch.dtype) -> None:
    """Many rows far from zero: sums in half precision would be percents off, and torch's own weight gradients are."""
    rounding = torch.finfo(dtype).eps
    norm = drawn(KINDS[kind](64, dtype=dtype))
    x, gradient = (draw(1024, 64) + 8).to(dtype), (draw(1024, 64, seed=1) + 0.5).to(dtype)
    ours = outcome(norm, x, gradient, *norm.parameters())
    for value, expected in zip(ours, outcome_by_torch(norm, x, gradient, kind=kind), strict=True):
        assert value.dtype == dtype
        assert_equal(value.double(), expected, kind, tolerance=rounding)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float32)])
def test_y_has_the_dtype_of_x_and_gradients_those_of_their_tensors(
    kind: str, x_dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    norm = drawn(KINDS[kind](HIDDEN, dtype=weight_dtype))
    x, gradient = draw(4, HIDDEN).to(x_dtype), draw(4, HIDDEN, seed=1).to(x_dtype)
    ours = outcome(norm, x, gradient, *norm.parameters())
    assert [value.dtype for value in ours] == [x_dtype] * 2 + [weight_dtype] * len(list(norm.parameters()))
    y, expected = ours[0].double(), outcome_by_torch(norm, x, gradient, kind=kind)[0]
    assert_equal(y, expected, kind, tolerance=torch.finfo(x_dtype).eps)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_changes_nothing(kind: str) -> None:
    norm = drawn(KINDS[kind](HIDDEN, dtype=torch.float32))
    x, gradient = draw(4, HIDDEN).float(), draw(4, HIDDEN, seed=1).float()
    plain = outcome(norm, x, gradient, *norm.parameters())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for value, expected in zip(outcome(norm, x, gradient, *norm.parameters()), plain, strict=True):
            assert torch.equal(value, expected)


def test_an_rms_norm_keeps_x_its_weight_and_one_number_a_row() -> None:
    norm, x = RMSNorm(HIDDEN, dtype=torch.float64), draw(BATCH, SEQ, HIDDEN).requires_grad_()
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert sorted(t.numel() for t in kept) == sorted([x.numel(), HIDDEN, BATCH * SEQ])


def over_tokens(kind: str, sequence_parallel: bool) -> list[Tensor]:
    """y, dx and summed weight gradients of a rank that has its own tokens, or all of them."""
    tp = tp_axis()
    norm = {"layernorm": SequenceParallelLayerNorm, "rmsnorm": SequenceParallelRMSNorm}[kind](
        HIDDEN, tp=tp, sequence_parallel=sequence_parallel, dtype=torch.float64
    )
    mine = tp.part(SEQ) if sequence_parallel else slice(None)
    x, gradient = draw(BATCH, SEQ, HIDDEN)[:, mine], draw(BATCH, SEQ, HIDDEN, seed=1)[:, mine]
    return summed(drawn(norm), outcome(norm, x, gradient, *norm.parameters()))


def over_heads(kind: str) -> list[Tensor]:
    """The same of a norm over each head, of a rank that has its own heads of (batch, seq, heads, head_dim)."""
    tp = tp_axis()
    norm = drawn(KINDS[kind](HIDDEN, partial=(tp,), dtype=torch.float64))
    x, gradient = (draw(BATCH, SEQ, 4, HIDDEN, seed=seed)[:, :, tp.part(4)] for seed in (0, 1))
    return summed(norm, outcome(norm, x, gradient, *norm.parameters()))


def over_features(kind: str) -> list[Tensor]:
    """The same of a norm over all heads at once, and the bytes of its collectives."""
    tp = tp_axis()
    norm = drawn(KINDS[kind]((4, HIDDEN), cut=tp, dtype=torch.float64), part=tp.part(4))
    x, gradient = (draw(BATCH, SEQ, 4, HIDDEN, seed=seed)[:, :, tp.part(4)] for seed in (0, 1))
    with count() as counted:
        result = outcome(norm, x, gradient, *norm.parameters())
    sums = {"layernorm": 4, "rmsnorm": 2}[kind]  # each number a row and pass: of squares, and of x
    assert counted.calls() == counted.calls("all_reduce") == sums
    assert sum(call.numel for call in counted.record) == sums * BATCH * SEQ
    return result


def summed(norm: nn.Module, result: list[Tensor]) -> list[Tensor]:
    """Weight gradients summed over the axes that the spec calls partial, as the data-parallel wrapper does."""
    for gradient, name in zip(result[2:], dict(norm.named_parameters()), strict=True):
        for axis in norm.specs[name].partial:
            torch.distributed.all_reduce(gradient, group=axis.group)
    return result


def joined(results: list[list[Tensor]], dim: int) -> list[Tensor]:
    """y and dx with the ranks' parts joined; the other entries must be the same on all ranks."""
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0][2:], other[2:], strict=True))
    return [torch.cat([result[i] for result in results], dim) for i in range(2)] + results[0][2:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_norm_of_cut_tokens_equals_one_rank(kind: str, sequence_parallel: bool) -> None:
    results = run(over_tokens, 2, kind, sequence_parallel)
    ours = joined(results, 1) if sequence_parallel else results[1]
    norm = drawn(KINDS[kind](HIDDEN, dtype=torch.float64))
    expected = outcome_by_torch(norm, draw(BATCH, SEQ, HIDDEN), draw(BATCH, SEQ, HIDDEN, seed=1), kind=kind)
    for value, other in zip(ours, expected, strict=True):
        assert_equal(value, other, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_a_norm_of_each_head_equals_one_rank(kind: str, n: int) -> None:
    """Its weight's gradient is a summand with and without sequence parallelism: each rank has its own heads."""
    norm = drawn(KINDS[kind](HIDDEN, dtype=torch.float64))
    x, gradient = (draw(BATCH, SEQ, 4, HIDDEN, seed=seed) for seed in (0, 1))
    expected = outcome_by_torch(norm, x, gradient, kind=kind)
    for value, other in zip(joined(run(over_heads, n, kind), 2), expected, strict=True):
        assert_equal(value, other, kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", [2, 4])
def test_a_norm_over_cut_features_equals_one_rank(kind: str, n: int) -> None:
    results = run(over_features, n, kind)
    ours = [torch.cat([result[i] for result in results], 2 if i < 2 else 0) for i in range(len(results[0]))]
    norm = drawn(KINDS[kind]((4, HIDDEN), dtype=torch.float64))
    x, gradient = (draw(BATCH, SEQ, 4, HIDDEN, seed=seed) for seed in (0, 1))
    leaves = [p.detach().requires_grad_() for p in norm.parameters()]
    weight, bias = [*(p.flatten() for p in leaves), None, None][:2]
    expected = outcome(
        lambda x: reference(x.flatten(2), weight, bias, norm.eps, kind=kind).view(x.shape), x, gradient, *leaves
    )
    for value, other in zip(ours, expected, strict=True):
        assert_equal(value, other, kind)


def test_the_annotation_says_what_the_axis_cuts() -> None:
    tp = Axis("tp", 2, 1)
    norms: list[tuple[nn.Module, tuple[Axis, ...], tuple[int, ...]]] = [
        (SequenceParallelLayerNorm(HIDDEN, tp=tp), (tp,), (HIDDEN,)),
        (SequenceParallelRMSNorm(HIDDEN, tp=tp, sequence_parallel=False), (), (HIDDEN,)),
        (RMSNorm(HIDDEN, cut=tp), (), (HIDDEN // 2,)),
    ]
    for norm, partial, local_shape in norms:
        for name, parameter in norm.named_parameters():
            spec = norm.specs[name]
            assert (spec.shape, spec.partial, tuple(parameter.shape)) == ((HIDDEN,), partial, local_shape)
            assert not spec.decay
    assert not list(SequenceParallelLayerNorm(HIDDEN, tp=tp, elementwise_affine=False).parameters())
    assert [n for n, _ in SequenceParallelLayerNorm(HIDDEN, tp=tp, bias=False).named_parameters()] == ["weight"]


def test_what_cannot_be_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"\(6, 8\) cannot be cut over tp=4"):
        RMSNorm((6, 8), cut=Axis("tp", 4))
    with pytest.raises(ValueError, match=r"\(2, 6\) does not end in \(3,\)"):
        RMSNorm(6, cut=Axis("tp", 2))(torch.ones(2, 6))


@pytest.mark.parametrize("norm", [LayerNorm, RMSNorm])
def test_whole_numbers_are_refused(norm):
    with pytest.raises(ValueError, match=r"x is torch.int64: a norm is of floating-point numbers"):
        norm(6)(torch.ones(2, 6, dtype=torch.int64))

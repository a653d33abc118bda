"""Column- and row-parallel linears equal nn.Linear, cost what the formulas say, and hide what they can."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.comm import Call, Observer, observe
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear, parallel_linear
from megalite.layers.rows import SEQUENCE_DIM, sequence_first
from megalite.mesh import Axis
from megalite.weight_grad import WeightGradStore
from tests.counting import count
from tests.law import assert_equal, axes, draw, tp_axis, transposed
from tests.ranks import run

BATCH, SEQ, IN, OUT = 3, 8, 12, 20
Kind = type[ColumnParallelLinear] | type[RowParallelLinear]


def _reference(bias: bool) -> tuple[nn.Linear, Tensor, Tensor]:
    """nn.Linear on one rank with its input and upstream gradient; backward is done."""
    layer = nn.Linear(IN, OUT, bias, dtype=torch.float64)
    layer.weight.data.copy_(draw(OUT, IN, seed=1))
    if bias:
        layer.bias.data.copy_(draw(OUT, seed=2))
    x, dy = draw(BATCH, SEQ, IN, seed=3).requires_grad_(), draw(BATCH, SEQ, OUT, seed=4)
    layer(x).backward(dy)
    return layer, x, dy


def _slice(x: Tensor, axis: Axis, dim: int | None) -> Tensor:
    return x if dim is None else x.chunk(axis.size, dim)[axis.rank]


# where x and y are cut, by layer and whether tokens are
CUTS: dict[tuple[Kind, bool], tuple[int | None, int | None]] = {
    (ColumnParallelLinear, False): (None, -1),
    (ColumnParallelLinear, True): (SEQUENCE_DIM, -1),
    (RowParallelLinear, False): (-1, None),
    (RowParallelLinear, True): (-1, SEQUENCE_DIM),
}


def _sum_of(x: Tensor, axis: Axis) -> Tensor:
    torch.distributed.all_reduce(x := x.clone(), group=axis.group)
    return x


def _backward(y: Tensor, dy: Tensor, *, deferred: bool) -> None:
    store = WeightGradStore()
    if not deferred:
        y.backward(dy)
        return
    with store.open():
        y.backward(dy)
    store.run()


def _check_layer(kind: Kind, sequence_parallel: bool, bias: bool) -> None:
    axis = tp_axis()
    reference, full_x, full_dy = _reference(bias)
    full_y = reference(full_x).detach()
    x_dim, y_dim = CUTS[kind, sequence_parallel]
    for of_x, of_dy, deferred in itertools.product((torch.clone, transposed), (torch.clone, transposed), (False, True)):
        layer = kind(IN, OUT, bias, tp=axis, sequence_parallel=sequence_parallel, dtype=torch.float64)
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(getattr(reference, name)[layer.specs[name].box()])
        x = of_x(_slice(full_x.detach(), axis, x_dim)).requires_grad_()
        dy = of_dy(_slice(full_dy, axis, y_dim))
        before = dy.clone()
        y = layer(x)
        _backward(y, dy, deferred=deferred)
        what = f"{kind.__name__}, {sequence_parallel=}, {of_x.__name__}, {of_dy.__name__}, {deferred=}: "
        assert_equal(y.detach(), _slice(full_y, axis, y_dim), what + "y")
        assert_equal(x.grad, _slice(full_x.grad, axis, x_dim), what + "dx")
        for name, parameter in layer.named_parameters():
            spec = layer.specs[name]
            gradient = _sum_of(parameter.grad, axis) if spec.partial else parameter.grad
            assert_equal(gradient, getattr(reference, name).grad[spec.box()], what + name)
        assert torch.equal(dy, before), what + "the upstream gradient was written to"


@pytest.mark.parametrize(("n", "bias"), [(2, True), (4, True), (2, False)])
def test_a_parallel_linear_equals_nn_linear_whatever_the_strides_and_also_deferred(n, bias):
    """y, dx, dW and db; the bias gradient of a row under sequence parallelism is a sum over tp, as its spec says."""
    run(lambda: [_check_layer(*key, bias) for key in CUTS], n)


def _bias_alone() -> None:
    axis = tp_axis()
    for sequence_parallel in (False, True):
        layer = RowParallelLinear(4, 6, tp=axis, sequence_parallel=sequence_parallel)
        with torch.no_grad():
            layer.weight.zero_()
            layer.bias.fill_(1)
        y = layer(torch.ones(2, 4, 4 // axis.size))
        assert torch.equal(y, torch.ones_like(y))


def test_the_bias_of_a_row_is_added_once_and_not_on_every_rank():
    run(_bias_alone, 2)


class _Twins(nn.Module):
    """A layer of a transformer in its linears alone: two pairs, column then row, hidden -> 4 hidden -> hidden."""

    def __init__(self, hidden: int, tp: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        kinds = (ColumnParallelLinear, RowParallelLinear) * 2
        sizes = ((hidden, 4 * hidden), (4 * hidden, hidden)) * 2
        self.layers = nn.ModuleList(
            kind(*size, False, tp=tp, sequence_parallel=sequence_parallel)
            for kind, size in zip(kinds, sizes, strict=True)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _traffic(sequence_parallel: bool, deferred: bool) -> tuple[int, float, int, float]:
    axis, hidden = tp_axis(), 8
    seq = SEQ // axis.size if sequence_parallel else SEQ
    x = draw(BATCH, seq, hidden).float().requires_grad_()
    net, store = _Twins(hidden, axis, sequence_parallel), WeightGradStore()
    with count() as forward:
        y = net(x)
    with count() as backward:
        _backward(y, torch.ones_like(y), deferred=deferred)
    assert len(store) == 0
    return forward.calls(), forward.bytes_sent(), backward.calls(), backward.bytes_sent()


# (sequence parallel, deferred): collectives forward and backward, and what they send in halves of an all-reduce
TRAFFIC = {
    (False, False): (2, 2, 4, 4),
    (False, True): (2, 2, 4, 4),
    (True, False): (4, 6, 4, 6),
    (True, True): (4, 8, 4, 8),
}


def test_a_layer_of_two_pairs_sends_what_the_formula_says():
    """In units of b s h (t-1)/t elements, half of an all-reduce. Tensor parallelism is four all-reduces, 8; sequence
    parallelism 10, as the columns' inputs are gathered again; with a split backward 12, the rows' gradients as well."""
    t = 4
    unit = BATCH * SEQ * 8 * (t - 1) / t * 4  # float32
    sent = run(lambda: {key: _traffic(*key) for key in TRAFFIC}, t)
    expected = {key: (there, a * unit, back, b * unit) for key, (there, back, a, b) in TRAFFIC.items()}
    assert sent == [expected] * t
    assert [forward + backward for _, _, forward, backward in TRAFFIC.values()] == [8, 8, 10, 12]


class _Events(TorchDispatchMode, Observer):
    """The order in which collectives and matrix products are issued, and what is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._opname in ("mm", "addmm"):
            self.names.append(f"{func._opname}{tuple(out.shape)}")
        return out

    def issued(self, call: Call) -> None:
        self.names.append(call.operation)

    def waiting(self, call: Call) -> None:
        self.names.append("wait")


def _order(kind: Kind, sequence_parallel: bool, deferred: bool) -> list[str]:
    axis = tp_axis()
    layer = kind(IN, OUT, False, tp=axis, sequence_parallel=sequence_parallel, dtype=torch.float64)
    x_dim, _ = CUTS[kind, sequence_parallel]
    y = layer(x := _slice(draw(BATCH, SEQ, IN), axis, x_dim).requires_grad_())
    with _Events() as events, observe(events):
        _backward(y, torch.ones_like(y), deferred=deferred)
    assert x.grad is not None
    return [name for name in events.names if name != "wait"]


ROWS, HALF_IN, HALF_OUT = BATCH * SEQ, IN // 2, OUT // 2


ORDER = {
    # x travels under dX, the sum of dX under dW
    (ColumnParallelLinear, True, False): ["all_gather", f"mm{(ROWS, IN)}", "reduce_scatter", f"mm{(HALF_OUT, IN)}"],
    (ColumnParallelLinear, False, False): [f"mm{(ROWS, IN)}", "all_reduce", f"mm{(HALF_OUT, IN)}"],
    (RowParallelLinear, True, False): ["all_gather", f"mm{(ROWS, HALF_IN)}", f"mm{(OUT, HALF_IN)}"],
    (RowParallelLinear, False, False): [f"mm{(ROWS, HALF_IN)}", f"mm{(OUT, HALF_IN)}"],
    # deferred, x is not gathered before it is wanted
    (ColumnParallelLinear, True, True): [f"mm{(ROWS, IN)}", "reduce_scatter", "all_gather", f"mm{(HALF_OUT, IN)}"],
    (RowParallelLinear, True, True): ["all_gather", f"mm{(ROWS, HALF_IN)}", "all_gather", f"mm{(OUT, HALF_IN)}"],
}


def test_in_backward_what_must_travel_is_issued_before_the_product_that_hides_it():
    for orders in run(lambda: [_order(*key) for key in ORDER], 2):
        assert orders == list(ORDER.values())


def _waits() -> list[str]:
    """What the backward of a column does, waiting for its collectives included."""
    axis = tp_axis()
    layer = ColumnParallelLinear(IN, OUT, False, tp=axis, sequence_parallel=True, dtype=torch.float64)
    x = draw(BATCH, SEQ // axis.size, IN).requires_grad_()
    y = layer(x)
    with _Events() as events, observe(events):
        y.backward(torch.ones_like(y))
    return [name.split("(")[0] for name in events.names]


def test_and_is_waited_for_only_after_that_product():
    assert run(_waits, 2) == [["all_gather", "mm", "reduce_scatter", "wait", "mm", "wait"]] * 2


def test_under_sequence_parallelism_what_is_kept_for_backward_is_cut():
    """The gathered input would be tp times as large; it is gathered again instead."""

    def kept() -> int:
        axis = tp_axis()
        layer = ColumnParallelLinear(IN, OUT, tp=axis, sequence_parallel=True)
        elements: list[int] = []

        def pack(saved: Tensor) -> Tensor:
            elements.append(saved.untyped_storage().nbytes() // saved.element_size())
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
            layer(torch.ones(BATCH, SEQ // axis.size, IN))
        return sum(elements)

    assert run(kept, 2) == [BATCH * SEQ // 2 * IN] * 2


def _memory_order(n: int) -> None:
    axis = tp_axis()
    column = ColumnParallelLinear(IN, OUT, tp=axis, sequence_parallel=True)
    row = RowParallelLinear(OUT, IN, tp=axis, sequence_parallel=True)
    x = transposed(torch.ones(BATCH, SEQ // n, IN)).requires_grad_()
    inner = column(x)
    y = row(inner)
    y.backward(torch.ones_like(y))
    assert all(map(sequence_first, (x, inner, y, x.grad)))


def test_sequence_first_in_memory_stays_so_through_a_pair_and_back():
    """Then gathering and scattering along seq move whole blocks, without a copy."""
    run(_memory_order, 2, 2)


@pytest.mark.parametrize(
    ("kind", "bias"), [(ColumnParallelLinear, True), (ColumnParallelLinear, False), (RowParallelLinear, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_under_autocast_the_layer_is_nn_linear_to_the_bit(kind, bias, dtype):
    """x and W are rounded to bfloat16 inside of the function, unless they are float64, and gradients come back in the
    parameters' type."""
    plain = nn.Linear(IN, OUT, bias, dtype=dtype)
    layer = kind(IN, OUT, bias, tp=Axis("tp"), dtype=dtype)
    layer.load_state_dict(plain.state_dict())
    results = []
    for module in (plain, layer):
        x = draw(BATCH, SEQ, IN).to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = module(x)
        assert y.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
        y.backward(draw(BATCH, SEQ, OUT, seed=1).to(y.dtype))
        results.append([y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())])
    for theirs, ours in zip(*results, strict=True):
        assert theirs.dtype == ours.dtype
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_it_drops_in_for_nn_linear(kind):
    """Positional arguments, attributes, state dict, first values' bounds, any number of leading dims."""
    plain = nn.Linear(5, 3, True, "cpu", torch.float64)
    layer = kind(5, 3, True, "cpu", torch.float64, tp=Axis("tp"))
    assert layer.load_state_dict(plain.state_dict()).missing_keys == []
    assert (layer.in_features, layer.out_features, layer.weight.dtype) == (5, 3, torch.float64)
    for shape in ((5,), (2, 5), (4, 2, 5), (3, 4, 2, 5), (0, 5)):
        x, y = (draw(*shape).requires_grad_() for _ in range(2))
        layer(x).square().sum().backward()
        plain(y).square().sum().backward()
        assert_equal(layer(x).detach(), plain(y).detach(), f"y of {shape}")
        assert_equal(x.grad, y.grad, f"dx of {shape}")
    assert kind(5, 3, False, tp=Axis("tp")).bias is None
    assert list(kind(5, 3, False, tp=Axis("tp")).state_dict()) == ["weight"]
    assert "in_features=5, out_features=3, bias=True, tp=1" in repr(layer)
    torch.manual_seed(0)
    fresh = kind(64, 256, tp=Axis("tp"))
    for parameter in (fresh.weight, fresh.bias):
        assert 0.9 / 8 < parameter.abs().max() <= 1 / 8, "uniform within 1/sqrt(in_features), as nn.Linear draws"


def test_fused_products_are_cut_each_alike():
    """(2, ffn): both halves are cut over tp, where one dim of 2 ffn would give rank 0 the gate and rank 1 the rest."""

    def fused() -> Tensor:
        axis = tp_axis()
        layer = ColumnParallelLinear(IN, 16, tp=axis, out_shape=(2, 8), cut_dim=1, dtype=torch.float64)
        whole = {"weight": draw(2, 8, IN, seed=1), "bias": draw(2, 8, seed=2)}
        for name, parameter in layer.named_parameters():
            parameter.data.copy_(whole[name][layer.specs[name].box()])
        assert layer.weight.shape == (2, 8 // axis.size, IN)
        x = draw(BATCH, IN, seed=3)
        y = layer(x)
        y.sum().backward()
        assert (layer.weight.grad.shape, layer.bias.grad.shape) == (layer.weight.shape, layer.bias.shape)
        return y.detach().view(BATCH, 2, -1)

    x, weight, bias = draw(BATCH, IN, seed=3), draw(2, 8, IN, seed=1), draw(2, 8, seed=2)
    y = torch.cat(run(fused, 2), -1)
    assert_equal(y, torch.einsum("bi,oei->boe", x, weight) + bias, "y")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda tp: ColumnParallelLinear(4, 6, tp=tp), "out_features=6 cannot be cut over tp=4"),
        (lambda tp: RowParallelLinear(6, 4, tp=tp), "in_features=6 cannot be cut over tp=4"),
        (
            lambda tp: ColumnParallelLinear(4, 12, tp=tp, out_shape=(2, 6), cut_dim=1),
            "out_features=6 cannot be cut over tp=4",
        ),
        (
            lambda tp: ColumnParallelLinear(4, 10, tp=tp, out_shape=(2, 8), cut_dim=1),
            r"out_shape=\(2, 8\) has 16 outputs, and out_features=10",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_on_every_rank_before_any_collective(make, message):
    for axis in axes("tp", 4):
        with pytest.raises(ValueError, match=message):
            make(axis)


def test_an_input_that_needs_no_gradient_costs_no_product_for_it():
    layer = ColumnParallelLinear(IN, OUT, False, tp=Axis("tp"))
    for trained, products in ((True, 1), (False, 0)):
        layer.weight.requires_grad_(trained)
        x = torch.ones(BATCH, IN, requires_grad=not trained)
        y = layer(x)
        with _Events() as events:
            y.sum().backward()
        assert len(events.names) == 1
        assert (layer.weight.grad is not None) == bool(products)
        layer.weight.grad = None


def test_a_chunk_may_enter_whole_and_leave_cut_without_any_collective():
    def traffic() -> int:
        axis = tp_axis()
        weight = nn.Parameter(draw(4, IN))
        with count() as c:
            parallel_linear(draw(5, IN).requires_grad_(), weight, tp=axis, enter="whole", leave="cut").sum().backward()
        return c.calls()

    assert run(traffic, 2) == [0, 0]


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_an_input_of_another_dtype_is_refused_as_nn_linear_refuses_it(dtype):
    for layer in (ColumnParallelLinear(6, 4, tp=Axis("tp")), RowParallelLinear(6, 4, tp=Axis("tp"))):
        with pytest.raises(ValueError, match=f"x is {dtype} and the weight torch.float32"):
            layer(torch.ones(2, 6, dtype=dtype))

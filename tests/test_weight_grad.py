"""Weight gradients put off are the same gradients, arriving later, once per parameter and run."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalite.layers.embedding import VocabParallelEmbedding
from megalite.layers.linear import ColumnParallelLinear, RowParallelLinear
from megalite.mesh import Axis
from megalite.weight_grad import WeightGradStore, open_store
from tests.law import draw

TP = Axis("tp")


class _Net(nn.Module):
    """An embedding tied to the output layer, one linear used twice, one used once, and a norm that never defers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = VocabParallelEmbedding(11, 6, tp=TP, dtype=torch.float64)
        self.twice = ColumnParallelLinear(6, 6, tp=TP, dtype=torch.float64)
        self.once = RowParallelLinear(6, 6, tp=TP, dtype=torch.float64)
        self.norm = nn.LayerNorm(6, dtype=torch.float64)
        self.head = ColumnParallelLinear(6, 11, False, tp=TP, dtype=torch.float64)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = self.twice(torch.tanh(self.twice(x)))
        return self.head(self.norm(self.once(x)))


IDS = torch.tensor([[1, 4, 4], [0, 10, 1]])
DEFERRING = {"embedding.weight", "twice.weight", "once.weight"}


def _loss(net: nn.Module) -> Tensor:
    return (net(IDS) * draw(2, 3, 11, seed=1)).sum()


def test_deferred_gradients_are_the_immediate_ones_to_the_bit():
    at_once, later, store = _Net(), _Net(), WeightGradStore()
    _loss(at_once).backward()
    with store.open():
        _loss(later).backward()
    assert {name for name, p in later.named_parameters() if p.grad is None} == DEFERRING
    assert len(store) == 5, "twice.weight and the tied weight are put two times each"
    store.run()
    assert len(store) == 0
    for (name, a), b in zip(at_once.named_parameters(), later.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


def _counted(net: nn.Module) -> dict[str, int]:
    """Counts arrivals per parameter as a data-parallel wrapper does: takes each gradient and leaves None behind."""
    counts = {name: 0 for name, _ in net.named_parameters()}
    for name, parameter in net.named_parameters():

        def hook(parameter: Tensor, name: str = name) -> None:
            if parameter.grad is not None:
                assert not parameter.grad.requires_grad
                counts[name] += 1
                parameter.grad = None

        parameter.register_post_accumulate_grad_hook(hook)
    return counts


def test_a_parameter_arrives_once_per_pass_however_often_it_is_used():
    net, store = _Net(), WeightGradStore()
    counts = _counted(net)
    _loss(net).backward()
    assert set(counts.values()) == {1}, "autograd sums the uses of a parameter within one backward"
    with store.open():
        _loss(net).backward()
    assert {name: count for name, count in counts.items() if count == 2} == dict.fromkeys(set(counts) - DEFERRING, 2)
    store.run()
    assert set(counts.values()) == {2}
    store.run()
    assert set(counts.values()) == {2}, "an empty store gives nothing"


def test_what_is_put_by_several_backward_passes_arrives_as_one_sum():
    net, store = _Net(), WeightGradStore()
    with store.open():
        for _ in range(3):
            _loss(net).backward()
    counts = _counted(net)
    taken: list[Tensor] = []
    net.once.weight.register_hook(lambda gradient: taken.append(gradient.clone()))
    store.run()
    assert [counts[name] for name in sorted(DEFERRING)] == [1, 1, 1]
    one = _Net()
    _loss(one).backward()
    assert torch.allclose(taken[0], 3 * one.once.weight.grad, rtol=1e-12, atol=0)


def test_products_run_in_the_order_they_were_put_and_the_next_starts_before_the_present_finishes():
    """So the gather that the next product needs travels under the present product."""
    events: list[str] = []
    store = WeightGradStore()
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(2)]

    def product(name: str) -> Callable[[], Callable[[], Tensor]]:
        def start() -> Callable[[], Tensor]:
            events.append(f"start {name}")
            return lambda: events.append(f"finish {name}") or torch.ones(2)

        return start

    parameters[0].register_post_accumulate_grad_hook(lambda p: events.append("arrive 0"))
    parameters[1].register_post_accumulate_grad_hook(lambda p: events.append("arrive 1"))
    for index, name in ((0, "a"), (1, "b"), (0, "c")):
        store.put(parameters[index], product(name))
    store.run()
    assert ", ".join(events) == "start a, start b, finish a, start c, finish b, arrive 1, finish c, arrive 0"
    assert torch.equal(parameters[0].grad, torch.full((2,), 2.0))


class _Token:
    """Something to watch."""


class _Holds(torch.autograd.Function):
    """The identity; its node in the graph holds a token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, token: _Token) -> Tensor:
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def test_a_product_put_off_holds_its_inputs_and_not_the_graph_that_made_them():
    layer, store, token = RowParallelLinear(6, 6, tp=TP, dtype=torch.float64), WeightGradStore(), _Token()
    x = draw(3, 6).requires_grad_()
    loss = layer(_Holds.apply(x, token)).sum()
    alive = weakref.ref(token)
    del token
    with store.open():
        loss.backward()
    assert alive() is not None
    del loss
    gc.collect()
    assert alive() is None
    product = weakref.ref(store._queue[0][1])
    store.run()
    gc.collect()
    assert product() is None, "and once it has run it is gone"


def test_gradients_of_a_run_carry_no_graph():
    net, store = _Net(), WeightGradStore()
    with store.open():
        _loss(net).backward()
    for parameter, start, _ in list(store._queue):
        product = start()()
        assert product.shape == parameter.shape
        assert not product.requires_grad


def test_stores_do_not_nest_and_close_whatever_happens():
    outer, inner, leaf = WeightGradStore(), WeightGradStore(), torch.zeros(1)
    with outer.open() as opened:
        assert opened is outer is open_store(leaf)
        with pytest.raises(RuntimeError, match="stores do not nest"), inner.open():
            pass
        assert open_store(leaf) is outer
    assert open_store(leaf) is None
    with pytest.raises(KeyError), outer.open():
        raise KeyError
    assert open_store(leaf) is None
    with inner.open():
        assert open_store(leaf) is inner


def test_a_backward_that_failed_leaves_nothing_behind():
    net, store = _Net(), WeightGradStore()
    with pytest.raises(KeyError), store.open():
        _loss(net).backward()
        raise KeyError
    assert len(store) == 0


def test_what_a_product_reads_may_not_be_overwritten_before_it_runs():
    """As autograd refuses it within a backward: a buffer that is received into again, for one."""
    layer, store = ColumnParallelLinear(6, 4, tp=TP, dtype=torch.float64), WeightGradStore()
    for overwrite in ("x", "gradient"):
        tensors = {"x": draw(2, 3, 6), "gradient": draw(2, 3, 4)}
        with store.open():
            layer(tensors["x"]).backward(tensors["gradient"])
        tensors[overwrite].zero_()
        with pytest.raises(RuntimeError, match=r"\(4, 6\) parameter reads was modified in place"):
            store.run()


def test_a_weight_that_is_computed_from_others_is_not_put_off():
    layers = [torch.nn.utils.parametrizations.weight_norm(ColumnParallelLinear(6, 4, tp=TP)) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    store = WeightGradStore()
    layers[0](torch.ones(2, 6)).sum().backward()
    with store.open():
        layers[1](torch.ones(2, 6)).sum().backward()
    store.run()
    for one, other in zip(layers[0].parameters(), layers[1].parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_weight_that_is_not_trained_is_not_put():
    net, store = _Net(), WeightGradStore()
    net.twice.weight.requires_grad_(False)
    with store.open():
        _loss(net).backward()
    assert len(store) == 3
    store.run()
    assert net.twice.weight.grad is None

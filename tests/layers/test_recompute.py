"""Recompute changes what is stored and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.layers.recompute import OPS, Recompute
from megalite.mesh import Layout, Mesh
from megalite.models.config import GPTConfig
from megalite.models.gpt import GPT
from megalite.models.microbatch import Microbatch
from megalite.weight_grad import WeightGradStore
from tests.law import draw
from tests.ranks import run

BATCH, SEQ, HIDDEN, FFN, HEADS = 2, 16, 32, 48, 4
NUMBER = 8  # bytes of a float64
LARGEST = (
    Recompute("selective", ("norm", "attention", "activation")),
    Recompute("selective", ("mlp",)),
    Recompute("full"),
)
SETTINGS = (*LARGEST, *(Recompute("selective", (op,)) for op in OPS if op != "mlp"), Recompute("full", every=2))


def build(recompute: Recompute, *, mesh: Mesh | None = None, layers: int = 2) -> GPT:
    """The same weights whatever is computed again; with dropout at every place, attention's included."""
    torch.manual_seed(0)
    config = GPTConfig(
        vocab_size=64,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        attn_implementation="eager",
        attention_dropout=0.1,
        resid_pdrop=0.1,
        embd_pdrop=0.1,
    )
    return GPT(config, mesh=mesh, sequence_parallel=mesh is not None, recompute=recompute, dtype=torch.float64)


def microbatch(first: int = 0, *, seq: int = SEQ) -> Microbatch:
    ids = torch.randint(64, (BATCH, seq + 1), generator=torch.Generator().manual_seed(first))
    samples = torch.arange(first, first + BATCH)
    return Microbatch(ids[:, :-1], ids[:, 1:], torch.arange(seq), samples, step=1)


def outcome(model: GPT, *, deferred: bool = False) -> list[Tensor]:
    """Losses and gradients of two micro-batches, both forward passes before the first backward, as in a pipeline."""
    losses = [model(None, microbatch(first)) for first in (0, BATCH)]
    store = WeightGradStore()
    if deferred:
        with store.open():
            for loss in losses:
                loss.backward()
        assert len(store) > 0
        store.run()
    else:
        for loss in losses:
            loss.backward()
    gradients = [p.grad for p in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach() for loss in losses] + [g for g in gradients if g is not None]


def differing(settings: Iterable[Recompute], mesh: Mesh | None, deferred: bool) -> list[str]:
    """Those of the settings whose losses or gradients have other bits than those without recompute."""
    plain = outcome(build(Recompute(), mesh=mesh), deferred=deferred)
    found = []
    for setting in settings:
        again = outcome(build(setting, mesh=mesh), deferred=deferred)
        if not all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)):
            found.append(str(setting))
    return found


@pytest.mark.parametrize("deferred", [False, True], ids=["", "deferred"])
def test_losses_and_gradients_have_the_same_bits(deferred: bool) -> None:
    assert differing(SETTINGS, None, deferred) == []


def on_each_rank() -> list[str]:
    mesh = Mesh.build(Layout(tp=2))
    return differing(LARGEST, mesh, False) + differing(LARGEST, mesh, True)


def test_the_same_holds_where_what_is_computed_again_communicates() -> None:
    """Sequence-parallel, so that each linear gathers or scatters, now also within backward."""
    assert run(on_each_rank, 2) == [[], []]


class Storages(TorchDispatchMode):
    """The bytes of the storages made inside the `with` that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        given = {id_of(t) for t in tensors((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for made in tensors(result):
            if id_of(made) not in given:
                reference = StorageWeakRef(made.untyped_storage())
                self.made[reference.cdata] = (reference, made.untyped_storage().nbytes())
        return result

    def alive(self) -> int:
        return sum(size for reference, size in self.made.values() if not reference.expired())


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def id_of(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def stored(recompute: Recompute, *, layers: int, seq: int) -> int:
    """Bytes that wait for backward once forward is done."""
    model, inputs = build(recompute, layers=layers), microbatch(seq=seq)
    with Storages() as storages:
        loss = model(None, inputs)
    assert loss.requires_grad
    return storages.alive()


def stored_by_a_layer(recompute: Recompute, *, seq: int = SEQ) -> float:
    return (stored(recompute, layers=4, seq=seq) - stored(recompute, layers=2, seq=seq)) / 2


def test_full_keeps_the_input_of_each_layer_alone() -> None:
    assert stored_by_a_layer(Recompute("full")) == BATCH * SEQ * HIDDEN * NUMBER


def test_every_second_layer_saves_half() -> None:
    none, full, half = (stored_by_a_layer(r) for r in (Recompute(), Recompute("full"), Recompute("full", every=2)))
    assert half == (none + full) / 2


def test_norms_and_their_results_are_not_stored() -> None:
    """Of each of the two norms in a layer the result, and one number a token."""
    saved = stored_by_a_layer(Recompute()) - stored_by_a_layer(Recompute("selective", ("norm",)))
    assert saved == 2 * BATCH * SEQ * (HIDDEN + 1) * NUMBER


def test_of_a_gated_activation_neither_its_inside_nor_its_result_is_stored() -> None:
    saved = stored_by_a_layer(Recompute()) - stored_by_a_layer(Recompute("selective", ("activation",)))
    assert saved == 2 * BATCH * SEQ * FFN * NUMBER


def test_of_attention_nothing_that_grows_with_the_square_of_the_sequence_is_stored() -> None:
    one, two, three = (stored_by_a_layer(Recompute("selective"), seq=n * SEQ) for n in (1, 2, 3))
    assert three - two == two - one
    assert stored_by_a_layer(Recompute(), seq=2 * SEQ) - two > BATCH * HEADS * (2 * SEQ) ** 2 * NUMBER


def test_of_the_mlp_its_input_alone_is_stored() -> None:
    """Up and gate, the activated gate, the product: four times the inside."""
    saved = stored_by_a_layer(Recompute()) - stored_by_a_layer(Recompute("selective", ("mlp",)))
    assert saved == 4 * BATCH * SEQ * FFN * NUMBER


def test_what_follows_is_not_repeated_and_what_is_wrapped_is() -> None:
    calls: list[str] = []

    def first(x: Tensor) -> Tensor:
        calls.append("first")
        return x.sin()

    def second(x: Tensor) -> Tensor:
        calls.append("second")
        return x.square()

    def third(x: Tensor) -> Tensor:
        calls.append("third")
        return x.exp()

    x = draw(4).requires_grad_()
    plain = Recompute().call("norm", 0, first, x, into=second)
    expected = torch.autograd.grad(plain.sum(), x)
    assert calls == ["first", "second"]

    calls.clear()
    y = Recompute("selective", ("norm",)).call("norm", 0, first, x, into=second)
    assert torch.equal(y, plain)
    assert torch.equal(*torch.autograd.grad(y.sum(), x), *expected)
    assert calls.count("second") == 1 and calls.count("first") == 3

    calls.clear()
    y = Recompute("full").call("block", 0, third, x)
    torch.autograd.grad(y.sum(), x)
    assert calls == ["third", "third"]


def test_modes_ops_and_every_choose_what_is_wrapped() -> None:
    assert not any(Recompute().wraps(op, 0) for op in (*OPS, "block"))
    assert [op for op in (*OPS, "block") if Recompute("selective").wraps(op, 0)] == ["attention"]
    assert [op for op in (*OPS, "block") if Recompute("full").wraps(op, 0)] == ["block"]
    assert [layer for layer in range(7) if Recompute("selective", ("mlp",), 3).wraps("mlp", layer)] == [0, 3, 6]
    with pytest.raises(AssertionError, match="atention"):
        Recompute("full").wraps("atention", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "some"}, "recompute=some.*none, selective, full"),
        ({"mode": "selective", "ops": ("mpl",)}, "recompute_ops has mpl.*norm, attention, activation, mlp"),
        ({"mode": "full", "ops": ("mlp",)}, r"recompute=full takes no recompute_ops.*\['mlp'\]"),
        ({"mode": "selective", "ops": ("mlp", "activation")}, "mlp contains activation"),
        ({"mode": "full", "every": 0}, "recompute_every=0"),
    ],
)
def test_what_does_not_go_together_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recompute(**arguments)

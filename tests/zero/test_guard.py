"""A parameter that is not whole: every read of it is refused by its unit's name, or waits; everything else passes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megalite.layers.linear import parallel_linear
from megalite.mesh import Axis, Layout, Mesh
from megalite.weight_grad import WeightGradStore
from megalite.zero import Zero
from tests.ranks import run
from tests.zero.models import ParallelMLP
from tests.zero.training import adamw

X = torch.ones(2, 4)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        return weight * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


READS: dict[str, Callable[[nn.Linear], object]] = {
    "the module's function": lambda m: F.linear(X, m.weight, m.bias),
    "a bias alone": lambda m: F.layer_norm(X, (4,), m.bias),
    "an operator": lambda m: X @ m.weight,
    "a reflected operator": lambda m: 1 - m.weight,
    "a comparison": lambda m: m.weight == 1,
    "torch.ops": lambda m: torch.ops.aten.mm.default(X, m.weight),
    "a packet of torch.ops": lambda m: torch.ops.aten.mm(X, m.weight),
    "torch._VF": lambda m: torch._VF.rnn_tanh_cell(X, X, m.weight, m.weight, None, None),
    "an autograd function": lambda m: Doubled.apply(m.weight),
    "our linear": lambda m: parallel_linear(X, m.weight, tp=Axis("tp"), enter="whole", leave="cut"),
    "a keyword": lambda m: torch.add(torch.ones(4, 4), other=m.weight),
    "a list": lambda m: torch.cat([m.weight, m.weight]),
    "a foreach": lambda m: torch._foreach_norm([m.weight]),
    "einsum": lambda m: torch.einsum("ij,kj->ik", X, m.weight),
    "attention": lambda m: F.scaled_dot_product_attention(*[m.weight[None]] * 3),
    "an index": lambda m: m.weight[0],
    "as an index": lambda m: X[0][m.bias.long()],
    "iteration": lambda m: list(m.weight),
    "membership": lambda m: 1.0 in m.weight,
    "repr": lambda m: repr(m.weight),
    "str": lambda m: f"{m.weight}",
    "float": lambda m: float(m.bias[0]),
    "tolist": lambda m: m.weight.tolist(),
    "copy": lambda m: copy.copy(m.weight),
    "deepcopy": lambda m: copy.deepcopy(m.weight),
    "deepcopy of the module": lambda m: copy.deepcopy(m),
    "state_dict": lambda m: m.state_dict(),
    "pickle": lambda m: pickle.dumps(m.weight),
    "torch.save": lambda m: torch.save(m.state_dict(keep_vars=True), io.BytesIO()),
    ".data": lambda m: m.weight.data,
    "writing .data": lambda m: setattr(m.weight, "data", torch.ones(4, 4)),
    "detach": lambda m: m.weight.detach(),
    "numpy": lambda m: m.weight.numpy(),
    "np.asarray": lambda m: np.asarray(m.weight),
    "a view": lambda m: m.weight.view(-1),
    ".T": lambda m: m.weight.T,
    "to": lambda m: m.weight.to(torch.float64),
    "module.double": lambda m: m.double(),
    "reset_parameters": lambda m: m.reset_parameters(),
    "out=": lambda m: torch.add(torch.ones(4, 4), 1, out=m.weight),
    "copy_": lambda m: torch.ones(4, 4).copy_(m.weight),
    "parameters_to_vector": lambda m: nn.utils.parameters_to_vector(m.parameters()),
    "a new Parameter": lambda m: nn.Parameter(m.weight),
    "checkpoint": lambda m: checkpoint(lambda w: w * 2, m.weight, use_reentrant=False),
    "all_reduce": lambda m: torch.distributed.all_reduce(m.weight),
}

METADATA: dict[str, Callable[[nn.Linear], object]] = {
    "shape": lambda m: (
        (m.weight.shape, m.weight.size(0), m.weight.ndim, m.weight.dim(), len(m.weight)) == ((4, 4), 4, 2, 2, 4)
    ),
    "counts": lambda m: (m.weight.numel(), m.weight.nelement(), m.weight.nbytes, m.weight.itemsize) == (16, 16, 64, 4),
    "layout": lambda m: (m.weight.stride(), m.weight.is_contiguous(), m.weight.layout) == ((4, 1), True, torch.strided),
    "dtype": lambda m: (m.weight.dtype, m.weight.device.type, m.weight.is_meta) == (torch.float32, "cpu", False),
    "kind": lambda m: isinstance(m.weight, nn.Parameter) and m.weight.is_leaf and m.weight.is_floating_point(),
    "autograd": lambda m: m.weight.requires_grad and m.weight.grad_fn is None and m.weight._version >= 0,
    "grad": lambda m: m.weight.grad is None,
    "hash": lambda m: {m.weight: 1}[m.weight],
    "hooks": lambda m: m.weight.register_hook(lambda gradient: None),
    "count": lambda m: sum(p.numel() for p in m.parameters()) == 20,
    "repr of the module": lambda m: repr(m),
}


def refused(reads: list[str]) -> dict[str, str]:
    """What each read of released parameters gives."""
    mesh = Mesh.build(Layout(dp=2))
    model = nn.Sequential(nn.Linear(4, 4))
    Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    found = {}
    for name in reads:
        try:
            found[name] = repr(type((READS | METADATA)[name](model[0])))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def test_a_released_parameter_refuses_every_read_by_the_name_of_its_unit():
    for name, text in run(refused, 2, list(READS))[0].items():
        assert text.startswith("ValueError: a parameter of unit 0 was read while its weights are spread"), (name, text)


def test_a_load_into_a_released_parameter_is_refused_with_the_same_words():
    def load() -> str:
        mesh = Mesh.build(Layout(dp=2))
        model = nn.Sequential(nn.Linear(4, 4))
        Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
        try:
            model.load_state_dict({"0.weight": torch.ones(4, 4), "0.bias": torch.ones(4)})
        except RuntimeError as error:
            return str(error)
        return ""

    for text in run(load, 2):
        assert "a parameter of unit 0 was read while its weights are spread" in text


def metadata() -> dict[str, bool]:
    mesh = Mesh.build(Layout(dp=2))
    model = nn.Sequential(nn.Linear(4, 4))
    Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    return {name: bool(read(model[0])) for name, read in METADATA.items()}


def test_metadata_gradients_and_hooks_of_a_released_parameter_pass():
    for found in run(metadata, 2):
        assert found == dict.fromkeys(METADATA, True)


class Tagged(nn.Parameter):
    """A user's own class of parameters."""

    tag = "kept"


def classes() -> list[tuple[type, bool, str, bool]]:
    mesh = Mesh.build(Layout(dp=2))
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = Tagged(torch.ones(4, 4))
    model[0].weight.note = "an attribute"
    zero = Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    weight, found = model[0].weight, []

    def look(exact: bool) -> None:
        found.append((type(weight) is Tagged) is exact and isinstance(weight, Tagged) and weight.tag == "kept")

    look(False)
    model.register_forward_hook(lambda *_: look(True))
    model(X)
    with zero.gathered():
        look(True)
    look(False)
    return [*found, weight.note == "an attribute", model[0].weight is weight]


def test_a_parameter_keeps_its_class_and_attributes():
    assert run(classes, 2) == [[True] * 6] * 2


def whole_within() -> bool:
    mesh = Mesh.build(Layout(dp=2))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    zero = Zero(model, mesh, stage=3, optimizer=adamw)
    with zero.gathered():
        inside = copy.deepcopy(model)
        expected = model(X)  # a forward within releases nothing
        good = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    good = good and all(torch.equal(value, before[name]) for name, value in inside.state_dict().items())
    # The copy has weights of its own, and its forward gathers nobody's.
    return good and torch.equal(inside(X), expected) and not any(unit.weights.is_allocated for unit in zero.units)


def test_within_gathered_all_is_whole_and_can_be_copied():
    assert run(whole_within, 2) == [True] * 2


def write_within() -> str:
    mesh = Mesh.build(Layout(dp=2))
    model = nn.Sequential(nn.Linear(4, 4))
    zero = Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    with zero.gathered(), torch.no_grad():
        model[0].weight.zero_()
    try:
        zero.begin(microbatches=1)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_write_that_the_shards_would_undo_is_refused_by_name():
    for text in run(write_within, 2):
        assert text.startswith("parameter 0.weight was written in torch.float32 after Zero was built")


def after_a_step(stage: int) -> dict[str, bool]:
    """Every way of reading, each as the first after a step, against the same way after all has come."""
    mesh = Mesh.build(Layout(dp=2))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    zero = Zero(model, mesh, stage=stage, optimizer=adamw, seed=0)
    found = {}
    ways: dict[str, Callable[[], Tensor]] = {
        "forward": lambda: model(X),
        "function": lambda: F.linear(X, model[1].weight, model[0].bias),
        "state_dict": lambda: torch.cat([value.flatten() for value in model.state_dict().values()]),
        "data": lambda: model[1].weight.data,
        "detach": lambda: model[0].weight.detach(),
        "deepcopy": lambda: copy.deepcopy(model)[0].weight,
        "numpy": lambda: torch.from_numpy(model[1].weight.detach().numpy()),
        "an autograd function": lambda: Doubled.apply(model[0].weight),
        "pickle": lambda: pickle.loads(pickle.dumps(model[1].weight)),
    }
    for name, way in ways.items():
        zero.begin(microbatches=1)
        model(X).square().sum().backward()
        zero.step()
        guarded = type(model[0].weight) is not nn.Parameter
        first = way().detach().clone()
        for unit in zero.units:
            unit.wait()
        found[name] = guarded and torch.equal(first, way()) and type(model[0].weight) is nn.Parameter
    return found


def test_at_stages_1_and_2_a_parameter_read_right_after_a_step_waits_for_its_gather_and_is_right():
    for stage in (1, 2):
        for found in run(after_a_step, 2, stage):
            assert found and all(found.values()), found


def put_off() -> bool:
    """A weight gradient that is computed while the weight is released: it needs the gradient and the input alone."""
    mesh = Mesh.build(Layout(dp=2))
    model = ParallelMLP(mesh, sequence_parallel=False)
    zero = Zero(model, mesh, stage=3, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    store = WeightGradStore()
    with store.open():
        model(torch.ones(2, 4, 8, dtype=torch.float64)).sum().backward()
    released = not any(unit.weights.is_allocated for unit in zero.units)
    store.run()
    return released and zero.step().item() > 0


def test_a_weight_gradient_that_was_put_off_needs_no_weight():
    assert run(put_off, 2) == [True] * 2

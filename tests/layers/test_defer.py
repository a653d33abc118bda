"""A deferring nn.Linear is nn.Linear, bit for bit, whether its weight gradient comes at once or later."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

import megalite
from megalite.layers.defer import DeferringLinear, defer
from megalite.weight_grad import WeightGradStore

WIDTH = 12


class Twice(nn.Module):
    """One Linear used twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


def frozen(part: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, 5))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part not in name)
    return model


def encoder(**options) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 20, dropout=0.0, batch_first=True, **options)


MODELS = {
    "linear": lambda: nn.Linear(WIDTH, 5),
    "without bias": lambda: nn.Linear(WIDTH, 5, bias=False),
    "mlp": lambda: nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, 5)),
    "used twice": Twice,
    "frozen weights": lambda: frozen("weight"),
    "frozen biases": lambda: frozen("bias"),
    "frozen first": lambda: frozen("0."),
    "encoder layer": encoder,
    "encoder layer, norm first": lambda: encoder(norm_first=True, activation="gelu"),
    "encoder": lambda: nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False),
}
SHAPES = [(4, 6, WIDTH), (6, WIDTH), (2, 3, 4, WIDTH), (WIDTH,), (0, WIDTH)]


def outcome(
    model: nn.Module, x: Tensor, *, deferred: bool, passes: int = 1, autocast: torch.dtype | None = None
) -> tuple[Tensor, Tensor | None, dict[str, Tensor | None]]:
    """Output, gradient of the input, and those of the parameters, of some passes."""
    x = x.clone().requires_grad_()
    store = WeightGradStore()
    for _ in range(passes):
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            y = model(x)
        with store.open() if deferred else nullcontext():
            y.backward(torch.arange(y.numel(), dtype=y.dtype).view(y.shape) / max(1, y.numel()))
    trained = [one.weight for one in model.modules() if isinstance(one, DeferringLinear) and one.weight.requires_grad]
    if deferred:
        assert len(store) >= passes * len(trained), "weight gradients were not put off"
        assert all(weight.grad is None for weight in trained)
    store.run()
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same(found: tuple, expected: tuple) -> None:
    (y, dx, gradients), (y1, dx1, gradients1) = found, expected
    assert torch.equal(y, y1) and y.dtype == y1.dtype and y.stride() == y1.stride()
    assert torch.equal(dx, dx1)
    assert gradients.keys() == gradients1.keys()
    for name, gradient in gradients.items():
        reference = gradients1[name]
        assert (gradient is None) == (reference is None), name
        assert gradient is None or (torch.equal(gradient, reference) and gradient.dtype == reference.dtype), name


def pair(name: str, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """A model, and one of the same weights that defers."""
    torch.manual_seed(0)
    plain = MODELS[name]().to(dtype)
    return plain, defer(copy.deepcopy(plain))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("deferred", [False, True])
def test_forward_and_gradients_have_the_bits_of_nn_linear(name, dtype, deferred):
    plain, deferring = pair(name, dtype)
    x = torch.randn(4, 6, WIDTH).to(dtype)
    assert_same(outcome(deferring, x, deferred=deferred), outcome(plain, x, deferred=False))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deferred", [False, True])
def test_inputs_of_any_shape_and_memory_order_are_taken(shape, deferred):
    for name in ("linear", "without bias"):
        x = torch.randn(shape)
        plain, deferring = pair(name, torch.float32)
        assert_same(outcome(deferring, x, deferred=deferred), outcome(plain, x, deferred=False))
        if len(shape) > 2:
            x = torch.randn(shape[1], shape[0], *shape[2:]).transpose(0, 1)
            y, y1 = deferring(x), plain(x)
            torch.testing.assert_close(y, y1, rtol=1e-6, atol=1e-6)  # float32, and another order of rows


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_so_they_have_under_autocast_which_leaves_float64_alone(name, dtype, deferred):
    plain, deferring = pair(name, dtype)
    x = torch.randn(4, 6, WIDTH).to(dtype)
    found = outcome(deferring, x, deferred=deferred, autocast=torch.bfloat16)
    expected = outcome(plain, x, deferred=False, autocast=torch.bfloat16)
    if name == "used twice" and dtype == torch.float32:
        # torch adds the two in bfloat16, in the copies of the parameters that it cast once; here they meet in float32.
        found[2].update({n: gradient.bfloat16().float() for n, gradient in found[2].items()})
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["mlp", "used twice"])
def test_what_several_micro_batches_put_off_arrives_once_and_summed(name):
    plain, deferring = pair(name, torch.float64)
    x = torch.randn(4, 6, WIDTH, dtype=torch.float64)
    arrivals: list[int] = []
    weights = [parameter for parameter in deferring.parameters() if parameter.ndim > 1]
    for weight in weights:
        weight.register_post_accumulate_grad_hook(lambda p: arrivals.extend([id(p)] * (p.grad is not None)))
    _, _, found = outcome(deferring, x, deferred=True, passes=2)
    _, _, expected = outcome(plain, x, deferred=False, passes=2)
    for n, gradient in found.items():
        torch.testing.assert_close(gradient, expected[n], rtol=1e-13, atol=1e-13)  # four summands in another order
    assert sorted(arrivals) == sorted(map(id, weights))


@pytest.mark.parametrize("enabled", [False, True])
def test_the_encoder_layers_fast_path_reads_the_same_weights(enabled):
    plain, deferring = pair("encoder layer", torch.float32)
    assert type(deferring.linear1) is DeferringLinear and type(deferring.self_attn.out_proj) is not DeferringLinear
    x, before = torch.randn(4, 6, WIDTH), torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(enabled)
    try:
        with torch.no_grad():
            assert torch.equal(deferring.eval()(x), plain.eval()(x))
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_only_the_class_changes_and_that_once():
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
    entered: list[nn.Module] = []
    model[0].register_forward_pre_hook(lambda module, args: entered.append(module))
    before = dict(model.named_parameters())
    names = list(model.state_dict())
    assert megalite.defer(model) is model and defer(model) is model
    assert [type(one) for one in model] == [DeferringLinear, nn.ReLU, DeferringLinear]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    assert list(model.state_dict()) == names
    model(torch.zeros(1, WIDTH))
    assert entered == [model[0]]
    clone = copy.deepcopy(model)
    assert type(clone[0]) is DeferringLinear and clone[0].weight is not model[0].weight
    clone.load_state_dict(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2)).state_dict())


def test_shapes_are_known_on_the_meta_device():
    model = defer(nn.Linear(WIDTH, 5, device="meta"))
    assert model(torch.empty(3, WIDTH, device="meta")).shape == (3, 5)


def parametrised() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


def spectral() -> nn.Module:
    return nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("make", [parametrised, spectral, lambda: nn.MultiheadAttention(WIDTH, 2)])
def test_linears_that_are_not_plain_stay_what_they_are(make):
    odd = make()
    types = [type(one) for one in odd.modules()]
    with pytest.raises(ValueError, match=rf"^{type(odd).__name__} has no plain nn.Linear"):
        defer(odd)
    model = defer(nn.ModuleDict({"odd": odd, "plain": nn.Linear(WIDTH, WIDTH)}))
    assert [type(one) for one in model["odd"].modules()] == types
    assert type(model["plain"]) is DeferringLinear


def test_a_weight_that_becomes_computed_later_is_not_put_off():
    """Its gradient has further to go than the store takes it."""
    model = nn.utils.parametrizations.weight_norm(defer(nn.Linear(WIDTH, WIDTH)))
    store = WeightGradStore()
    with store.open():
        model(torch.randn(3, WIDTH)).sum().backward()
    assert len(store) == 0 and all(p.grad is not None for p in model.parameters())


def test_nothing_to_defer_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^Sequential has no plain nn\.Linear"):
        defer(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize("shape", [(5, 6), (2, 5, 6)])
@pytest.mark.parametrize("bias", [False, True])
def test_what_a_deferring_linear_gives_may_be_written_into_as_nn_linears_may(shape, bias):
    plain = nn.Sequential(nn.Linear(6, 6, bias), nn.ReLU(inplace=True)).double()
    deferring = defer(copy.deepcopy(plain))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    for model in (plain, deferring):
        model(x).square().sum().backward()
    for ours, theirs in zip(deferring.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


def test_complex_linears_are_left_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64), nn.Linear(2, 2))
    assert [type(layer) is nn.Linear for layer in defer(model)] == [True, False]

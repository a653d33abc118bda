"""What `Zero` cannot train is refused by name: parameters changed after it was built, dtypes, gradients, numbers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from megalite.mesh import Mesh
from megalite.zero import Zero
from tests.zero.models import Weights, matrix
from tests.zero.training import adamw


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype))


def one_step(zero: Zero, model: nn.Module) -> None:
    zero.begin(microbatches=1)
    weight = next(model.parameters())
    model(torch.ones(2, 4, dtype=weight.dtype)).sum().backward()
    zero.step()


def loaded(model: nn.Module, *, assign: bool = False, same: bool = False) -> None:
    state = {name: value if same else torch.ones_like(value) for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)


@pytest.mark.parametrize(
    "move",
    [
        lambda model: model.double(),
        lambda model: loaded(model, assign=True),
        lambda model: loaded(model, assign=True, same=True),
        lambda model: setattr(model[0], "weight", nn.Parameter(torch.ones(4, 4))),
    ],
    ids=["converted", "assigned", "assigned-to-itself", "replaced"],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_parameter_that_is_no_view_of_the_flat_weights_any_more_is_refused_by_name(
    move: Callable[[nn.Module], None], steps
):
    model = net()
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    for _ in range(steps):
        one_step(zero, model)
    move(model)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is no longer a view .* before Zero is built"):
        zero.begin(microbatches=1)


def test_a_tied_weight_that_one_of_its_modules_replaced_is_refused():
    model = net()
    model[1].weight = model[0].weight
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    one_step(zero, model)
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight is no longer a view"):
        zero.begin(microbatches=1)


def test_a_conversion_that_changes_nothing_is_allowed():
    model = net()
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    model.float().to("cpu")
    one_step(zero, model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_load_into_weights_that_are_their_own_masters_is_trained_from(dtype):
    model = net(dtype)
    zero = Zero(model, Mesh.build(), optimizer=lambda groups: torch.optim.SGD(groups, lr=0.5))
    one_step(zero, model)
    loaded(model)
    one_step(zero, model)
    # two rows of ones through ones: each output's bias has the gradient 2, so 1 - 0.5 * 2
    assert torch.equal(model[1].bias, torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_load_into_half_precision_weights_is_refused_since_their_masters_would_undo_it(dtype, steps):
    model = net(dtype)
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    for _ in range(steps):
        one_step(zero, model)
    loaded(model)
    with pytest.raises(RuntimeError, match=r"parameter 0\.weight was written .*load weights before Zero is built"):
        zero.begin(microbatches=1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_updates_of_half_precision_weights_are_no_writes_by_others_and_a_load_within_a_step_is_one(device):
    with torch.device(device):
        model = Weights(torch.bfloat16, matrix=matrix(3, 4))
    zero = Zero(model, Mesh.build(), optimizer=adamw, seed=0)
    for number in range(4):
        zero.begin(microbatches=1)
        model(matrix=1.0).backward()
        if number == 3:
            loaded(model)
        zero.step()
    with pytest.raises(RuntimeError, match=r"parameter matrix was written"):
        zero.begin(microbatches=1)


def test_a_parameter_frozen_or_unfrozen_after_zero_was_built_is_refused_by_name_and_turned_back_is_not():
    model = net()
    model[0].bias.requires_grad_(False)
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    one_step(zero, model)
    model[1].requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"parameter 1\.weight .* is frozen now"):
        zero.begin(microbatches=1)
    model[1].requires_grad_(True)
    model[0].bias.requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"parameter 0\.bias was frozen .* is trainable now"):
        zero.begin(microbatches=1)
    model[0].bias.requires_grad_(False)
    one_step(zero, model)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_complex_parameter_is_refused_by_name_and_a_frozen_one_is_kept(dtype):
    model = net()
    model[1].register_parameter("phase", nn.Parameter(torch.ones(3, dtype=dtype)))
    with pytest.raises(ValueError, match=r"parameter 1\.phase is torch\.complex.*legal dtypes: torch\.float64"):
        Zero(model, Mesh.build(), optimizer=adamw)
    model[1].phase.requires_grad_(False)
    one_step(Zero(model, Mesh.build(), optimizer=adamw), model)
    assert torch.equal(model[1].phase, torch.ones(3, dtype=dtype))


def test_a_sparse_gradient_is_refused_by_name():
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4))
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    zero.begin(microbatches=1)
    with pytest.raises(ValueError, match=r"gradient of 0\.weight is torch\.sparse_coo.*sparse=False"):
        model(torch.tensor([1, 2])).sum().backward()


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, -math.inf])
def test_a_norm_that_is_not_positive_clips_nothing_and_is_refused_before_anything_moves(bad):
    model = net()
    zero = Zero(model, Mesh.build(), optimizer=adamw)
    zero.begin(microbatches=1)
    model(torch.ones(2, 4)).sum().backward()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ValueError, match=r"max_norm=.* must be greater than 0"):
        zero.step(max_norm=bad)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    zero.step(max_norm=math.inf)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_a_loss_scale_that_cannot_be_divided_out_is_refused(bad):
    zero = Zero(net(), Mesh.build(), optimizer=adamw)
    zero.begin(microbatches=1)
    with pytest.raises(ValueError, match=r"loss_scale=.* must be finite and greater than 0"):
        zero.step(loss_scale=bad)
    assert zero.skipped == 0

"""The raw gradients of the first step show a module that forgot `partial` or a `copy`; a right one is never blamed."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from megalite import comm
from megalite.layers.linear import RowParallelLinear
from megalite.mesh import Layout, Mesh
from megalite.spec import ParallelModule, ParamSpec, normal, ones
from megalite.zero import Zero
from megalite.zero.verify import sketch
from tests.ranks import run
from tests.zero.models import ParallelMLP, Weights
from tests.zero.training import WIDTH, adamw, global_batch


def outcomes(build, layout: Layout, steps: int = 2) -> tuple[list[str], list[str]]:
    """(errors, warnings) of some steps with `verify` on; a step that raised is not repeated."""
    torch.manual_seed(0)
    mesh = Mesh.build(layout)
    model = build(mesh)
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    errors: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            zero.begin(microbatches=2)
            mine = global_batch(step).part(mesh.data().rank, mesh.data().size)
            for index in range(2):
                mine.part(index, 2).loss(model).backward()
            try:
                zero.step()
            except RuntimeError as error:
                errors.append(str(error))
                break
    return errors, [str(w.message) for w in caught]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_right_module_is_neither_blamed_nor_suspected(sequence_parallel):
    build = partial(ParallelMLP, sequence_parallel=sequence_parallel)
    assert run(outcomes, 4, build, Layout(dp=2, tp=2)) == [([], [])] * 4


def test_a_forgotten_partial_is_an_error_on_all_ranks_that_names_parameter_and_axis():
    build = partial(ParallelMLP, sequence_parallel=True, partial=False)
    for errors, _ in run(outcomes, 4, build, Layout(dp=2, tp=2)):
        assert "the raw gradient of blocks.1.0.weight differs over axis tp" in errors[0]
        assert errors[0].endswith("Likewise: blocks.0.0.weight")


class NoCopy(ParallelModule):
    """A column-cut product made by hand, without f in front: the gradient of what comes before is left a summand."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.declare("cut", ParamSpec((16, WIDTH), normal(0.3), cut={mesh.tp: 0}), dtype=torch.float64)
        self.row = RowParallelLinear(16, WIDTH, tp=mesh.tp, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(torch.tanh(self.enter(x) @ self.cut.t()))


def test_a_missing_copy_is_an_error_on_all_ranks_that_names_what_is_in_front_of_it():
    for errors, _ in run(outcomes, 2, NoCopy, Layout(tp=2)):
        assert "the raw gradient of enter.weight differs over axis tp" in errors[0]
        assert "cut" not in [part.split()[0] for part in errors[0].split("the raw gradient of ")[1:]]


def test_a_partial_that_is_none_is_a_warning_and_then_an_error():
    build = partial(ParallelMLP, sequence_parallel=False, partial=True)
    for errors, warned in run(outcomes, 2, build, Layout(tp=2)):
        for texts in (warned, errors):
            assert len(texts) == 1 and "is equal on all ranks (0, 1) of axis tp" in texts[0]
            assert "blocks.0.0.weight" in texts[0] and "blocks.1.0.weight" in texts[0]


def equal_once(then: float) -> tuple[int, int]:
    mesh = Mesh.build(Layout(tp=2))
    model = Weights(scale=ParamSpec((4,), ones, partial=(mesh.tp,)))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for gradient in (1.0, 1.0 + then * mesh.tp.rank, 1.0):
            zero.begin(microbatches=1)
            model(scale=gradient).backward()
            zero.step()
    return len(caught), zero.skipped


def test_one_batch_of_equal_tokens_is_a_warning_only_and_two_steps_are_looked_at_at_most():
    assert run(equal_once, 2, 0.5) == [(1, 0)] * 2


def a_gradient_that_is_not_finite() -> tuple[float, list[str]]:
    mesh = Mesh.build(Layout(tp=2))
    model = Weights(scale=ParamSpec((4,), ones))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    model(scale=float("nan") if mesh.tp.rank else 1.0).backward()
    norm = zero.step().item()
    zero.begin(microbatches=1)
    model(scale=1.0 + mesh.tp.rank).backward()
    with pytest.raises(RuntimeError, match="scale differs over axis tp"):
        zero.step()
    return zero.skipped, [str(norm)]


def test_a_gradient_that_is_not_finite_skips_the_step_and_the_next_one_is_verified():
    assert run(a_gradient_that_is_not_finite, 2) == [(1, ["nan"])] * 2


def blamed(dtype: torch.dtype, gradients: tuple[float, float], others: float) -> bool:
    mesh = Mesh.build(Layout(tp=2))
    model = Weights(dtype, scale=ParamSpec((4,), ones), rest=ParamSpec((4,), ones), none=ParamSpec((4,), ones))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    model(scale=gradients[mesh.tp.rank], rest=others).backward()
    try:
        zero.step()
    except RuntimeError:
        return True
    return False


@pytest.mark.parametrize(
    ("dtype", "rounding", "fault"),
    [(torch.float64, 1e-9, 1e-6), (torch.float32, 1e-4, 1e-2), (torch.bfloat16, 2**-7, 2**-3)],
)
def test_what_differs_by_rounding_is_not_blamed_and_what_differs_by_more_is(dtype, rounding, fault):
    assert run(blamed, 2, dtype, (1.0, 1.0 + rounding), 1.0) == [False, False]
    assert run(blamed, 2, dtype, (1.0, 1.0 + fault), 1.0) == [True, True]


def test_a_gradient_that_is_nothing_but_rounding_beside_the_others_is_not_blamed():
    """As that of a bias in front of a softmax: zero in exact arithmetic, any small number in floating point."""
    assert run(blamed, 2, torch.float32, (1e-8, -1e-8), 1.0) == [False, False]


def unused_summands() -> int:
    mesh = Mesh.build(Layout(tp=2))
    model = Weights(used=ParamSpec((4,), ones), unused=ParamSpec((4,), ones, partial=(mesh.tp,)))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zero.begin(microbatches=1)
        model(used=1.0).backward()
        zero.step()
    return len(caught)


def test_summands_that_are_all_zero_are_not_suspected():
    assert run(unused_summands, 2) == [0, 0]


def blame_in_one_stage() -> str:
    mesh = Mesh.build(Layout(tp=2, pp=2))
    model = Weights(scale=ParamSpec((4,), ones))
    zero = Zero(model, mesh, optimizer=adamw, seed=0)
    zero.begin(microbatches=1)
    model(scale=1.0 + mesh.tp.rank * mesh.pp.rank).backward()
    with pytest.raises(RuntimeError) as raised:
        zero.step()
    return str(raised.value)


def test_a_fault_in_one_pipeline_stage_ends_the_step_on_all_ranks():
    first, _, third, _ = run(blame_in_one_stage, 4)
    assert "another rank has found" in first and "scale differs over axis tp" in third


def test_sketches_measure_the_distance_of_gradients_and_add_up():
    a, b = torch.randn(2, 100_003, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, parts = sketch(a + b, "w")[:-1], sketch(a, "w")[:-1] + sketch(b, "w")[:-1]
    assert torch.allclose(whole, parts, rtol=0, atol=1e-9)
    assert sketch(a, "w")[-1].item() == pytest.approx(a.norm().item())
    # Mean over names of the squared distance: within 4 standard errors, sqrt(2 / (SUMS x names)) of it each.
    squared = [(sketch(a - b, str(i))[:-1] ** 2).sum().item() for i in range(50)]
    assert sum(squared) / 50 == pytest.approx((a - b).norm().item() ** 2, rel=4 * (2 / 400) ** 0.5)


def gather_is_not_all_gather(mesh: Mesh) -> nn.Module:
    class Model(ParallelMLP):
        def forward(self, x: Tensor) -> Tensor:
            x = comm.split(torch.tanh(self.enter(x)), self.tp, -2)
            for block in self.blocks:
                x = x + block(x)
            return self.leave(comm.all_gather(x, self.tp, -2))

    return Model(mesh, sequence_parallel=True)


def test_a_factor_on_all_ranks_alike_is_beyond_what_ranks_can_see_of_each_other():
    """The method's limit, so that nobody relies on more: `all_gather` where `gather` is right doubles gradients."""
    assert run(outcomes, 2, gather_is_not_all_gather, Layout(tp=2)) == [([], [])] * 2

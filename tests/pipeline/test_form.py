"""What crosses between stages arrives as it was: dtype, shape, and the order of its dims in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from megalite.pipeline.form import DTYPES, HEADER, MOST_DIMS, Form, form_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (1,) * MOST_DIMS])
def test_a_header_says_dtype_and_shape(dtype, shape):
    form = Form.of(torch.empty(shape, dtype=dtype))
    header = form.header(CPU)
    assert Form.of(header) == HEADER and Form.read(header) == form and Form.of(form.empty(CPU)) == form


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_a_tensor_arrives_in_the_order_that_it_has_in_memory_and_is_not_copied_to_be_sent(order):
    """(seq, batch, hidden) in memory, as under sequence parallelism, is one of them."""
    dense = torch.arange(24.0).view([(2, 3, 4)[dim] for dim in order])
    x = dense.permute([order.index(dim) for dim in range(3)])
    form = Form.read(Form.of(x).header(CPU))
    packed = form.packed(x)
    assert packed.is_contiguous() and packed.data_ptr() == x.data_ptr()
    came = form.unpacked(form.empty(CPU).copy_(packed))
    assert torch.equal(came, x) and came.stride() == x.stride()


def test_what_has_gaps_or_repeats_is_packed():
    for x in (
        torch.arange(12.0).view(3, 4)[:, ::2],
        torch.ones(3, 1).expand(3, 4),
        torch.arange(6.0).view(2, 3).t()[1:],
    ):
        form = Form.of(x)
        assert torch.equal(form.unpacked(form.packed(x)), x) and form.packed(x).is_contiguous()


def test_a_gradient_in_another_order_travels_in_its_activations():
    activation, gradient = torch.zeros(3, 2).t(), torch.arange(6.0).view(2, 3)
    form = Form.of(activation)
    assert Form.of(gradient) == form  # of one shape: the order is not a part of it
    assert torch.equal(form.unpacked(form.packed(gradient)), gradient)


class Pair(NamedTuple):
    x: Tensor
    more: dict[str, object]


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    owner: object


def test_the_form_of_a_microbatch_is_that_of_the_tensors_within():
    """In tuples, lists, mappings and dataclasses; other objects are not looked into, which may hold themselves."""

    class Other:
        def __init__(self) -> None:
            self.x, self.me = torch.zeros(3), self

    x, ids = torch.zeros(2, 3), torch.zeros(4, dtype=torch.int64)
    of_x, of_ids = Form(torch.float32, (2, 3), (0, 1)), Form(torch.int64, (4,), (0,))
    assert form_of(x) == (of_x,)
    assert form_of([Pair(x, {"ids": ids, "step": 7}), None]) == (of_x, of_ids)
    assert form_of(Slotted(x, Other())) == (of_x,)
    assert form_of(None) == form_of(Other()) == ()


def test_what_is_conjugated_lazily_travels_as_its_values():
    x = torch.randn(2, 3, dtype=torch.complex64).conj()
    form = Form.of(x)
    assert torch.equal(form.unpacked(form.packed(x)), x) and not form.packed(x).is_conj()


def test_a_microbatch_may_hold_sparse_tensors():
    form_of([torch.eye(3).to_sparse()])

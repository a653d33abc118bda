"""The vocabulary-parallel embedding equals nn.Embedding on every tp, padded or not, tied or not, deferred or not."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.layers.embedding import LearnedPositions, VocabParallelEmbedding, padded_size
from megalite.layers.linear import parallel_linear
from megalite.layers.rows import SEQUENCE_DIM, sequence_first
from megalite.mesh import Axis
from megalite.spec import ParamSpec
from megalite.weight_grad import WeightGradStore
from tests.counting import count
from tests.law import assert_equal, axes, draw, tp_axis, transposed
from tests.ranks import run

BATCH, SEQ, HIDDEN = 3, 8, 6


def _ids(vocab: int) -> Tensor:
    ids = torch.randint(0, vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[1, 1:4], ids[2, -1] = 0, vocab - 1, vocab - 1  # both ends, and one id several times
    return ids


def _embedding(vocab: int, axis: Axis, *, sequence_parallel: bool) -> VocabParallelEmbedding:
    layer = VocabParallelEmbedding(vocab, HIDDEN, tp=axis, sequence_parallel=sequence_parallel, dtype=torch.float64)
    box, valid = layer.specs["weight"].box(), layer.specs["weight"].valid_box()
    layer.weight.data[valid] = draw(vocab, HIDDEN, seed=1)[box]
    return layer


def _assert_rows_equal(local: Tensor, whole: Tensor, spec: ParamSpec, what: str) -> None:
    """The rows of the vocabulary are the reference's, and padding is exactly zero."""
    valid = spec.valid_box()
    assert_equal(local[valid], whole[spec.box()], what)
    assert not local[valid[0].stop :].any(), what + ": padding is not zero"


def _check_embedding(vocab: int, sequence_parallel: bool, deferred: bool) -> None:
    axis, ids, dy = tp_axis(), _ids(vocab), draw(BATCH, SEQ, HIDDEN, seed=2)
    table = draw(vocab, HIDDEN, seed=1).requires_grad_()
    F.embedding(ids, table).backward(dy)
    layer = _embedding(vocab, axis, sequence_parallel=sequence_parallel)
    y = layer(ids)
    mine = (lambda t: t.chunk(axis.size, SEQUENCE_DIM)[axis.rank]) if sequence_parallel else (lambda t: t)
    what = f"{vocab=}, {sequence_parallel=}, {deferred=}: "
    assert torch.equal(y, mine(F.embedding(ids, table))), what + "one row and zeros sum to the row itself"
    assert sequence_first(y) == sequence_parallel
    for of_dy in (torch.clone, transposed, lambda t: t[:1].expand_as(t)):
        layer.zero_grad()
        table.grad = None
        F.embedding(ids, table).backward(of_dy(dy))
        upstream = of_dy(mine(dy))
        before = upstream.clone()
        store = WeightGradStore()
        if deferred:
            with store.open():
                y.backward(upstream, retain_graph=True)
            assert layer.weight.grad is None and len(store) == 1
            store.run()
        else:
            y.backward(upstream, retain_graph=True)
        _assert_rows_equal(layer.weight.grad, table.grad, layer.specs["weight"], what + "dW")
        assert torch.equal(upstream, before), what + "the upstream gradient was written to"


@pytest.mark.parametrize("n", [2, 4])
def test_it_equals_nn_embedding_whatever_the_vocabulary(n):
    """101 is divided by neither, and of 5 over 4 ranks (padded to 8) one rank has padding alone and one half of it."""
    cases = list(itertools.product((101, 64, 5), (False, True), (False, True)))
    run(lambda: [_check_embedding(*case) for case in cases], n)


def test_alone_it_needs_no_process_group_and_drops_in_for_nn_embedding():
    layer, plain = VocabParallelEmbedding(9, 4, tp=Axis("tp")), nn.Embedding(9, 4)
    layer.load_state_dict(plain.state_dict())
    for ids in (
        torch.tensor(3),
        torch.tensor([3, 8]),
        torch.arange(6).view(2, 3),
        torch.zeros(0, 4, dtype=torch.int64),
    ):
        assert torch.equal(layer(ids), plain(ids))
    assert VocabParallelEmbedding(9, 4, tp=Axis("tp"), dtype=torch.bfloat16, device="meta").weight.is_meta
    assert "9, 4, tp=1" in repr(layer)


def test_the_spec_is_the_vocabulary_and_its_padding_no_parameter():
    for axis in axes("tp", 4):
        layer = VocabParallelEmbedding(101, 4, tp=axis)
        spec = layer.specs["weight"]
        assert (spec.shape, spec.padded_shape, layer.weight.shape) == ((101, 4), (104, 4), (26, 4))
        assert not layer.weight[spec.valid_box()[0].stop :].any()
    assert layer.weight[23:].eq(0).all() and layer.weight[:23].any(1).all(), "rank 3 has 23 rows and 3 of padding"
    assert [padded_size(101, n) for n in (1, 2, 3, 4)] == [101, 102, 102, 104]


def _traffic() -> dict[bool, tuple[int, float, int, float]]:
    axis, out = tp_axis(), {}
    for sequence_parallel in (False, True):
        layer = _embedding(64, axis, sequence_parallel=sequence_parallel)
        with count() as forward:
            y = layer(_ids(64))
        with count() as backward:
            y.backward(torch.ones_like(y))
        out[sequence_parallel] = (forward.calls(), forward.bytes_sent(), backward.calls(), backward.bytes_sent())
    return out


def test_it_is_one_all_reduce_or_a_scatter_there_and_a_gather_back():
    t = 4
    half = BATCH * SEQ * HIDDEN * 8 * (t - 1) / t
    assert run(_traffic, t) == [{False: (1, 2 * half, 0, 0), True: (1, half, 1, half)}] * t


class _Tied(nn.Module):
    """Embedding and output layer of one weight."""

    def __init__(self, axis: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        self.enter = "all_gather" if sequence_parallel else "copy"
        self.embedding = _embedding(101, axis, sequence_parallel=sequence_parallel)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.tanh(self.embedding(ids))
        return parallel_linear(x, self.embedding.weight, tp=self.embedding.tp, enter=self.enter, leave="cut")


def _check_tied() -> None:
    axis, ids = tp_axis(), _ids(101)
    table = draw(101, HIDDEN, seed=1).requires_grad_()
    dy = draw(BATCH, SEQ, 101, seed=3)
    (torch.tanh(F.embedding(ids, table)) @ table.t()).backward(dy)
    columns = F.pad(dy, (0, padded_size(101, axis.size) - 101)).chunk(axis.size, -1)[axis.rank]
    for sequence_parallel, deferred in itertools.product((False, True), (False, True)):
        model, store = _Tied(axis, sequence_parallel), WeightGradStore()
        gradients: list[Tensor] = []

        def take(parameter: Tensor, gradients: list[Tensor] = gradients) -> None:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                parameter.grad = None

        model.embedding.weight.register_post_accumulate_grad_hook(take)
        y = model(ids)
        if deferred:
            with store.open():
                y.backward(columns)
            assert (len(gradients), len(store)) == (0, 2)
            store.run()
        else:
            y.backward(columns)
        assert len(gradients) == 1, "a tied weight arrives once per pass"
        spec = model.embedding.specs["weight"]
        _assert_rows_equal(gradients[0], table.grad, spec, f"{sequence_parallel=}, {deferred=}")


def test_a_weight_tied_to_the_output_layer_gets_one_whole_gradient():
    run(_check_tied, 2)


def test_an_embedding_that_is_not_trained_puts_nothing():
    layer, store = VocabParallelEmbedding(9, 4, tp=Axis("tp")), WeightGradStore()
    layer.weight.requires_grad_(False)
    y = layer(torch.tensor([[1]])) * torch.ones(4, requires_grad=True)
    with store.open():
        y.sum().backward()
    assert len(store) == 0


def test_a_gradient_of_half_precision_is_summed_in_float32():
    """1 added 1000 times in bfloat16 stops at 256."""
    layer = VocabParallelEmbedding(4, 2, tp=Axis("tp"), dtype=torch.bfloat16)
    y = layer(torch.full((1, 1000), 3))
    y.backward(torch.ones_like(y))
    assert layer.weight.grad.dtype == torch.bfloat16
    assert torch.equal(layer.weight.grad[3].float(), torch.tensor(1000.0).bfloat16().float().expand(2))


@pytest.mark.parametrize("wrong", [101, -1, -100, 10**9])
def test_an_id_outside_of_the_vocabulary_is_refused_on_every_rank_though_padding_has_a_row_for_it(wrong):
    ids = torch.tensor([[0, 100, wrong]])
    for axis in axes("tp", 4):
        with pytest.raises(ValueError, match=rf"model\.vocab_size.*: {wrong} lies outside \[0, 101\)"):
            VocabParallelEmbedding(101, 4, tp=axis)(ids)


def _check_positions(sequence_parallel: bool) -> None:
    axis = tp_axis()
    table, x = draw(32, HIDDEN, seed=1).requires_grad_(), draw(BATCH, SEQ, HIDDEN, seed=2).requires_grad_()
    positions, dy = torch.tensor([0, 1, 2, 3, 0, 1, 2, 31]), draw(BATCH, SEQ, HIDDEN, seed=3)
    full = x + table[positions]
    full.backward(dy)
    layer = LearnedPositions(32, HIDDEN, tp=axis, sequence_parallel=sequence_parallel, dtype=torch.float64)
    layer.weight.data.copy_(table.detach())
    part = axis.part(SEQ) if sequence_parallel else slice(None)
    for of_x in (torch.clone, transposed):
        layer.zero_grad()
        mine = of_x(x.detach()[:, part]).requires_grad_()
        y = layer(mine, positions[part])
        assert sequence_first(y) == sequence_first(mine), "the order in memory stays"
        y.backward(dy[:, part])
        gradient = layer.weight.grad.clone()
        if layer.specs["weight"].partial == (axis,):
            torch.distributed.all_reduce(gradient, group=axis.group)
        assert layer.specs["weight"].partial == ((axis,) if sequence_parallel else ())
        assert_equal(y.detach(), full.detach()[:, part], "y")
        assert_equal(mine.grad, x.grad[:, part], "dx")
        assert_equal(gradient, table.grad, "dW")


def test_learned_positions_are_added_by_position_and_under_sequence_parallelism_their_gradients_are_summands():
    run(lambda: [_check_positions(sequence_parallel) for sequence_parallel in (False, True)], 2)


def test_a_position_beyond_the_table_and_positions_of_other_tokens_are_refused():
    layer = LearnedPositions(16, 4, tp=Axis("tp"))
    with pytest.raises(ValueError, match=r"max_position_embeddings.*: 16 lies outside \[0, 16\)"):
        layer(torch.zeros(1, 17, 4), torch.arange(17))
    with pytest.raises(ValueError, match=r"positions of shape \(8,\) must be \(4,\)"):
        layer(torch.zeros(1, 4, 4), torch.arange(8))

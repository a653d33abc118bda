"""Vocabulary-parallel cross entropy equals F.cross_entropy, never holds nor sends logits, and survives odd batches."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.layers.cross_entropy import linear_cross_entropy, vocab_parallel_cross_entropy
from megalite.layers.embedding import VocabParallelEmbedding, padded_size
from megalite.layers.rows import SEQUENCE_DIM, sequence_first
from megalite.mesh import Axis
from megalite.weight_grad import WeightGradStore
from tests.counting import count
from tests.law import assert_equal, axes, draw, tp_axis, transposed
from tests.ranks import run

BATCH, SEQ, HIDDEN, IGNORED = 3, 8, 6, -100


class Options(NamedTuple):
    label_smoothing: float = 0.0
    z_loss: float = 0.0


OPTIONS = [Options(), Options(label_smoothing=0.1), Options(z_loss=0.01), Options(label_smoothing=0.2, z_loss=0.1)]


def _labels(vocab: int) -> Tensor:
    labels = torch.randint(0, vocab, (BATCH, SEQ), generator=torch.Generator().manual_seed(0))
    labels[0, :3], labels[1, 0], labels[1, 1] = IGNORED, 0, vocab - 1
    return labels


def _reference(logits: Tensor, labels: Tensor, options: Options) -> Tensor:
    """Per token, by torch and by the definition of the z-loss."""
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none", label_smoothing=options[0])
    z = options.z_loss * logits.logsumexp(-1).square()
    return losses.view_as(labels) + torch.where(labels == IGNORED, 0, z)


def _cut(x: Tensor, vocab: int, axis: Axis, *, padding: float) -> Tensor:
    """This rank's columns, with padding that must not matter."""
    return F.pad(x, (0, padded_size(vocab, axis.size) - vocab), value=padding).chunk(axis.size, -1)[axis.rank].clone()


def _check_loss(vocab: int, options: Options) -> None:
    axis, labels = tp_axis(), _labels(vocab)
    full = (3 * draw(BATCH, SEQ, vocab, seed=1)).requires_grad_()
    weights = draw(BATCH, SEQ, seed=2)
    expected = _reference(full, labels, options)
    (weights * expected).sum().backward()
    for of_logits, of_upstream in ((torch.clone, transposed), (transposed, torch.clone)):
        logits = of_logits(_cut(full.detach(), vocab, axis, padding=50.0)).requires_grad_()
        given = {"tp": axis, "vocab_size": vocab, **options._asdict()}
        losses = vocab_parallel_cross_entropy(logits, labels, reduction="none", **given)
        losses.backward(of_upstream(weights))
        what = f"{vocab=}, {options}, {of_logits.__name__}: "
        assert_equal(losses.detach(), expected.detach(), what + "loss per token", tolerance=1e-12)
        gradient = _cut(full.grad, vocab, axis, padding=0.0)
        assert_equal(logits.grad, gradient, what + "gradient", tolerance=1e-12)
        assert not logits.grad[gradient == 0].any(), what + "padding and ignored tokens get exactly zero"
        total = vocab_parallel_cross_entropy(logits, labels, **given)
        assert_equal(total.detach(), expected.detach().sum(), what + "sum")
        answers = [torch.empty_like(losses.detach().contiguous()) for _ in range(axis.size)]
        torch.distributed.all_gather(answers, losses.detach().contiguous(), group=axis.group)
        assert all(torch.equal(answer, losses) for answer in answers), what + "every rank holds the same bits"


@pytest.mark.parametrize("n", [2, 4])
def test_loss_and_gradient_are_those_of_the_vocabulary_without_its_padding(n):
    """101 over 2 and 4 is padded; of 5 over 4 one rank holds only padding, and of 64 nobody does."""
    cases = [(101, OPTIONS[0]), (101, OPTIONS[3]), (64, OPTIONS[1]), (5, OPTIONS[0]), (5, OPTIONS[3])]
    run(lambda: [_check_loss(*case) for case in cases], n)


@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_on_one_rank_it_is_torchs_cross_entropy(options):
    labels, tp = _labels(11), Axis("tp")
    logits, same = ((3 * draw(BATCH, SEQ, 11, seed=1)).requires_grad_() for _ in range(2))
    loss = vocab_parallel_cross_entropy(logits, labels, tp=tp, vocab_size=11, **options._asdict())
    expected = _reference(same, labels, options).sum()
    (2 * loss).backward()
    (2 * expected).backward()
    assert_equal(loss.detach(), expected.detach(), "loss", tolerance=1e-12)
    assert_equal(logits.grad, same.grad, "gradient", tolerance=1e-12)
    one_token = vocab_parallel_cross_entropy(logits[0, 5], labels[0, 5], tp=tp, vocab_size=11, **options._asdict())
    assert_equal(one_token.detach(), _reference(same, labels, options)[0, 5].detach(), "any leading dims, or none")


def test_a_batch_without_a_single_valid_token_has_loss_zero_and_zero_gradients():
    logits = draw(2, 4, 11).requires_grad_()
    for options in OPTIONS:
        labels = torch.full((2, 4), IGNORED)
        loss = vocab_parallel_cross_entropy(logits, labels, tp=Axis("tp"), vocab_size=11, **options._asdict())
        (gradient,) = torch.autograd.grad(loss, logits)
        assert loss == 0 and not gradient.any()
    empty = draw(2, 0, 11).requires_grad_()
    loss = vocab_parallel_cross_entropy(empty, torch.zeros(2, 0, dtype=torch.int64), tp=Axis("tp"), vocab_size=11)
    loss.backward()
    assert loss == 0 and empty.grad.shape == empty.shape


def test_large_logits_neither_overflow_nor_lose_the_loss():
    logits = torch.tensor([[1000.0, 0.0, -1000.0], [-1e4, -1e4, -1e4], [0.0, -math.inf, 0.0]], requires_grad=True)
    labels = torch.tensor([1, 2, 0])
    losses = vocab_parallel_cross_entropy(logits, labels, tp=Axis("tp"), vocab_size=3, reduction="none")
    assert torch.allclose(losses, torch.tensor([1000.0, math.log(3), math.log(2)]), rtol=1e-6)
    losses.sum().backward()
    assert torch.allclose(logits.grad[0], torch.tensor([1.0, -1.0, 0.0]))
    assert logits.grad.isfinite().all()


def _masked_rank() -> tuple[Tensor, Tensor]:
    axis = tp_axis()
    logits = torch.tensor([[1.0, 2.0, -math.inf, -math.inf]]).chunk(2, -1)[axis.rank].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, torch.tensor([0]), tp=axis, vocab_size=4)
    loss.backward()
    return loss.detach(), logits.grad


def test_a_rank_may_have_nothing_but_minus_infinity():
    losses, gradients = zip(*run(_masked_rank, 2), strict=True)
    softmax = torch.softmax(torch.tensor([[1.0, 2.0]]), -1)
    for loss in losses:
        assert torch.allclose(loss, -softmax[0, 0].log(), rtol=1e-6)
    assert torch.allclose(
        torch.cat(gradients, 1), torch.cat((softmax - torch.tensor([1.0, 0.0]), torch.zeros(1, 2)), 1)
    )


def test_another_ignore_index_may_be_a_class_of_its_own():
    logits, labels = draw(2, 4, 7), torch.tensor([[0, 1, 2, 0], [0, 6, 5, 0]])
    loss = vocab_parallel_cross_entropy(logits, labels, tp=Axis("tp"), vocab_size=7, ignore_index=0)
    assert_equal(loss, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0, reduction="sum"), "loss")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_half_precision_are_computed_in_float32(dtype):
    """Loss in float32 as of the rounded logits; the gradient is rounded once, after the target is subtracted: rounding
    the softmax first would leave a token that is almost right without any gradient."""
    logits = (8 * draw(4, 300, seed=1)).to(dtype).requires_grad_()
    labels = torch.arange(4)
    sure = 10.0
    logits.data[0, 1:], logits.data[0, 0] = -sure, sure / 2
    exact = logits.detach().double().requires_grad_()
    loss = vocab_parallel_cross_entropy(logits, labels, tp=Axis("tp"), vocab_size=300)
    expected = F.cross_entropy(exact, labels, reduction="sum")
    loss.backward()
    expected.backward()
    assert loss.dtype == torch.float32
    assert_equal(loss.detach(), expected.detach().float(), "loss", tolerance=1e-6)  # a few float32 roundings
    assert (logits.grad.dtype, 0 > logits.grad[0, 0] > -2e-4) == (dtype, True), "1 - softmax, about 1e-4"
    # rounded once to dtype, after a few float32 roundings of a softmax near 1
    assert torch.allclose(logits.grad.double(), exact.grad, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(
    ("columns", "labels", "options", "message"),
    [
        (101, 1, {}, r"logits of 101 columns: a vocabulary of 101 over tp=4 has 26 on each rank; pass this rank's"),
        (104, 1, {}, r"logits of 104 columns: .* has 26"),
        (25, 1, {}, r"logits of 25 columns: .* has 26"),
        (26, 101, {}, r"labels .*: 101 lies outside \[0, 101\)"),
        (26, 103, {}, r"labels .*: 103 lies outside \[0, 101\)"),
        (26, -1, {}, r"labels \(but for ignore_index=-100\): -1 lies outside \[0, 101\)"),
        (26, -100, {"ignore_index": -1}, r"labels \(but for ignore_index=-1\): -100 lies outside"),
        (26, 1, {"label_smoothing": 1.0}, r"label_smoothing=1.0 must lie in \[0, 1\)"),
        (26, 1, {"reduction": "mean"}, r"reduction='mean' is neither 'sum' nor 'none'"),
    ],
)
def test_gathered_logits_and_labels_of_no_class_are_refused_with_the_numbers(columns, labels, options, message):
    """On the ranks of tp=4 none of these reaches a collective; the mean is refused on one rank."""
    for axis in [Axis("tp")] if "reduction" in options else axes("tp", 4):
        vocab = 26 if axis.size == 1 else 101
        with pytest.raises(ValueError, match=message):
            vocab_parallel_cross_entropy(
                torch.zeros(2, columns), torch.full((2,), labels), tp=axis, vocab_size=vocab, **options
            )


def test_labels_of_another_shape_than_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"labels of shape \(2, 3\) for logits of \(2, 4\) tokens"):
        vocab_parallel_cross_entropy(torch.zeros(2, 4, 5), torch.zeros(2, 3).long(), tp=Axis("tp"), vocab_size=5)
    given: dict[str, Any] = {"tp": Axis("tp"), "vocab_size": 5, "sequence_parallel": False}
    x, weight = torch.zeros(2, 4, 3), nn.Parameter(torch.zeros(5, 3))
    for chunk_tokens in (None, 2):
        with pytest.raises(ValueError, match=r"labels of shape \(2, 3\) for logits of \(2, 4\) tokens"):
            linear_cross_entropy(x, weight, torch.zeros(2, 3).long(), chunk_tokens=chunk_tokens, **given)
    with pytest.raises(ValueError, match="chunk_tokens=0 must be at least 1"):
        linear_cross_entropy(x, weight, torch.zeros(2, 4).long(), chunk_tokens=0, **given)


def _traffic() -> list[tuple[int, float, int, float]]:
    axis, labels, sent = tp_axis(), _labels(101), []
    for options in OPTIONS:
        logits = _cut(draw(BATCH, SEQ, 101), 101, axis, padding=0.0).requires_grad_()
        with count() as forward:
            loss = vocab_parallel_cross_entropy(logits, labels, tp=axis, vocab_size=101, **options._asdict())
        with count() as backward:
            loss.backward()
        sent.append((forward.calls(), forward.bytes_sent(), backward.calls(), backward.bytes_sent()))
    return sent


def test_it_sends_three_numbers_a_token_once_or_four_if_labels_are_smoothed_and_nothing_in_backward():
    """All-gather of (t, 3, tokens): each rank sends (t-1) times its own."""
    t = 4
    number = BATCH * SEQ * 8 * (t - 1)
    assert run(_traffic, t) == [[(1, (4 if o.label_smoothing else 3) * number, 0, 0) for o in OPTIONS]] * t


class _Head(nn.Module):
    """An embedding tied to the output layer, with one product between, as a model in small."""

    def __init__(self, vocab: int, axis: Axis, sequence_parallel: bool) -> None:
        super().__init__()
        given: dict[str, Any] = {"tp": axis, "sequence_parallel": sequence_parallel}
        self.embedding = VocabParallelEmbedding(vocab, HIDDEN, dtype=torch.float64, **given)
        spec = self.embedding.specs["weight"]
        self.embedding.weight.data[spec.valid_box()] = draw(vocab, HIDDEN, seed=1)[spec.box()]
        self.given = {"vocab_size": vocab, **given}

    def forward(self, ids: Tensor, labels: Tensor, **options: Any) -> Tensor:
        x = torch.tanh(self.embedding(ids))
        return linear_cross_entropy(x, self.embedding.weight, labels, **self.given, **options)


def _check_head(vocab: int, options: Options) -> None:
    axis, labels = tp_axis(), _labels(vocab)
    ids = labels.roll(1).clamp(min=0)
    table = draw(vocab, HIDDEN, seed=1).requires_grad_()
    expected = _reference(torch.tanh(F.embedding(ids, table)) @ table.t(), labels, options)
    expected.sum().backward()
    for sequence_parallel, chunk_tokens, deferred in itertools.product((False, True), (None, 5, 1000), (False, True)):
        model, store, gradients = _Head(vocab, axis, sequence_parallel), WeightGradStore(), []
        weight, spec = model.embedding.weight, model.embedding.specs["weight"]

        def take(parameter: Tensor, gradients: list[Tensor] = gradients) -> None:
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                parameter.grad = None

        weight.register_post_accumulate_grad_hook(take)
        what = f"{vocab=}, {options}, {sequence_parallel=}, {chunk_tokens=}, {deferred=}: "
        losses = model(ids, labels, chunk_tokens=chunk_tokens, reduction="none", **options._asdict())
        assert_equal(losses.detach(), expected.detach(), what + "per token")
        loss = model(ids, labels, chunk_tokens=chunk_tokens, **options._asdict())
        assert_equal(loss.detach(), expected.detach().sum(), what + "loss")
        if deferred:
            with store.open():
                loss.backward()
            assert (gradients, len(store)) == ([], 2)
            store.run()
        else:
            loss.backward()
        assert len(gradients) == 1, what + "a tied weight arrives once"
        assert_equal(gradients[0][spec.valid_box()], table.grad[spec.box()], what + "dW")
        assert not gradients[0][spec.valid_box()[0].stop :].any(), what + "padding"


@pytest.mark.parametrize(("n", "vocab", "options"), [(2, 101, OPTIONS[0]), (4, 5, OPTIONS[3])])
def test_the_output_product_and_its_loss_chunked_or_not_tied_or_deferred_are_the_dense_ones(n, vocab, options):
    """Chunks of 5 of 24 tokens leave a short last one, and 1000 are more than there are."""
    run(_check_head, n, vocab, options)


def _check_input_gradient() -> None:
    axis, labels = tp_axis(), _labels(101)
    full_x, full_w = draw(BATCH, SEQ, HIDDEN, seed=1).requires_grad_(), draw(102, HIDDEN, seed=2)
    _reference(full_x @ full_w[:101].t(), labels, Options()).sum().backward()
    for sequence_parallel, chunk_tokens, of_x in itertools.product((False, True), (None, 5), (torch.clone, transposed)):
        part = axis.part(SEQ) if sequence_parallel else slice(None)
        x = of_x(full_x.detach()[:, part]).requires_grad_()
        weight = nn.Parameter(full_w.chunk(2)[axis.rank], requires_grad=False)
        loss = linear_cross_entropy(
            x,
            weight,
            labels,
            tp=axis,
            sequence_parallel=sequence_parallel,
            vocab_size=101,
            chunk_tokens=chunk_tokens,
        )
        loss.backward()
        assert_equal(x.grad, full_x.grad[:, part], f"{sequence_parallel=}, {chunk_tokens=}, {of_x.__name__}: dx")
        if of_x is transposed:
            assert sequence_first(x.grad), "the order in memory stays"


def test_the_input_gradient_is_the_dense_one_with_the_weight_frozen():
    run(_check_input_gradient, 2)


def _head_traffic() -> dict[tuple[bool, bool, int | None], tuple[int, float, int, float]]:
    axis, out = tp_axis(), {}
    labels = _labels(101)
    for sequence_parallel, deferred, chunk_tokens in itertools.product((False, True), (False, True), (None, 5)):
        seq = SEQ // axis.size if sequence_parallel else SEQ
        x = draw(BATCH, seq, HIDDEN).requires_grad_()
        weight, store = nn.Parameter(draw(26, HIDDEN)), WeightGradStore()
        given: dict[str, Any] = {"tp": axis, "sequence_parallel": sequence_parallel, "vocab_size": 101}
        with count() as forward:
            loss = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens, **given)
        with count() as backward:
            if deferred:
                with store.open():
                    loss.backward()
                store.run()
            else:
                loss.backward()
        sent = (forward.calls(), forward.bytes_sent(), backward.calls(), backward.bytes_sent())
        out[sequence_parallel, deferred, chunk_tokens] = sent
    return out


def test_chunking_sends_no_more_and_no_oftener():
    """The loss's all-gather; and of x (b s h) an all-reduce back, or a gather there and gather and scatter back."""
    t = 4
    loss, half = 3 * BATCH * SEQ * 8 * (t - 1), BATCH * SEQ * HIDDEN * 8 * (t - 1) / t
    expected = {}
    for deferred, chunk_tokens in itertools.product((False, True), (None, 5)):
        expected[False, deferred, chunk_tokens] = (1, loss, 1, 2 * half)
        expected[True, deferred, chunk_tokens] = (2, loss + half, 2, 2 * half)
    assert run(_head_traffic, t) == [expected] * t


class _Storages(TorchDispatchMode):
    """Bytes of the storages, of at least `smallest` bytes, that are alive after each operation: `peak` is the most."""

    def __init__(self, smallest: int) -> None:
        super().__init__()
        self.smallest, self.alive, self.peak = smallest, {}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() >= self.smallest:
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: held for key, held in self.alive.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.alive.values()))
        return out


def _peak(chunk_tokens: int | None, *, deferred: bool, evaluate: bool = False) -> int:
    """Most bytes in storages of at least a quarter of one chunk's logits; all else here is smaller than that."""
    tokens, vocab = 4096, 512
    x = draw(2, tokens // 2, 2).float().requires_grad_()
    weight = nn.Parameter(draw(vocab, 2).float())
    labels = torch.randint(0, vocab, (2, tokens // 2), generator=torch.Generator().manual_seed(0))
    store = WeightGradStore()
    given: dict[str, Any] = {"tp": Axis("tp"), "sequence_parallel": True, "vocab_size": vocab}
    gc.collect()
    with _Storages(smallest=CHUNK * vocab) as storages:
        if evaluate:
            with torch.no_grad():
                linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens, reduction="none", **given)
            return storages.peak
        loss = linear_cross_entropy(x, weight, labels, chunk_tokens=chunk_tokens, **given)
        if deferred:
            with store.open():
                loss.backward()
            store.run()
        else:
            loss.backward()
    return storages.peak


CHUNK = 1024


def test_the_gradient_overwrites_the_logits_and_in_chunks_those_of_one_chunk_are_all_that_ever_lives():
    """Logits of 4096 tokens x 512 in float32 are 8 MiB whole, and 2 MiB in chunks of 1024 tokens. Beside them are two
    blocks on the way, of half a MiB."""
    whole, chunk, block = 4096 * 512 * 4, CHUNK * 512 * 4, 2**17 * 4
    for deferred in (False, True):
        assert whole <= _peak(None, deferred=deferred) <= whole + 2 * block
        assert chunk <= _peak(CHUNK, deferred=deferred) <= chunk + 2 * block
    assert chunk <= _peak(CHUNK, deferred=False, evaluate=True) <= chunk + 2 * block


def test_a_second_backward_through_overwritten_logits_is_refused():
    weight, given = nn.Parameter(draw(11, HIDDEN)), {"tp": Axis("tp"), "sequence_parallel": False, "vocab_size": 11}
    loss = linear_cross_entropy(draw(BATCH, SEQ, HIDDEN), weight, _labels(11), **given)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"):
        loss.backward()


def test_logits_that_are_given_are_left_as_they_are():
    logits = draw(BATCH, SEQ, 11).requires_grad_()
    before = logits.detach().clone()
    vocab_parallel_cross_entropy(logits, _labels(11), tp=Axis("tp"), vocab_size=11).backward()
    assert torch.equal(logits, before)


def test_under_autocast_the_product_is_in_bfloat16_and_the_loss_in_float32():
    x, labels = draw(BATCH, SEQ, HIDDEN, seed=1).float(), _labels(11)
    table = draw(11, HIDDEN, seed=2).float()
    results = []
    for chunk_tokens in (None, 5):
        inputs, weight = x.clone().requires_grad_(), nn.Parameter(table.clone())
        given: dict[str, Any] = {"tp": Axis("tp"), "sequence_parallel": False, "vocab_size": 11}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = linear_cross_entropy(inputs, weight, labels, chunk_tokens=chunk_tokens, **given)
        loss.backward()
        assert loss.dtype == inputs.grad.dtype == weight.grad.dtype == torch.float32
        results.append((loss.detach(), inputs.grad, weight.grad))
    inputs, weight = x.clone().requires_grad_(), table.clone().requires_grad_()
    expected = F.cross_entropy(
        (inputs.bfloat16() @ weight.bfloat16().t()).flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )
    expected.backward()
    for result in results:
        # a bfloat16 has 8 bits, 0.4 %: the gradient of the logits is rounded once more, the loss not at all
        assert_equal(result[0], expected.detach(), "loss", tolerance=1e-5)
        assert_equal(result[1], inputs.grad, "dx", tolerance=0.01)
        assert_equal(result[2], weight.grad, "dW", tolerance=0.01)


def test_evaluation_gives_each_token_its_loss_without_keeping_anything():
    x, labels, weight = draw(BATCH, SEQ, HIDDEN), _labels(11), nn.Parameter(draw(11, HIDDEN))
    with torch.no_grad():
        losses = linear_cross_entropy(
            x, weight, labels, tp=Axis("tp"), sequence_parallel=False, vocab_size=11, chunk_tokens=7, reduction="none"
        )
    assert losses.grad_fn is None
    assert_equal(losses, _reference(x @ weight.detach().t(), labels, Options()), "per token")
    assert not losses[0, :3].any(), "ignored"
    assert SEQUENCE_DIM == -2

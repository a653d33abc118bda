"""What is dropped depends on where an element stands in the run and on nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megalite.layers.dropout import DropoutKey, attention_dropout, dropout
from megalite.layers.rows import sequence_first
from tests.law import axes, draw, tp_axis, transposed
from tests.ranks import run

BATCH, SEQ, CHANNELS, HEADS, P = 4, 32, 48, 4, 0.3
SIGMAS = 5  # a false alarm once in 3.5 million; the seeds are fixed, so it would come at once or never


def key(*, seed: int = 0, step: int = 1, first: int = 0, batch: int = BATCH, seq: int = SEQ) -> DropoutKey:
    return DropoutKey(seed, step, torch.arange(first, first + batch), torch.arange(seq))


def kept(at: DropoutKey, *, p: float = P, layer: int = 0, site: str = "mlp_out", channels: int = CHANNELS) -> Tensor:
    """Which of (batch, seq, channels) are kept."""
    ones = torch.ones(*at.tokens.shape, channels)
    return dropout(ones, p, key=at, layer=layer, site=site) != 0


def kept_weights(at: DropoutKey, *, heads: int = HEADS, head_offset: int = 0, site: str = "attention") -> Tensor:
    """Which of (batch, heads, queries, keys) are kept."""
    ones = torch.ones(at.tokens.shape[0], heads, at.tokens.shape[1], at.tokens.shape[1])
    return attention_dropout(ones, P, key=at, layer=0, site=site, head_offset=head_offset) != 0


def assert_uncorrelated(a: Tensor, b: Tensor, what: str, p: float = P) -> None:
    """The mean product of two masks, each of mean 0 and variance 1, is 0 up to 1 / sqrt(entries)."""
    a, b = ((mask.double() - (1 - p)) / (p * (1 - p)) ** 0.5 for mask in (a, b))
    sigmas = (a * b).sum().abs() / a.numel() ** 0.5
    assert sigmas < SIGMAS, f"{what}: correlated by {sigmas:.1f} sigma"


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_the_rate_is_p(p: float) -> None:
    dropped = ~kept(key(batch=16, seq=256), p=p, channels=256)
    assert (dropped.double().mean() - p).abs() < SIGMAS * (p * (1 - p) / dropped.numel()) ** 0.5


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_what_a_row_drops_varies_as_independent_draws_do(p: float) -> None:
    """Mean, variance and kurtosis of the number of channels dropped in a row are the binomial distribution's."""
    rows, channels = 64 * 256, 64
    dropped = (~kept(key(batch=64, seq=256), p=p, channels=channels)).sum(-1).double()
    variance = channels * p * (1 - p)
    scaled = (dropped - channels * p) / variance**0.5
    kurtosis = 3 + (1 - 6 * p * (1 - p)) / variance
    assert scaled.mean().abs() < SIGMAS / rows**0.5
    assert (scaled.square().mean() - 1).abs() < SIGMAS * (2 / rows) ** 0.5
    assert (scaled.pow(4).mean() - kurtosis).abs() < SIGMAS * (96 / rows) ** 0.5


def test_kept_elements_are_divided_by_the_rate_of_keeping() -> None:
    x = draw(BATCH, SEQ, CHANNELS)
    y = dropout(x, P, key=key(), layer=0, site="mlp_out")
    assert torch.allclose(y, torch.where(kept(key()), x / (1 - P), 0.0), rtol=1e-15, atol=0)


def test_whatever_names_an_element_changes_the_mask() -> None:
    whole = kept(key())
    others = {
        "seed": kept(key(seed=1)),
        "step": kept(key(step=2)),
        "layer": kept(key(), layer=1),
        "site": kept(key(), site="attention_out"),
        "sequence": kept(key(first=BATCH)),
        "distant sequence": kept(key(first=2**32)),
        "position": kept(DropoutKey(0, 1, torch.arange(BATCH), torch.arange(SEQ, 2 * SEQ))),
    }
    for what, other in others.items():
        assert not torch.equal(whole, other), what
        assert_uncorrelated(whole, other, what)


@pytest.mark.parametrize("dim", [0, 1, 2])
@pytest.mark.parametrize("distance", [1, 2, 16])
def test_neighbours_are_uncorrelated(dim: int, distance: int) -> None:
    whole = kept(key(batch=32, seq=64), channels=64)
    length = whole.shape[dim] - distance
    assert_uncorrelated(whole.narrow(dim, 0, length), whole.narrow(dim, distance, length), f"dim {dim}")


@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_neighbouring_attention_weights_are_uncorrelated(dim: int) -> None:
    whole = kept_weights(key(), heads=16)
    length = whole.shape[dim] - 1
    assert_uncorrelated(whole.narrow(dim, 0, length), whole.narrow(dim, 1, length), f"dim {dim}")


def test_parts_drop_what_the_whole_drops() -> None:
    x = draw(BATCH, SEQ, CHANNELS)
    whole = dropout(x, P, key=key(), layer=3, site="mlp_out")
    for axis in axes("tp", 4):
        positions, channels = axis.part(SEQ), axis.part(CHANNELS)
        part = dropout(x[:, positions], P, key=key().part(axis), layer=3, site="mlp_out")
        assert torch.equal(part, whole[:, positions])
        part = dropout(x[..., channels], P, key=key(), layer=3, site="mlp_out", channel_offset=channels.start)
        assert torch.equal(part, whole[..., channels])
    one = DropoutKey(0, 1, torch.arange(2, 3), torch.arange(SEQ))
    assert torch.equal(dropout(x[2:3], P, key=one, layer=3, site="mlp_out"), whole[2:3])


def test_positions_may_differ_between_sequences() -> None:
    """Row i of (batch, seq) positions counts from 10 i: the mask of a sequence whose positions begin there."""
    each = DropoutKey(0, 1, torch.arange(BATCH), torch.arange(SEQ) + 10 * torch.arange(BATCH)[:, None])
    long = key(seq=SEQ + 10 * BATCH)
    whole, weights = kept(long), kept_weights(long)
    for i in range(BATCH):
        at = slice(10 * i, 10 * i + SEQ)
        assert torch.equal(kept(each)[i], whole[i, at])
        assert torch.equal(kept_weights(each)[i], weights[i, :, at, at])


def test_parts_of_the_heads_drop_what_the_whole_drops() -> None:
    whole = kept_weights(key())
    for axis in axes("tp", 2):
        heads = axis.part(HEADS)
        assert torch.equal(kept_weights(key(), heads=HEADS // 2, head_offset=heads.start), whole[:, heads])


def on_each_rank() -> dict[str, Tensor]:
    tp = tp_axis()
    heads = HEADS // tp.size
    return {
        "replicated": kept(key()),
        "tokens": kept(key().part(tp)),
        "heads": kept_weights(key(), heads=heads, head_offset=tp.rank * heads),
    }


def test_ranks_with_the_same_activation_drop_alike_and_those_with_parts_do_not() -> None:
    first, second = run(on_each_rank, 2)
    assert torch.equal(first["replicated"], second["replicated"])
    for what, dim, whole in (("tokens", 1, kept(key())), ("heads", 1, kept_weights(key()))):
        assert torch.equal(torch.cat([first[what], second[what]], dim), whole)
        assert_uncorrelated(first[what], second[what], what)


@pytest.mark.parametrize("order", [lambda x: x, transposed], ids=["batch first", "sequence first"])
@pytest.mark.parametrize("gradient_order", [lambda x: x, transposed], ids=["batch first", "sequence first"])
def test_backward_drops_what_forward_dropped_in_any_memory_order(
    order: Callable[[Tensor], Tensor], gradient_order: Callable[[Tensor], Tensor]
) -> None:
    x = order(draw(BATCH, SEQ, CHANNELS)).requires_grad_()
    y = dropout(x, P, key=key(), layer=0, site="mlp_out")
    gradient = gradient_order(draw(BATCH, SEQ, CHANNELS, seed=1))
    (dx,) = torch.autograd.grad(y, x, gradient)
    assert y.stride() == x.stride() and dx.stride() == gradient.stride()
    assert sequence_first(y) == (order is transposed)
    mask = kept(key())
    assert torch.equal(y != 0, mask)
    assert torch.allclose(dx, torch.where(mask, gradient / (1 - P), 0.0), rtol=1e-15, atol=0)


def test_every_precision_drops_the_same() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        y = dropout(torch.ones(BATCH, SEQ, CHANNELS, dtype=dtype), P, key=key(), layer=0, site="mlp_out")
        assert y.dtype == dtype
        assert torch.equal(y != 0, kept(key()))


def test_nothing_of_the_size_of_x_is_stored() -> None:
    stored: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        dropout(draw(BATCH, SEQ, CHANNELS).requires_grad_(), P, key=key(), layer=0, site="mlp_out")
        attention_dropout(draw(BATCH, HEADS, SEQ, SEQ).requires_grad_(), P, key=key(), layer=0, site="attention")
    assert sum(t.numel() for t in stored) == (2 * BATCH * SEQ + CHANNELS) + (2 * BATCH * HEADS * SEQ + SEQ)


def test_recomputed_dropout_is_the_same_without_any_state() -> None:
    def network(x: Tensor) -> Tensor:
        return dropout(x.sin(), P, key=key(), layer=0, site="mlp_out").sin()

    results = []
    for forward in (network, lambda x: checkpoint(network, x, use_reentrant=False, preserve_rng_state=False)):
        x = draw(BATCH, SEQ, CHANNELS).requires_grad_()
        y = forward(x)
        torch.rand(3)  # another draw in between
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_masks_are_pinned() -> None:
    """A run that is resumed by a later version goes on with the masks it began with."""
    at = DropoutKey(17, 2**33, torch.tensor([0, 5, 2**40]), torch.tensor([0, 1, 4095, 2**31]))
    masks = (kept(at, layer=31), kept_weights(at))
    digest = hashlib.sha256(b"".join(mask.numpy().tobytes() for mask in masks)).hexdigest()[:16]
    assert digest == "5bb4e4ce0ed5de43"


def test_p_0_gives_x_itself() -> None:
    x, weights = draw(BATCH, SEQ, CHANNELS), draw(BATCH, HEADS, SEQ, SEQ)
    assert dropout(x, 0.0, key=key(), layer=0, site="mlp_out") is x
    assert attention_dropout(weights, 0.0, key=key(), layer=0, site="attention") is weights


@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan")])
def test_a_p_that_is_no_rate_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        dropout(draw(BATCH, SEQ, CHANNELS), p, key=key(), layer=0, site="mlp_out")
    with pytest.raises(ValueError, match=r"\[0, 1\)"):
        attention_dropout(draw(BATCH, HEADS, SEQ, SEQ), p, key=key(), layer=0, site="attention")


def test_a_key_of_other_tokens_is_refused() -> None:
    """Under sequence parallelism the key of all tokens would give each rank the first rank's masks."""
    with pytest.raises(ValueError, match=r"\(4, 16\).*\(4, 32\)"):
        dropout(draw(BATCH, SEQ // 2, CHANNELS), P, key=key(), layer=0, site="mlp_out")
    with pytest.raises(ValueError, match=r"\(4, 4, 16, 16\).*\(4, 32\)"):
        attention_dropout(draw(BATCH, HEADS, SEQ // 2, SEQ // 2), P, key=key(), layer=0, site="attention")

"""Attention's heads: grouped, windowed, cut, shared. That every cut trains alike is the law's table's to say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from megalite.layers.attention import FusedQKV, GroupedQueryAttention, HeadCut, QKVShape, SharedQKV
from megalite.layers.dropout import DropoutKey
from megalite.layers.rows import sequence_first
from megalite.mesh import Axis
from megalite.spec import init_parameters, normal, param_specs
from tests.law import draw

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BATCH, SEQ = 24, 4, 2, 6, 3, 10
ALONE = HeadCut.even(Axis("tp"))


def attention(*, seed: int = 0, **options: object) -> GroupedQueryAttention:
    sizes = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "cut": ALONE}
    model = GroupedQueryAttention(HIDDEN, **(sizes | options), dtype=torch.float64)  # type: ignore[arg-type]
    init_parameters(model, seed)
    return model


def by_hand(model: GroupedQueryAttention, x: Tensor, window: int | None) -> Tensor:
    """softmax(q k^T / sqrt(d)) v, one head and one query after the other."""
    weight = model.qkv.weight
    out = torch.zeros(BATCH, SEQ, HEADS, HEAD_DIM, dtype=torch.float64)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        q = x @ weight[group, head % (HEADS // KV_HEADS)].t()
        k, v = x @ weight[group, -2].t(), x @ weight[group, -1].t()
        for at in range(SEQ):
            seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
            scores = torch.einsum("bd,bkd->bk", q[:, at], k[:, seen]) / math.sqrt(HEAD_DIM)
            out[:, at, head] = torch.einsum("bk,bkd->bd", scores.softmax(-1), v[:, seen])
    return out.flatten(2) @ model.out.weight.t()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 1, 4, SEQ, 99])
def test_attention_is_the_formula_head_by_head(implementation, window):
    """To 1e-12: float64 sums of a few terms in another order."""
    model = attention(window=window, implementation=implementation)
    x = draw(BATCH, SEQ, HIDDEN)
    torch.testing.assert_close(model(x), by_hand(model, x, window), rtol=1e-12, atol=1e-12)


def test_a_window_ends_the_influence_of_a_token():
    model, x = attention(window=3), draw(BATCH, SEQ, HIDDEN)
    changed = x.clone()
    changed[:, 2] += 1
    moved = (model(x) != model(changed)).any(-1).any(0)
    assert moved.tolist() == [2 <= at < 5 for at in range(SEQ)]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("window", [None, 3])
def test_documents_in_one_row_are_what_each_is_alone(implementation, window):
    """Rows are cut at different places, one in the middle of nothing; to 1e-12: the same sums under another mask."""
    model, x = attention(window=window, implementation=implementation), draw(BATCH, SEQ, HIDDEN)
    ends = [(4, 7), (1, 9), (SEQ, SEQ)]
    documents = torch.tensor([[sum(at >= end for end in row) for at in range(SEQ)] for row in ends])
    together = model(x, documents=documents)
    for row, cuts in enumerate(ends):
        for start, stop in itertools.pairwise(sorted({0, *cuts, SEQ})):
            alone = model(x[row : row + 1, start:stop])
            torch.testing.assert_close(together[row : row + 1, start:stop], alone, rtol=1e-12, atol=1e-12)


def test_a_token_of_one_document_changes_no_other():
    model, x = attention(), draw(BATCH, SEQ, HIDDEN)
    documents = (torch.arange(SEQ) >= 4).long().expand(BATCH, SEQ)
    changed = x.clone()
    changed[:, 2] += 1
    moved = (model(x, documents=documents) != model(changed, documents=documents)).any(-1).any(0)
    assert moved.tolist() == [2 <= at < 4 for at in range(SEQ)]


def test_a_clip_bounds_queries_keys_and_values():
    """A bound that nothing reaches changes nothing; one of zero leaves nothing of v."""
    x = draw(BATCH, SEQ, HIDDEN)
    assert torch.equal(attention(clip=1e9)(x), attention()(x))
    assert not attention(clip=0.0)(x).any()


def test_the_memory_order_of_the_input_comes_out_again():
    x = draw(SEQ, BATCH, HIDDEN).transpose(0, 1)
    model = attention()
    assert sequence_first(model(x)) and not sequence_first(model(x.contiguous()))
    torch.testing.assert_close(model(x), model(x.contiguous()), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tp", [4, 8])
def test_ranks_that_share_key_heads_hold_parts_of_the_same_fused_weight(tp):
    """2 key heads on 4 and 8 ranks: q, k and v of every rank are regions of the one weight that one rank draws."""
    shape = QKVShape(2, 8, HEAD_DIM)
    fused = FusedQKV(HIDDEN, shape, True, cut=ALONE, init=normal(1.0))
    init_parameters(fused, 5)
    seen = torch.zeros(shape.fused)
    for rank in range(tp):
        outer, inner = divmod(rank, tp // 2)
        cut = HeadCut(Axis("tp", tp, rank), Axis("kv", 2, outer), Axis("shared", tp // 2, inner))
        part = SharedQKV(
            HIDDEN, shape, True, cut=cut, sequence_parallel=False, init=normal(1.0), device=None, dtype=None
        )
        init_parameters(part, 5)
        for name, spec in param_specs(part).items():
            whole, _, box = spec.logical(name)
            assert torch.equal(getattr(part, name), getattr(fused, whole)[box])
            if name == "q_weight":
                seen[box[:3]] += 1
    assert (seen[:, :8] == 1).all() and (seen[:, 8:] == 0).all(), "each query head is on one rank"


def test_attention_dropout_needs_the_explicit_path_and_a_key():
    with pytest.raises(ValueError, match=r"attention_dropout=0.1 needs attn_implementation=eager, not sdpa"):
        attention(dropout=0.1)
    model = attention(dropout=0.5, implementation="eager")
    x = draw(BATCH, SEQ, HIDDEN)
    with pytest.raises(ValueError, match="needs a DropoutKey"):
        model(x)
    key = DropoutKey(0, 1, torch.arange(BATCH), torch.arange(SEQ))
    assert torch.equal(model(x, key=key), model(x, key=key)) and not torch.equal(model(x, key=key), model.eval()(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"implementation": "flash"}, "attn_implementation=flash is unknown; take sdpa or eager"),
        ({"heads": 3}, "heads=3 is not a multiple of kv_heads=2"),
        (
            {"cut": HeadCut.even(Axis("tp", 4))},
            "model.num_key_value_heads=2 cannot be cut over tp=4: take a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        attention(**options)

"""Fragments into documents: each with exactly one end, whatever its text and its tokenizer bring along."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.encode import Counts, Joiner, batches
from megalite.data.texts import Fragment

END = 9


def join(
    documents: list[list[list[int]]], *, batch: int, prompts: int = 0
) -> tuple[list[int], list[int], list[int], Counts]:
    """Documents, each a list of fragments of tokens, joined `batch` fragments at a time: tokens, ends, mask, counts."""
    joiner = Joiner(END, np.dtype(np.uint16))
    fragments, rows = [], []
    for document in documents:
        for number, row in enumerate(document):
            ends = number == len(document) - 1
            fragments.append(Fragment("x", 1, counts=number >= prompts or ends, ends=ends))
            rows.append(np.array(row, dtype=np.int32))
    tokens: list[int] = []
    ends_, mask = [], []
    for start in range(0, len(rows), batch):
        joined = joiner.join(fragments[start : start + batch], rows[start : start + batch])
        ends_ += [len(tokens) + end for end in joined.ends.tolist()]
        tokens += joined.tokens.tolist()
        mask += joined.mask.tolist()
    return tokens, ends_, mask, joiner.counts


@pytest.mark.parametrize("batch", [1, 2, 100])
@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ([[1, 2]], [1, 2, END]),
        ([[1, 2, END]], [1, 2, END]),  # the tokenizer adds one, or the text ends in it
        ([[1, 2, END, END]], [1, 2, END]),
        ([[1, END, 2]], [1, END, 2, END]),  # one within the text is the text's
        ([[END, 1]], [END, 1, END]),
        ([[1], [2], []], [1, 2, END]),
        ([[1, END], [END, END], []], [1, END]),
        ([[1, END], [END], [2, END]], [1, END, END, 2, END]),
        ([[], [1]], [1, END]),
    ],
)
def test_a_document_ends_in_exactly_one_end_also_where_its_text_does(
    document: list[list[int]], expected: list[int], batch: int
) -> None:
    tokens, ends, _, counts = join([document, document], batch=batch)
    assert tokens == 2 * expected
    assert ends == [len(expected), 2 * len(expected)]
    assert counts == Counts(documents=2, tokens=len(tokens), text_bytes=2 * len(document), skipped=0)


@pytest.mark.parametrize("empty", [[[]], [[], []], [[END]], [[END], [END, END]]])
def test_a_document_without_a_token_of_its_own_is_skipped_and_counted(empty: list[list[int]]) -> None:
    """Its bytes are not counted: they stand for no token."""
    tokens, ends, _, counts = join([empty, [[1]], empty], batch=2)
    assert (tokens, ends) == ([1, END], [2])
    assert counts == Counts(documents=1, tokens=2, text_bytes=1, skipped=2)


def test_what_is_a_prompt_does_not_count_and_the_end_does() -> None:
    tokens, _, mask, _ = join([[[1, 2], [3]], [[4], [5, 6]]], batch=3, prompts=1)
    assert tokens == [1, 2, 3, END, 4, 5, 6, END]
    assert mask == [0, 0, 1, 1, 0, 1, 1, 1]


rows = st.lists(st.lists(st.sampled_from([1, 2, END]), max_size=4), min_size=1, max_size=4)


@given(st.lists(rows, max_size=6), st.integers(1, 9))
def test_batches_leave_no_trace(documents: list[list[list[int]]], batch: int) -> None:
    assert join(documents, batch=batch, prompts=1) == join(documents, batch=1000, prompts=1)
    tokens, ends, mask, counts = join(documents, batch=batch)
    assert len(mask) == len(tokens) == counts.tokens
    assert counts.documents == len(ends) and counts.documents + counts.skipped == len(documents)
    for begin, end in zip([0, *ends], ends, strict=False):
        assert tokens[end - 1] == END and (end - begin >= 2) and tokens[end - 2] != END


def test_batches_are_all_fragments_in_order_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.encode.BATCH_BYTES", 64)
    fragments = [Fragment(str(n), 30) for n in range(5)] + [Fragment("", 0)] * 10
    found = list(batches(fragments))
    assert [fragment for batch in found for fragment in batch] == fragments
    assert [len(batch) for batch in found] == [3, 4, 4, 4]

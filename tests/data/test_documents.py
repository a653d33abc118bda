"""Documents along windows against a list of every token's document."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.data.documents import Ends, Packed
from megalite.data.errors import DataError

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda sizes: sum(sizes) > 1)


@given(lengths, st.data())
def test_documents_along_a_window_are_those_of_its_tokens_counted_within_it(sizes, data):
    ends = np.cumsum(sizes)
    total = int(ends[-1])
    of_token = np.repeat(np.arange(len(sizes)), sizes)
    length = data.draw(st.integers(1, total))
    starts = np.array(data.draw(st.lists(st.integers(0, total - length), min_size=1, max_size=5)))
    documents = Ends(ends)
    assert documents.holding(np.arange(total)).tolist() == of_token.tolist()
    for start, row in zip(starts, documents.along(starts, length), strict=True):
        window = of_token[start : start + length]
        assert row.tolist() == np.unique(window, return_inverse=True)[1].tolist()


def test_ends_that_fall_are_an_error_that_names_the_source():
    for ends in ([30, 10, 20, 40], [10, 5, 30, 40]):
        with pytest.raises(DataError, match=r"my set: its documents' ends do not rise"):
            Ends(np.array(ends)).along(np.array([0, 2]), 37, name="my set")


def test_packed_numbers_are_read_at_any_byte():
    content = np.frombuffer(b"xyz" + np.arange(5, dtype="<i8").tobytes() + b"!", dtype=np.uint8)
    packed = Packed.within(content, 3, "<i8", 5)
    assert len(packed) == 5 and packed.at(np.array([4, 0, 2])).tolist() == [4, 0, 2]

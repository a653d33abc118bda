"""The order of samples: permutations that are bijections, mixtures whose counts are exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.order import LARGEST_BLOCK, Mixture, checked_weights, key_of, keys_at, largest_remainder, permute
from megalite.data.source import DataError


def whole(n: int, key: int) -> np.ndarray:
    return permute(np.arange(n), n, np.array([key], dtype=np.uint64))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_permutation_is_a_bijection_for_every_n(n, key):
    assert np.array_equal(np.sort(whole(n, key)), np.arange(n))


@settings(max_examples=40, deadline=None)
@given(st.integers(40, 61), st.integers(-3, 3), st.integers(0, 2**64 - 1), st.data())
def test_past_32_bits_no_two_indices_meet_and_none_leaves_the_range(bits, off, key, data):
    n = (1 << bits) + off
    indices = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=2, max_size=50)) | {0, n - 1}))
    out = permute(indices, n, np.array([key], dtype=np.uint64))
    assert len(set(out.tolist())) == len(indices) and out.min() >= 0 and out.max() < n
    assert out.max() > 1 << 31 or len(indices) < 5  # the range is used


def test_one_index_alone_is_the_same_as_among_others():
    n, keys = 777, keys_at(5, np.arange(777) % 3)
    together = permute(np.arange(n), n, keys)
    alone = [permute(np.array([i]), n, keys[i : i + 1])[0] for i in range(n)]
    assert together.tolist() == alone


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_every_ordered_pair_of_windows_comes_first_equally_often_over_keys(n):
    """A fair shuffle: over 40000 keys each of the n (n-1) pairs begins as many epochs, within 5 standard deviations."""
    keys = keys_at(key_of(0, "fair"), np.arange(40_000))
    first, second = (permute(np.full(len(keys), i), n, keys) for i in (0, 1))
    counts = np.bincount(first * n + second, minlength=n * n).reshape(n, n)
    assert (np.diag(counts) == 0).all()
    expected = len(keys) / (n * (n - 1))
    assert (np.abs(counts[~np.eye(n, dtype=bool)] - expected) < 5 * np.sqrt(expected)).all()


def test_neighbours_in_the_order_are_strangers_in_the_text():
    """Of a random permutation, successive values are n/3 apart on average (here within 5 standard deviations)."""
    n = 50_000
    steps = np.abs(np.diff(whole(n, key_of(1, "apart"))))
    assert abs(steps.mean() / n - 1 / 3) < 5 * np.sqrt(1 / 18 / n) * np.sqrt(2)


def test_seeds_epochs_and_purposes_have_unrelated_orders():
    n = 10_000
    keys = [key_of(0, "a"), key_of(1, "a"), key_of(0, "b"), *keys_at(key_of(0, "a"), np.arange(3)).tolist()]
    orders = [whole(n, key) for key in keys]
    for i, order in enumerate(orders):
        for other in orders[:i]:
            assert (order == other).sum() < 12  # two random permutations agree in one place on average


def test_the_order_is_pinned():
    """A run of an older version goes on in the same order: these values may never change."""
    key = key_of(0, "source", 0)
    assert key == 17093007087028097235
    assert whole(10, key).tolist() == [4, 9, 7, 6, 2, 3, 8, 5, 1, 0]
    assert permute(np.arange(2), 1 << 40, keys_at(key, np.arange(2))).tolist() == [825666286218, 134334104817]
    source, ordinal = Mixture([1, 2], seed=0).locate(np.array([2046, 2047, 2048]))
    assert (source.tolist(), ordinal.tolist()) == ([1, 0, 1], [1365, 681, 1366])


weights = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None)
@given(weights, st.integers(1, 5000))
def test_largest_remainder_sums_to_the_total_and_stays_within_one_of_each_share(values, total):
    counts = largest_remainder(values, total)
    assert counts.sum() == total
    assert (np.abs(counts - np.array(values) / sum(values) * total) < 1 + 1e-6).all()


@settings(max_examples=20, deadline=None)
@given(weights, st.integers(0, 2**40))
def test_every_block_has_the_same_count_of_each_source(values, block):
    mixture = Mixture(values, seed=3)
    source, _ = mixture.locate(np.arange(block * mixture.block, (block + 1) * mixture.block))
    assert np.bincount(source, minlength=len(values)).tolist() == largest_remainder(values, mixture.block).tolist()


@pytest.mark.parametrize("values", [[1.0], [3.0, 1.0], [0.2, 0.5, 0.3], [1.0, 2000.0]])
def test_each_source_is_read_in_its_own_order_without_gap_or_repeat(values):
    """The ordinal is the running count of the source's samples, as a loop that walks through them would count."""
    mixture = Mixture(values, seed=3)
    source, ordinal = mixture.locate(np.arange(3 * mixture.block))
    for place in range(len(values)):
        mine = ordinal[source == place]
        assert np.array_equal(mine, np.arange(len(mine)))


def test_blocks_are_shuffled_each_in_its_own_way():
    mixture = Mixture([1, 1], seed=0)
    source, _ = mixture.locate(np.arange(2 * mixture.block))
    first, second = source[: mixture.block], source[mixture.block :]
    for other in (second, np.sort(first)):
        assert abs((first == other).mean() - 0.5) < 0.1  # unrelated: half of the places agree by chance


def test_any_order_of_asking_gives_the_same_places():
    mixture = Mixture([2, 3, 5], seed=0)
    samples = np.random.default_rng(0).integers(0, 2**50, 200)
    together = mixture.locate(samples)
    for i, sample in enumerate(samples):
        source, ordinal = mixture.locate(np.array([sample]))
        assert (source[0], ordinal[0]) == (together.source[i], together.ordinal[i])


def test_a_rare_source_gets_a_larger_block_and_one_too_rare_is_refused():
    assert Mixture([1, 20_000], seed=0).counts.min() >= 1
    with pytest.raises(DataError, match=r"data\.weights.*65536"):
        Mixture([1, 4 * LARGEST_BLOCK], seed=0)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([1.0], ["1 values", "2 sources", "data.paths"]),
        ([1.0, 2.0, 3.0], ["3 values", "2 sources"]),
        ([1.0, -0.5], ["data.weights[1]=-0.5"]),
        ([float("nan"), 1.0], ["data.weights[0]=nan"]),
        ([float("inf"), 1.0], ["data.weights[0]=inf"]),
        ([0, 0], ["all 2 are 0"]),
    ],
)
def test_weights_that_make_no_sense_are_refused_with_the_numbers(values, words):
    with pytest.raises(DataError) as caught:
        checked_weights(values, sizes=[10, 30])
    for word in ["data.weights", *words]:
        assert word in str(caught.value)


def test_without_weights_sources_are_taken_by_size():
    assert checked_weights(None, sizes=[10, 30]) == [10, 30]

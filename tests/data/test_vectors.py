"""Random vectors: a pure function of (seed, sample), standard normal."""

from __future__ import annotations

import numpy as np
import pytest

from megalite.data.vectors import gaussian, targets

PINNED = [-0.026085157324795084, 0.058066476016484535, -0.5244322559736434]  # sample 0 of seed 0


def test_a_sample_is_the_same_alone_and_among_others_in_any_order():
    ids = np.array([7, 0, (1 << 62) + 3, 12])
    together = gaussian(3, ids, 33)
    assert together.shape == (4, 33) and together.dtype == np.float64
    for row, number in zip(together, ids, strict=True):
        assert np.array_equal(gaussian(3, np.array([number]), 33)[0], row)


def test_a_wider_vector_begins_with_the_narrower_one():
    assert np.array_equal(gaussian(0, np.arange(3), 64)[:, :31], gaussian(0, np.arange(3), 31))


def test_vectors_are_standard_normal_and_independent():
    """Moments of a million numbers, and correlations of 1000 pairs of rows, within 5 standard deviations."""
    x = gaussian(0, np.arange(1000), 1000)
    for power, moment, deviation in [(1, 0, 1), (2, 1, np.sqrt(2)), (3, 0, np.sqrt(15)), (4, 3, np.sqrt(96))]:
        assert abs((x**power).mean() - moment) < 5 * deviation / 1000
    for shifted in (np.roll(x, 1, axis=0), np.roll(x, 1, axis=1), gaussian(1, np.arange(1000), 1000)):
        assert abs((x * shifted).mean()) < 5 / 1000
    assert (np.abs(x) > 4).mean() == pytest.approx(6.3e-5, abs=5 * np.sqrt(6.3e-5) / 1000)  # the tails are there


def test_the_vectors_are_pinned():
    """A run of an older version goes on with the same data. Sine and logarithm may differ in the last digit."""
    assert gaussian(0, np.array([0]), 3)[0] == pytest.approx(PINNED, rel=1e-12)


def test_targets_are_the_positive_part_of_the_inputs_moved_on_by_one_place():
    x = gaussian(0, np.arange(5), 8)
    y = targets(x)
    assert np.array_equal(y[:, 1:], x[:, :-1].clip(min=0)) and np.array_equal(y[:, 0], x[:, -1].clip(min=0))


def test_guessing_zero_costs_one_half():
    """Half of a standard normal's square, within 5 standard deviations of the mean of a million: sqrt(5)/2 each."""
    y = targets(gaussian(0, np.arange(1000), 1000))
    assert abs((y**2).mean() - 0.5) < 5 * np.sqrt(1.25) / 1000

"""The order of samples: which window sample number i is, for any i, without a list.

Training reads the samples 0, 1, 2, ... of one endless sequence. Which source and which window each number stands
for is a pure function of (seed, number), so a run's whole place in its data is one integer, `samples_consumed`: no
shuffled index is built or saved, a resumed run cannot differ from a straight one, and every rank computes the same
without talking.

1. Numbers are taken in blocks. In each block every source has a fixed count (its weight times the block, by largest
   remainder), so proportions are exact over every block; which places in the block are whose is shuffled anew for
   each block.
2. The c-th place of a source in block b (both from 0) reads index b * count + c of that source. Each source is thus
   read in its own order 0, 1, 2, ...
3. Index i of a source with n windows is in epoch i div n, and is window P(i mod n), where P is a permutation of the
   n windows keyed by (seed, source, epoch): within an epoch each window is read exactly once.

`megalite.data.samples` strings several such sequences together, for data that changes during a run.

A permutation of n that can be evaluated at one point in constant memory is a Feistel cipher (Luby and Rackoff 1988)
with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megalite.data.errors import DataError

Int64s = npt.NDArray[np.int64]
Uint64s = npt.NDArray[np.uint64]

ROUNDS = 8
# Rounds times bits, at least: halves of one or two bits mix slowly, and eight rounds shuffle few windows unfairly.
ROUND_BITS = 72
SMALLEST_BLOCK = 1 << 10
LARGEST_BLOCK = 1 << 16
GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, odd: its multiples are spread evenly over 64 bits


def key_of(seed: int, *words: str | int) -> int:
    """A 64-bit key from a seed and what it is for: the words keep streams apart, the hash keeps near seeds apart."""
    return int.from_bytes(hashlib.blake2b(repr((int(seed), *words)).encode(), digest_size=8).digest(), "little")


def mix(words: Uint64s) -> Uint64s:
    """A bijection of 64-bit words; each input bit flips about half of the output bits. The finalizer of SplitMix64.

    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014. Arithmetic is modulo 2**64
    (arrays wrap silently).
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def keys_at(key: int, counters: Int64s) -> Uint64s:
    """One key for each counter (an epoch, a block), from the key of the whole stream. (count,) -> (count,)."""
    return mix(mix(counters.astype(np.uint64) * GOLDEN) ^ np.uint64(key))


def permute(indices: Int64s, n: int, keys: Uint64s) -> Int64s:
    """P(index) for each index, where P is the permutation of range(n) that belongs to its key.

    indices: (count,) int64, each in [0, n); keys: (count,) or (1,) uint64 -> (count,) int64. n from 1 to 2**62.
    Memory is a few arrays of `count`.

    A number of b bits (2**b >= n) is two halves; each round adds a keyed function of one half to the other, which
    can be undone whatever the function is, so the rounds permute the 2**b numbers. Whatever lands outside n goes
    through again until it is back inside: it follows the cycle that it is on, which began inside, and no two meet.
    b is the least possible, so that takes under two turns on average.
    """
    assert 1 <= n <= 1 << 62, n
    bits = max(1, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    rounds = max(ROUNDS, ROUND_BITS // bits)
    steps = np.arange(1, rounds + 1, dtype=np.uint64)[:, None] * GOLDEN
    round_keys = np.broadcast_to(mix(keys + steps), (rounds, len(indices)))

    def turn(words: Uint64s, keys_of_rounds: Uint64s) -> Uint64s:
        high, low = words >> low_bits, words & low_mask
        for r, key in enumerate(keys_of_rounds):
            if r % 2:
                low = low ^ (mix(high ^ key) & low_mask)
            else:
                high = high ^ (mix(low ^ key) & high_mask)
        return (high << low_bits) | low

    out = turn(indices.astype(np.uint64), round_keys)
    while (outside := out >= np.uint64(n)).any():
        out[outside] = turn(out[outside], round_keys[:, outside])
    return out.astype(np.int64)


def largest_remainder(weights: Sequence[float], total: int) -> Int64s:
    """Whole numbers that sum to `total`, each within one of its share; what is left goes to the largest fractions."""
    scaled = np.asarray(weights, dtype=np.float64) / max(weights)  # first, so that no sum overflows
    shares = scaled / scaled.sum() * total
    counts = np.floor(shares).astype(np.int64)
    # Most negative first. Stable, so that equal ones go in the order given on every rank.
    neediest = np.argsort(counts - shares, kind="stable")
    counts[neediest[: total - int(counts.sum())]] += 1
    return counts


class Placed(NamedTuple):
    """Where samples lie: source, and ordinal, how many samples of that source come before; (count,) int64 each."""

    source: Int64s
    ordinal: Int64s


class Mixture:
    """Rules 1 and 2 above: which source each sample comes from, and how many of that source came before it.

    weights: one a source, any positive scale. The block is the smallest power of two from 1024 up in which every
    source has a sample. Raises DataError if the largest block has no room for one of them.
    """

    def __init__(self, weights: Sequence[float], *, seed: int, key: str = "data.weights") -> None:
        self.block = SMALLEST_BLOCK
        while (counts := largest_remainder(weights, self.block)).min() == 0:
            if self.block == LARGEST_BLOCK:
                raise DataError(
                    f"{key}: a share of {min(weights) / sum(weights):.3g} gives a source none of "
                    f"{self.block} samples; give each {1 / self.block:.3g} of the sum at least, or 0 to leave it out "
                    f"(where {key} is null, shares are sizes: give weights, or join small files)"
                )
            self.block *= 2
        self.counts = counts
        self._key = key_of(seed, "mixture")

    def locate(self, samples: Int64s) -> Placed:
        """(count,) sample numbers, in any order -> where each lies. Costs one block for each block touched."""
        blocks, places = np.divmod(samples, self.block)
        source, ordinal = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            laid_out = self.lay_out(block)
            source[here], ordinal[here] = laid_out.source[places[here]], laid_out.ordinal[places[here]]
        return Placed(source, ordinal)

    def lay_out(self, block: int) -> Placed:
        """Where each sample of a block lies; (block,) each."""
        key = keys_at(self._key, np.array([block]))
        places = permute(np.arange(self.block, dtype=np.int64), self.block, key)
        sources = np.repeat(np.arange(len(self.counts)), self.counts)[places]
        by_source = np.argsort(sources, kind="stable")
        ranks = np.empty_like(places)
        ranks[by_source] = np.arange(self.block) - np.repeat(np.cumsum(self.counts) - self.counts, self.counts)
        return Placed(sources, block * self.counts[sources] + ranks)

    def before(self, sample: int) -> Int64s:
        """How many of the samples below this one each source has: (sources,) int64. Costs one block at most."""
        block, places = divmod(sample, self.block)
        counts = block * self.counts
        if places:
            counts = counts + np.bincount(self.lay_out(block).source[:places], minlength=len(counts))
        return counts


def checked_weights(weights: Sequence[float] | None, *, sizes: Sequence[int], key: str = "data.weights") -> list[float]:
    """The weight of each source: as given; for None its size, so that all text is read equally often, as one file.

    Raises DataError for a wrong number of weights, one that is negative or not a number, or none above zero.
    """
    if weights is None:
        return [float(size) for size in sizes]
    if len(weights) != len(sizes):
        raise DataError(
            f"{key} has {len(weights)} values for {len(sizes)} sources in {key.replace('weights', 'paths')}; "
            "give one a source"
        )
    for place, weight in enumerate(weights):
        if not 0 <= weight < float("inf"):
            raise DataError(f"{key}[{place}]={weight} is not a weight; give numbers from 0 up (any scale)")
    if not any(weights):
        raise DataError(
            f"{key}: all {len(weights)} are 0, so there is nothing to read; give one source a positive weight"
        )
    return [float(weight) for weight in weights]

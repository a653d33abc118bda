"""Endless random vectors and a map to learn from them: the data of the deep MLP that the subject is taught on.

Sample i is a function of (seed, i) alone, as the samples of text are: any rank draws any sample, in any order, and
resuming needs one integer.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def gaussian(seed: int, sample_ids: npt.NDArray[np.int64], width: int) -> npt.NDArray[np.float64]:
    """Independent standard normal numbers: (rows,) sample numbers from 0 up -> (rows, width) float64.

    Row i is the stream of the counter-based generator Philox (Salmon et al. 2011) under a key hashed from the seed,
    from the counter sample << 128 on: streams of different samples never meet. Its words become normal by Box and
    Muller (1958), which takes a fixed count of them, so component c is the same whatever the width is past c.
    """
    key = int.from_bytes(hashlib.blake2b(repr((int(seed), "vectors")).encode(), digest_size=16).digest(), "little")
    words = np.empty((len(sample_ids), width + width % 2), dtype=np.uint64)
    for row, sample in zip(words, sample_ids.tolist(), strict=True):
        row[:] = np.random.Philox(key=key, counter=sample << 128).random_raw(len(row))
    # 52 bits, not 53: with the half they fill a float64 exactly, so no value rounds to 1 and none is 0.
    uniform = ((words >> np.uint64(12)) + 0.5) * 2.0**-52
    radius, angle = np.sqrt(-2 * np.log(uniform[:, 0::2])), 2 * np.pi * uniform[:, 1::2]
    out = np.empty(words.shape, dtype=np.float64)
    out[:, 0::2], out[:, 1::2] = radius * np.cos(angle), radius * np.sin(angle)
    return out[:, :width]


def targets(inputs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """What the model should answer: the positive part of each component, moved on by one place; (rows, width) both.

    A model whose last layer ends in a nonlinearity has (almost) no negative outputs, so it can get there; guessing zero
    costs a mean squared error of 1/2. Every component counts, so a layout that loses or doubles a slice of the width
    shows in the loss.
    """
    return np.maximum(np.roll(inputs, 1, axis=-1), 0)

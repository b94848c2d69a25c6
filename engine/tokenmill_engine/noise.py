"""Counter-based noise: a uniform that depends on (seed, choice, position) and on nothing else.

A generator with a state would have to be saved, moved and rewound whenever a request is preempted,
handed over or resumed. Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as
easy as 1, 2, 3", SC 2011) computes the noise of any position directly, for a whole batch at once.

Each sampled token takes exactly one uniform, and the sampler inverts the cumulative distribution
in *vocabulary order*. Sorted by probability, two nearly tied tokens would change places with the
last bit of a logit, and with them whatever is drawn from the sorted list; in vocabulary order such
a bit moves an interval's edge by as little as it moved the logit. One uniform per token, rather
than one per vocabulary entry (Gumbel noise), also keeps its cost independent of the vocabulary.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

UInt32Array = npt.NDArray[np.uint32]

ROUNDS = 10
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint32(0x9E3779B9), np.uint32(0xBB67AE85))
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def uniform(
    seeds: npt.ArrayLike, positions: npt.ArrayLike, choices: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """One uniform in the open interval (0, 1) for each row.

    `seeds` are unsigned 64-bit keys, `positions` the index of the output token (0 for the first)
    and `choices` the index of the alternative continuation of one prompt; all have shape [N] or
    broadcast to it. The result has shape [N] and 52 random bits: with 53, adding the half that
    keeps zero out would round the largest value up to one.
    """
    key = _split(np.asarray(seeds, dtype=np.uint64))
    position = _split(np.asarray(positions).astype(np.uint64))
    choice = _split(np.asarray(choices).astype(np.uint64))
    counter = np.broadcast_arrays(*position, *choice)
    words = philox4x32((counter[0], counter[1], counter[2], counter[3]), key)
    bits = (words[0].astype(np.uint64) << np.uint64(20)) | (words[1] >> np.uint32(12))
    return (bits.astype(np.float64) + 0.5) * 2.0**-52


def philox4x32(
    counter: tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array],
    key: tuple[UInt32Array, UInt32Array],
) -> tuple[UInt32Array, UInt32Array, UInt32Array, UInt32Array]:
    """The ten-round bijection of Salmon et al., elementwise over arrays of 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    with np.errstate(over="ignore"):  # the key schedule wraps around by design
        for _ in range(ROUNDS):
            high0, low0 = _multiply(c0, _MULTIPLIERS[0])
            high1, low1 = _multiply(c2, _MULTIPLIERS[1])
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0, k1 = k0 + _KEY_STEPS[0], k1 + _KEY_STEPS[1]
    return c0, c1, c2, c3


def _multiply(words: UInt32Array, multiplier: np.uint64) -> tuple[UInt32Array, UInt32Array]:
    """High and low half of the 64-bit product."""
    product = words.astype(np.uint64) * multiplier
    return (product >> _HALF).astype(np.uint32), (product & _LOW).astype(np.uint32)


def _split(words: npt.NDArray[np.uint64]) -> tuple[UInt32Array, UInt32Array]:
    """Low and high 32 bits."""
    return (words & _LOW).astype(np.uint32), (words >> _HALF).astype(np.uint32)

"""Unnormalised probabilities as integers, bit for bit the same on every processor.

A library's `exp` differs in its last bit from one processor to the next. This one is a fixed
sequence of float32 products and sums, each rounded once as IEEE 754 demands. Numpy, the native
kernel (`kernels/sample.cpp`) and the Triton kernel (`kernels/triton_sample.py`) all follow it, so
the same logits give the same token wherever a request is continued.

The method is Cody and Waite's (Software Manual for the Elementary Functions, 1980): exp(z) is
2^n · P(r) with r = z - n · ln 2, and ln 2 in two parts. The coefficients of P are those of Cephes'
expf (S. L. Moshier). The result is right to 1.3 units of 2^-24.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]

SCALE_BITS = 40  # leaves 2**22 vocabulary entries of head room in 63 bits
LOWEST = -28.0  # exp(-28) * 2**40 is below 1
FLOOR = -29.0  # so is what takes the place of anything lower

LOG2_E = 1.44269504088896341
MAGIC = 12582912.0  # 1.5 * 2**23: adding it rounds to an integer
LN2_HIGH = 0.693359375  # its product with an exponent is exact
LN2_LOW = -2.12194440e-4
#: Of r^7 to r^2; those of r and 1 are 1.
COEFFICIENTS = (
    1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3,
    4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1,
)  # fmt: skip
EXPONENT_BIAS = 127


class Shares:
    """`trunc(exp(z) * 2**40)`, computed in memory that all calls share: fresh memory of this size
    costs more than the arithmetic."""

    def __init__(self, vocab: int) -> None:
        self._floats = [np.empty(vocab, np.float32) for _ in range(4)]
        self._shares = np.empty(vocab, np.int64)

    def __call__(self, scaled: FloatArray) -> IntArray:
        """For scaled logits [n] up to 0; valid until the next call."""
        p, r, shifted, spare = (floats[: len(scaled)] for floats in self._floats)
        np.maximum(scaled, np.float32(FLOOR), out=r)
        np.multiply(r, np.float32(LOG2_E), out=shifted)
        shifted += np.float32(MAGIC)
        n = np.subtract(shifted, np.float32(MAGIC), out=p)
        r -= np.multiply(n, np.float32(LN2_HIGH), out=spare)
        r -= np.multiply(n, np.float32(LN2_LOW), out=spare)
        np.multiply(r, np.float32(COEFFICIENTS[0]), out=p)
        for coefficient in COEFFICIENTS[1:-1]:
            p += np.float32(coefficient)
            p *= r
        p += np.float32(COEFFICIENTS[-1])
        p *= np.multiply(r, r, out=spare)
        p += r
        p += np.float32(1.0)
        power = shifted.view(np.int32)
        power <<= 23
        power += np.int32((EXPONENT_BIAS + SCALE_BITS) << 23)
        p *= shifted
        shares = self._shares[: len(scaled)]
        np.copyto(shares, p, casting="unsafe")
        return shares

"""Integer shares against exp in double precision."""

from __future__ import annotations

import numpy as np

from tokenmill_engine.shares import LOWEST, Shares


def test_shares_are_right_to_the_last_bits_of_float32() -> None:
    # Everywhere, and where the polynomial changes from one power of two to the next.
    edges = -np.log(2.0) * (np.arange(40) + 0.5)
    near = (edges[:, None] * (1 + np.linspace(-1e-5, 1e-5, 999))).ravel()
    anywhere = -28 * np.random.default_rng(1).random(200_000)
    scaled = np.concatenate([near, anywhere]).astype(np.float32)
    exact = np.exp(scaled.astype(np.float64)) * 2.0**40
    wrong = Shares(len(scaled))(scaled) - exact
    assert np.all(wrong <= exact * 1.3 * 2.0**-24)
    assert np.all(wrong >= -exact * 1.3 * 2.0**-24 - 1)  # rounded down to an integer
    assert abs(np.mean(wrong / exact, where=exact > 2.0**30)) < 2.0**-26  # without a drift


def test_the_ends_of_the_range() -> None:
    scaled = np.array([0.0, -0.0, LOWEST, -28.5, -29.5, -1e30, -np.inf], np.float32)
    assert Shares(10)(scaled).tolist() == [2**40, 2**40, 0, 0, 0, 0, 0]

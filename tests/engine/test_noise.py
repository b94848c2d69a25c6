from __future__ import annotations

import numpy as np
import pytest

from tokenmill_engine.noise import philox4x32, uniform

# Random123's published known answers for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[np.ndarray]:
    return [np.array([int(word, 16)], dtype=np.uint32) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    result = philox4x32(tuple(words(counter)), tuple(words(key)))
    assert " ".join(f"{int(word[0]):08x}" for word in result) == expected


def test_the_top_52_bits_become_the_uniform() -> None:
    counter, _key, expected = KNOWN_ANSWERS[0]
    first, second, *_ = (int(word, 16) for word in expected.split())
    assert counter.split() == ["00000000"] * 4  # seed, position and choice 0
    (value,) = uniform([0], [0], [0])
    assert value == (((first << 20) | (second >> 12)) + 0.5) / 2**52


def test_a_value_depends_on_its_own_row_only() -> None:
    seeds = [0, 7, 2**63 - 1, 2**64 - 1, 7]
    positions = [0, 3, 2**31 - 1, 1, 4]
    choices = [0, 0, 1, 2, 0]
    together = uniform(seeds, positions, choices)
    alone = [
        uniform([seed], [position], [choice])[0]
        for seed, position, choice in zip(seeds, positions, choices, strict=True)
    ]
    assert together.tolist() == alone
    assert len(set(alone)) == len(alone)


def test_neighbouring_seeds_positions_and_choices_are_unrelated() -> None:
    base = uniform(np.full(4096, 11), np.arange(4096), np.zeros(4096, dtype=int))
    for other in (
        uniform(np.full(4096, 12), np.arange(4096), np.zeros(4096, dtype=int)),
        uniform(np.full(4096, 11), np.arange(1, 4097), np.zeros(4096, dtype=int)),
        uniform(np.full(4096, 11), np.arange(4096), np.ones(4096, dtype=int)),
    ):
        # 5 standard deviations of a correlation of 4096 independent pairs
        assert abs(np.corrcoef(base, other)[0, 1]) < 5 / 64


@pytest.mark.parametrize("axis", ["position", "seed"])
def test_values_are_equidistributed(axis: str) -> None:
    count, bins = 1 << 16, 64
    ramp, zero = np.arange(count), np.zeros(count, dtype=int)
    values = uniform(zero, ramp, zero) if axis == "position" else uniform(ramp, zero, zero)
    assert values.min() > 0
    assert values.max() < 1
    found = np.bincount((values * bins).astype(int), minlength=bins)
    chi_square = ((found - count / bins) ** 2 / (count / bins)).sum()
    # 63 degrees of freedom: mean 63, standard deviation 11.2; both tails are suspicious
    assert 63 - 4 * 11.2 < chi_square < 63 + 4 * 11.2

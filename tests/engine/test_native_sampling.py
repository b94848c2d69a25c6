"""The native sampling kernel against numpy and `draw.py`."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support_sampling import make_request, random_logits
from tokenmill_engine.draw import NO_TOKEN
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.native_sampling import NativeSampling

#: Around the sizes of a vector, of a block of vectors and of a whole row of blocks.
VOCABS = [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 4099, 49_152, 50_001]


@pytest.fixture(scope="module")
def sampling() -> NativeSampling:
    try:
        return NativeSampling()
    except KernelUnavailable as why:
        pytest.skip(str(why))


def greedy(sampling: NativeSampling, logits: torch.Tensor) -> list[int]:
    return sampling(logits, [make_request(temperature=0.0)] * len(logits)).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_takes_the_lowest_id_among_ties(sampling: NativeSampling, vocab: int) -> None:
    logits = random_logits(40, vocab, seed=vocab).round()
    logits[3] = -7.5
    logits[4] *= -math.inf if vocab > 1 else 1
    logits[4].nan_to_num_(nan=-math.inf, posinf=-1.0)
    expected = logits.numpy().argmax(-1)
    usable = np.isfinite(logits.numpy().max(-1))
    assert greedy(sampling, logits) == np.where(usable, expected, NO_TOKEN).tolist()


@pytest.mark.parametrize("vocab", VOCABS)
def test_every_place_of_a_row_is_looked_at(sampling: NativeSampling, vocab: int) -> None:
    places = np.unique(np.linspace(0, vocab - 1, 200).astype(int)).tolist()
    logits = torch.full((len(places), vocab), -1.0)
    logits[range(len(places)), places] = 1.0
    assert greedy(sampling, logits) == places


@pytest.mark.parametrize("broken", [math.nan, -math.nan, math.inf])
def test_rows_that_cannot_be_used_are_marked_wherever_it_shows(
    sampling: NativeSampling, broken: float
) -> None:
    for vocab in (5, 17, 1030, 2100):
        logits = random_logits(vocab, vocab, seed=1)
        expected = logits.argmax(-1)
        spoilt = range(0, vocab, 2)
        logits[spoilt, spoilt] = broken
        expected[::2] = NO_TOKEN
        assert greedy(sampling, logits) == expected.tolist()
    masked = torch.full((2, 300), -math.inf)
    masked[1, 299] = -3e38
    assert greedy(sampling, masked) == [NO_TOKEN, 299]


def test_rows_may_be_parts_of_a_larger_buffer_and_out_of_order_in_memory(
    sampling: NativeSampling,
) -> None:
    wide = random_logits(6, 500, seed=2)
    part = wide[1:5, 30:470]
    assert greedy(sampling, part) == part.argmax(-1).tolist()
    turned = random_logits(70, 9, seed=3).T
    assert greedy(sampling, turned) == turned.argmax(-1).tolist()
    assert greedy(sampling, wide[:0]) == []


def test_other_types_are_refused(sampling: NativeSampling) -> None:
    with pytest.raises(ValueError, match="float32"):
        greedy(sampling, torch.zeros(1, 4, dtype=torch.bfloat16))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_nothing(sampling: NativeSampling, num_threads: int) -> None:
    logits = random_logits(33, 40_000, seed=4)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert greedy(sampling, logits) == logits.argmax(-1).tolist()
    finally:
        torch.set_num_threads(before)

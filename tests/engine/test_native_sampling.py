"""The native sampling kernel against numpy and `draw.py`, whose every bit it must give."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support_sampling import make_request, random_logits
from tokenmill_engine import native_sampling
from tokenmill_engine.draw import NO_TOKEN, DrawSettings, draw
from tokenmill_engine.kernels import build, prebuilt
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.native_sampling import NativeSampling
from tokenmill_engine.noise import uniform
from tokenmill_engine.packed_settings import POSITION, SEED, pack_settings
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import choose_by_torch
from tokenmill_engine.shares import Shares

#: Around the sizes of a vector, of a block of vectors and of a whole row of blocks.
VOCABS = [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 1000, 1023, 1024, 1025, 4099, 49_152, 50_001]

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.3, "top_p": 0.9999},
    {"temperature": 100.0, "top_p": 0.5},
    {"temperature": 1e-300},
    {"temperature": 1e-6, "min_p": 0.5},
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 1024, "temperature": 2.0},
    {"top_k": 3000, "temperature": 2.0},
    {"top_k": 2**31 - 1},
    {"top_k": 40, "top_p": 0.9, "temperature": 1.4},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-20, "top_k": 2000, "temperature": 3.0},
    {"min_p": 0.02, "top_k": 20, "top_p": 0.7},
    {"top_p": 1e-9},
]


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


def test_another_device_is_refused(sampling: NativeSampling) -> None:
    with pytest.raises(ValueError, match="not on meta"):
        greedy(sampling, torch.zeros(1, 4, device="meta"))


def drawing_requests(count: int) -> list[Request]:
    return [
        make_request(
            output=[5] * (number % 3), seed=2**62 + number, **SETTINGS[number % len(SETTINGS)]
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", VOCABS)
def test_shorter_types_give_the_tokens_of_the_same_numbers_in_float32(
    sampling: NativeSampling, vocab: int, dtype: torch.dtype
) -> None:
    requests = drawing_requests(2 * len(SETTINGS))
    wide = random_logits(len(requests), vocab + 3, seed=vocab).to(dtype)
    logits = wide[:, 1:-2]
    logits[5, -1] = math.nan
    assert sampling(logits, requests).tolist() == choose_by_torch(logits, requests).tolist()
    expected = logits.float().argmax(-1)
    expected[5] = NO_TOKEN
    assert greedy(sampling, logits) == expected.tolist()


@pytest.mark.parametrize("scale", [0.0, 0.6, 3.0, 12.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_tokens_are_those_of_the_torch_path(
    sampling: NativeSampling, vocab: int, scale: float
) -> None:
    requests = drawing_requests(2 * len(SETTINGS))
    logits = random_logits(len(requests), vocab, seed=vocab, scale=scale)
    logits[::2] = (logits[::2] * 4).round() / 4  # ties, as logits of 16 bits have them
    logits[::3, vocab // 2 :] -= 15  # a few likely ones
    logits[1::5, 1::2] = -math.inf
    logits[7, -1] = math.nan
    assert sampling(logits, requests).tolist() == choose_by_torch(logits, requests).tolist()


def test_logits_of_any_size_are_scaled_alike(sampling: NativeSampling) -> None:
    """Large ones, whose differences are rounded, and so small ones that the peak is none."""
    requests = drawing_requests(len(SETTINGS))
    for offset, scale in ((3e7, 5.0), (-2e4, 0.01), (0.0, 1e-30), (3e38, 1e36)):
        logits = random_logits(len(requests), 3000, seed=5, scale=scale) + offset
        assert sampling(logits, requests).tolist() == choose_by_torch(logits, requests).tolist()


def test_the_noise_is_that_of_any_seed_and_position(sampling: NativeSampling) -> None:
    rng = np.random.default_rng(6)
    seeds = [0, 1, 2**32 - 1, 2**63 - 1, *rng.integers(0, 2**63, 400).tolist()]
    positions = [0, 2**32 - 1, 2**32, 2**40 + 3, *rng.integers(0, 2**34, 400).tolist()]
    settings = pack_settings([make_request()] * len(seeds))
    settings[SEED], settings[POSITION] = seeds, positions
    logits = torch.zeros(len(seeds), 50_000)  # each token a fifty-thousandth of the noise
    expected = draw(
        logits, [DrawSettings()] * len(seeds), uniform(seeds, positions, [0] * len(seeds))
    )
    found = sampling(logits, [], torch.from_numpy(settings))
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("count", [1, 7, 8, 16, 17, 500_003])
def test_shares_are_those_of_numpy(sampling: NativeSampling, count: int) -> None:
    scaled = -np.random.default_rng(7).exponential(9.0, count).astype(np.float32)
    scaled[:: max(2, count // 5)] = -0.0
    scaled[count // 2 :: 1000] = -np.inf
    assert np.array_equal(sampling.shares(scaled), Shares(count)(scaled))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_change_nothing(sampling: NativeSampling, num_threads: int) -> None:
    requests = drawing_requests(33)
    logits = random_logits(33, 40_000, seed=4)
    alone = [sampling(logits[i : i + 1], [request]).item() for i, request in enumerate(requests)]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        assert greedy(sampling, logits) == logits.argmax(-1).tolist()
        assert sampling(logits, requests).tolist() == alone
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("level", sorted(prebuilt.LEVELS))
def test_other_processors_choose_the_same(
    level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By vectors of another width, as in an image whose kernels were compiled ahead."""
    if level not in prebuilt.levels_of(build._processor()):
        pytest.skip(f"this processor cannot run {level}")
    try:
        library = build.compile_for("sample", level, tmp_path)
    except KernelUnavailable as why:
        pytest.skip(str(why))
    monkeypatch.setattr(native_sampling, "load_kernel", lambda _name: ctypes.CDLL(str(library)))
    other = NativeSampling()
    scaled = -np.random.default_rng(8).exponential(9.0, 100_003).astype(np.float32)
    assert np.array_equal(other.shares(scaled), Shares(len(scaled))(scaled))
    for vocab in VOCABS:
        for scale in (0.6, 12.0):
            test_tokens_are_those_of_the_torch_path(other, vocab, scale)
        test_every_place_of_a_row_is_looked_at(other, vocab)

"""The sampling kernel in Triton's interpreter, against `draw.py` and the numbers of `noise.py`.

The interpreter takes about a quarter of a second for a row with filters, hence few and small rows.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from support_sampling import NO_RULES, make_request, make_sampler, random_logits, schedule
from tokenmill_engine.device_sampling import choose_on_device, sample_on_device
from tokenmill_engine.draw import NO_TOKEN, DrawSettings, argmax, draw
from tokenmill_engine.kernels import triton_sample
from tokenmill_engine.noise import uniform
from tokenmill_engine.packed_settings import NUM_SETTINGS, pack_settings
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler

VOCAB = 150
SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 12},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 2.0, "top_k": 90, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.2, "top_p": 0.95},
    {"temperature": 1.4, "min_p": 0.02, "top_k": 30, "top_p": 0.7},
    {"temperature": 1.0, "top_k": VOCAB + 7},
    {"temperature": 3.0, "top_p": 1e-6},
    {"temperature": 1e-300},
]


def make_requests(count: int) -> list[Request]:
    return [
        make_request(
            f"r{number}", output=[5] * (number % 4), seed=2**62 + number, **SETTINGS[number % 9]
        )
        for number in range(count)
    ]


def sample(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    return sample_on_device(logits, torch.from_numpy(pack_settings(requests))).tolist()


def drawn(logits: torch.Tensor, requests: list[Request]) -> list[int]:
    """By the sampler of the CPU."""
    positions = [request.num_output_tokens for request in requests]
    uniforms = uniform([request.seed for request in requests], positions, [0] * len(requests))
    params = [request.params for request in requests]
    settings = [DrawSettings(p.temperature, p.min_p, p.top_k, p.top_p) for p in params]
    return draw(logits, settings, uniforms).tolist()


@pytest.mark.parametrize("count", [9, pytest.param(90, marks=pytest.mark.slow)])
def test_the_tokens_are_those_of_the_cpu(count: int) -> None:
    requests = make_requests(count)
    logits = random_logits(count, VOCAB, seed=count)
    logits[::2] = logits[::2].round()  # ties, as logits of 16 bits have them
    logits[4, 20:] = -math.inf
    assert sample(logits, requests) == drawn(logits, requests)


def test_a_row_does_not_depend_on_its_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, logits = make_requests(3), random_logits(3, VOCAB, seed=2)
    together = sample(logits, requests)
    assert [sample(logits[i : i + 1], [requests[i]])[0] for i in range(3)] == together
    # Nor on how many logits a program takes at once.
    monkeypatch.setattr("tokenmill_engine.device_sampling._BLOCK", 64)
    assert sample(logits, requests) == together


def test_greedy_takes_the_lowest_id_among_ties() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[0, [9, 30, 140]] = 4.0
    requests = [make_request(str(i), temperature=0.0) for i in range(2)]
    assert sample(logits, requests) == [9, 0] == argmax(logits).tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_unusable_rows_are_marked(temperature: float) -> None:
    logits = torch.zeros(5, VOCAB)
    logits[1], logits[2, 149], logits[3, 3] = -math.inf, math.nan, math.inf
    requests = [make_request(str(i), temperature=temperature, top_k=3) for i in range(5)]
    marked = [token == NO_TOKEN for token in sample(logits, requests)]
    assert marked == [False, True, True, True, False]


def test_logits_and_settings_may_be_parts_of_larger_buffers() -> None:
    """As in a captured step, whose buffers have room for more requests than there are."""
    requests, logits = make_requests(3), random_logits(3, VOCAB, seed=3)
    wide, room = torch.full((5, VOCAB + 11), 99.0), torch.zeros(NUM_SETTINGS, 8, dtype=torch.int64)
    wide[:3, :VOCAB] = logits
    room[:, :3] = torch.from_numpy(pack_settings(requests))
    found = sample_on_device(wide[:3, :VOCAB], room[:, :3]).tolist()
    assert found == drawn(logits, requests)


def test_a_sampler_that_chooses_on_the_device_gives_the_same_tokens() -> None:
    """Behind penalties, bans and logprobs, with and without settings that are there already."""
    requests = [
        make_request("plain", temperature=0.0),
        make_request("bias", output=[4], temperature=0.9, logit_bias={7: 3.0}, logprobs=2),
        make_request("penalty", output=[4, 4], temperature=1.1, frequency_penalty=1.5, top_k=20),
    ]
    logits, scheduled = random_logits(3, VOCAB, seed=4), schedule(*requests)
    wanted = make_sampler()(logits, scheduled)
    sampler = Sampler(rules=NO_RULES, encode_bad_words=lambda words: (), choose=choose_on_device)
    settings = torch.from_numpy(pack_settings(requests))
    assert sampler(logits, scheduled) == wanted
    assert sampler(logits, scheduled, settings=settings) == wanted


def test_no_rows_give_no_tokens() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


@triton.jit
def uniforms_of(seeds, positions, uniforms):
    row = tl.program_id(0)
    value = triton_sample._uniform(tl.load(seeds + row), tl.load(positions + row))
    tl.store(uniforms + row, value)


def test_the_noise_is_that_of_the_cpu_bit_for_bit() -> None:
    seeds = np.array([0, 1, 7, 2**40 + 3, 2**63 - 1, 2**64 - 1], np.uint64)
    positions = np.array([0, 1, 2**31 - 1, 2**31, 2**33 + 5, 17], np.int64)
    found = torch.empty(len(seeds), dtype=torch.float64)
    arguments = (torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(positions), found)
    uniforms_of[(len(seeds),)](*arguments)
    assert found.tolist() == uniform(seeds, positions, np.zeros(len(seeds), int)).tolist()

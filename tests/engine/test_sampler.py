from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from support_sampling import (
    EOS,
    make_request,
    make_sampler,
    random_logits,
    sample,
    token_ids,
)
from tokenmill_engine.errors import SamplingFailed
from tokenmill_engine.generation_defaults import GenerationRules

VOCAB = 97


def test_greedy_takes_the_lowest_of_the_most_likely_tokens() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, [40, 7]] = 5.0
    logits[1, VOCAB - 1] = 0.5
    requests = [make_request(f"r{index}", temperature=0) for index in range(3)]
    assert token_ids(sample(make_sampler(), logits, *requests)) == [7, VOCAB - 1, 0]


def test_greedy_reports_no_logprobs_unless_asked() -> None:
    logits = random_logits(2, VOCAB, seed=1)
    plain, asking = make_request("a", temperature=0), make_request("b", temperature=0, logprobs=2)
    first, second = sample(make_sampler(), logits, plain, asking)
    assert first.logprobs is None
    assert second.logprobs is not None


def test_a_seeded_draw_repeats_and_a_new_position_or_seed_changes_it() -> None:
    logits = torch.zeros(1, 5000)

    def drawn(seed: int, output: tuple[int, ...]) -> int:
        request = make_request(seed=seed, output=output)
        return sample(make_sampler(), logits, request)[0].token_id

    assert drawn(1, (9,)) == drawn(1, (8,))  # the position counts, not what stands there
    assert len({drawn(1, (9,)), drawn(2, (9,)), drawn(1, (9, 9))}) == 3


def mixed_params(rng: np.random.Generator) -> dict[str, Any]:
    """Random parameters of every kind, each switched on in about a third of the requests."""
    offered: dict[str, Any] = {
        "top_k": int(rng.integers(1, 40)),
        "top_p": float(rng.uniform(0.05, 0.99)),
        "min_p": float(rng.uniform(0, 0.3)),
        "repetition_penalty": float(rng.uniform(0.7, 1.5)),
        "frequency_penalty": float(rng.uniform(-1, 1)),
        "presence_penalty": float(rng.uniform(-1, 1)),
        "logit_bias": {int(token): 2.5 for token in rng.integers(0, VOCAB, 4)},
        "allowed_token_ids": rng.integers(0, VOCAB, 30).tolist(),
        "bad_words": ["any"],
        "min_tokens": int(rng.integers(0, 6)),
        "logprobs": int(rng.integers(0, 5)),
    }
    chosen = {name: value for name, value in offered.items() if rng.random() < 0.35}
    return {"temperature": float(rng.choice([0.0, 0.3, 1.0, 1.7])), **chosen}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("ties", [False, True])
def test_a_row_does_not_depend_on_its_batch_mates_slot_or_order(seed: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    bad_words = [(11,), (12, 13), (14, 15, 16)]
    logits = random_logits(24, VOCAB, seed=seed)
    if ties:
        logits = (logits * 2).round() / 2
    settings = [
        dict(
            prompt=rng.integers(0, VOCAB, 12).tolist(),
            output=[*rng.integers(0, VOCAB, int(rng.integers(0, 6))).tolist(), *[14, 15]],
            seed=int(rng.integers(0, 2**62)),
            **mixed_params(rng),
        )
        for _ in range(24)
    ]
    requests = [make_request(f"r{index}", **item) for index, item in enumerate(settings)]
    together = sample(make_sampler(bad_words=bad_words), logits, *requests)
    alone = [
        sample(make_sampler(bad_words=bad_words), logits[index : index + 1], request)[0]
        for index, request in enumerate(requests)
    ]
    assert list(together) == alone
    order = rng.permutation(24)
    shuffled = sample(
        make_sampler(bad_words=bad_words),
        logits[torch.from_numpy(order)],
        *[requests[index] for index in order],
    )
    assert list(shuffled) == [alone[index] for index in order]


def test_the_logits_are_not_written_to() -> None:
    logits = random_logits(2, VOCAB, seed=3)
    before = logits.clone()
    requests = [
        make_request("a", repetition_penalty=1.3, top_p=0.5, output=[1, 1]),
        make_request("b", temperature=0, allowed_token_ids=[1], logprobs=3),
    ]
    sample(make_sampler(), logits, *requests)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["nan", "one nan", "all masked", "infinite"])
def test_a_row_without_a_token_fails_alone(temperature: float, broken: str) -> None:
    logits = random_logits(3, VOCAB, seed=4)
    expected_mate = logits[2].argmax().item()
    match broken:
        case "nan":
            logits[1] = math.nan
        case "one nan":
            logits[1, 5] = math.nan
        case "all masked":
            logits[1] = -math.inf
        case "infinite":
            logits[1, 5] = math.inf
    requests = [
        make_request("a", temperature=0.7, top_p=0.9, top_k=5),
        make_request("b", temperature=temperature, top_p=0.9, logprobs=1),
        make_request("c", temperature=0),
    ]
    first, failed, last = sample(make_sampler(), logits, *requests)
    assert (first.error, last.error) == (None, None)
    assert last.token_id == expected_mate
    assert first == sample(make_sampler(), logits[:1], requests[0])[0]
    assert isinstance(failed.error, SamplingFailed)
    assert failed.error.request_id == "b"
    assert (failed.token_id, failed.logprobs) == (-1, None)


def test_a_request_whose_masks_leave_nothing_fails() -> None:
    request = make_request(temperature=0, allowed_token_ids=[EOS], min_tokens=2)
    (failed,) = sample(make_sampler(), random_logits(1, VOCAB, seed=5), request)
    assert isinstance(failed.error, SamplingFailed)


def test_stop_tokens_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 50]] = torch.tensor([9.0, 8.0])
    sampler = make_sampler()
    request = make_request(temperature=0, min_tokens=2, stop_token_ids=[50], ignore_eos=True)
    chosen = []
    for _ in range(3):
        (token,) = sample(sampler, logits, request)
        chosen.append(token.token_id)
        request.token_ids.append(token.token_id)
    assert chosen == [0, 0, EOS]


def test_suppressed_tokens_never_come_and_begin_suppressed_ones_not_first() -> None:
    rules = GenerationRules(suppress_token_ids=(8,), begin_suppress_token_ids=(9,))
    logits = torch.zeros(1, VOCAB)
    logits[0, [8, 9, 10]] = torch.tensor([9.0, 8.0, 7.0])
    sampler = make_sampler(rules)
    assert sample(sampler, logits, make_request(temperature=0))[0].token_id == 10
    assert sample(sampler, logits, make_request("r1", output=[4], temperature=0))[0].token_id == 9


def test_state_follows_the_token_ids_through_preemption_restart_and_reuse_of_an_id() -> None:
    """Step by step, from scratch at the end, and with an id taken over by another request."""
    logits = random_logits(1, VOCAB, seed=6, scale=1.0)
    params: dict[str, Any] = {"repetition_penalty": 1.4, "frequency_penalty": 0.5, "seed": 3}
    sampler, chosen = make_sampler(), []
    request = make_request(**params)
    for _ in range(12):
        chosen.append(sample(sampler, logits, request)[0].token_id)
        request.token_ids.append(chosen[-1])
    for length in (4, 11):
        resumed = make_request(output=chosen[:length], **params)
        assert sample(make_sampler(), logits, resumed)[0].token_id == chosen[length]
        assert sample(sampler, logits, resumed)[0].token_id == chosen[length]


def test_forgetting_drops_the_state_and_tolerates_unknown_ids() -> None:
    sampler = make_sampler()
    sample(sampler, random_logits(1, VOCAB, seed=7), make_request("known"))
    assert len(sampler) == 1
    sampler.forget("known")
    sampler.forget("never seen")
    assert len(sampler) == 0

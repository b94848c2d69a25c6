"""Penalties and masks against transformers' own processors, and against arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation import logits_process as oracle

from support_sampling import EOS, make_request, random_logits
from tokenmill_engine.draw import DrawSettings, draw
from tokenmill_engine.generation_defaults import GenerationRules
from tokenmill_engine.logits_processing import RequestAdjustments, adjust_logits
from tokenmill_engine.request import Request

VOCAB = 83
NO_RULES = GenerationRules()


def adjust(
    logits: torch.Tensor,
    *requests: Request,
    rules: GenerationRules = NO_RULES,
    bad_words: list[tuple[int, ...]] | None = None,
) -> torch.Tensor:
    return adjust_logits(
        logits, [RequestAdjustments(request, rules, bad_words or ()) for request in requests]
    )


def random_request(rng: np.random.Generator, name: str, **params: Any) -> Request:
    prompt = rng.integers(0, VOCAB, int(rng.integers(1, 90))).tolist()
    return make_request(name, prompt, rng.integers(0, VOCAB, 9).tolist(), **params)


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.2, 3.0])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(5, VOCAB, seed=1)
    requests = [random_request(rng, f"r{i}", repetition_penalty=penalty) for i in range(5)]
    processor = oracle.RepetitionPenaltyLogitsProcessor(penalty=penalty)
    expected = torch.cat(
        [
            processor(torch.tensor([request.token_ids]), logits[index : index + 1].clone())
            for index, request in enumerate(requests)
        ]
    )
    assert torch.equal(adjust(logits, *requests), expected)


def test_frequency_and_presence_penalties_follow_openai_over_the_output_only() -> None:
    request = make_request(
        prompt=[1, 2, 2], output=[5, 5, 5, 2], frequency_penalty=0.5, presence_penalty=0.25
    )
    change = adjust(torch.zeros(1, VOCAB), request)[0]
    expected = torch.zeros(VOCAB)
    expected[5] = -(3 * 0.5 + 0.25)
    expected[2] = -(1 * 0.5 + 0.25)
    assert torch.equal(change, expected)


def test_logit_bias_equals_transformers_sequence_bias() -> None:
    bias = {4: 3.5, 70: -100.0, 0: 0.125}
    logits = random_logits(2, VOCAB, seed=2)
    request, bystander = make_request("a", logit_bias=bias), make_request("b")
    processor = oracle.SequenceBiasLogitsProcessor(
        {(token,): value for token, value in bias.items()}
    )
    expected = logits.clone()
    expected[:1] = processor(torch.tensor([request.token_ids]), logits[:1].clone())
    assert torch.equal(adjust(logits, request, bystander), expected)


@pytest.mark.parametrize("ending", [[], [7], [7, 8], [6, 8], [9, 7, 8]])
def test_bad_words_equal_transformers(ending: list[int]) -> None:
    words = [(5,), (7, 11), (7, 8, 12), (9, 7, 8, 13)]
    logits = random_logits(1, VOCAB, seed=3)
    request = make_request(prompt=[3, 9], output=ending, bad_words=["x"])
    processor = oracle.NoBadWordsLogitsProcessor([list(word) for word in words], eos_token_id=EOS)
    expected = processor(torch.tensor([request.token_ids]), logits.clone())
    assert torch.equal(adjust(logits, request, bad_words=words), expected)


def test_min_tokens_equals_transformers_min_new_tokens() -> None:
    logits = random_logits(1, VOCAB, seed=4)
    for length in range(4):
        request = make_request(output=[1] * length, min_tokens=2)
        processor = oracle.MinNewTokensLengthLogitsProcessor(
            request.num_prompt_tokens, 2, [EOS], device="cpu"
        )
        expected = processor(torch.tensor([request.token_ids]), logits.clone())
        assert torch.equal(adjust(logits, request), expected)


def test_suppression_equals_transformers() -> None:
    logits = random_logits(2, VOCAB, seed=5)
    rules = GenerationRules(suppress_token_ids=(1, 40), begin_suppress_token_ids=(2, 3))
    first, later = make_request("a"), make_request("b", output=[9])
    expected = logits.clone()
    for index, request in enumerate((first, later)):
        ids, row = torch.tensor([request.token_ids]), expected[index : index + 1]
        row = oracle.SuppressTokensLogitsProcessor([1, 40])(ids, row)
        begin = oracle.SuppressTokensAtBeginLogitsProcessor([2, 3], request.num_prompt_tokens)
        expected[index : index + 1] = begin(ids, row)
    assert torch.equal(adjust(logits, first, later, rules=rules), expected)


def test_allowed_token_ids_leave_only_themselves() -> None:
    logits = random_logits(2, VOCAB, seed=6)
    request, bystander = make_request("a", allowed_token_ids=[3, 3, 50]), make_request("b")
    expected = torch.full((VOCAB,), -math.inf)
    expected[[3, 50]] = logits[0, [3, 50]]
    adjusted = adjust(logits, request, bystander)
    assert torch.equal(adjusted[0], expected)
    assert torch.equal(adjusted[1], logits[1])


def test_bias_comes_before_the_repetition_penalty_and_never_lifts_a_ban() -> None:
    request = make_request(
        prompt=[4], logit_bias={4: 6.0, EOS: 100.0}, repetition_penalty=2.0, min_tokens=1
    )
    adjusted = adjust(torch.full((1, VOCAB), -2.0), request)[0]
    assert adjusted[4] == (-2.0 + 6.0) / 2.0
    assert adjusted[EOS] == -math.inf


def test_untouched_logits_are_passed_through_without_a_copy() -> None:
    logits = random_logits(2, VOCAB, seed=7)
    assert adjust(logits, make_request("a"), make_request("b", temperature=0)) is logits


WARPERS: list[tuple[DrawSettings, Callable[[], Any]]] = [
    (DrawSettings(top_k=9), lambda: oracle.TopKLogitsWarper(9)),
    (DrawSettings(top_p=0.83), lambda: oracle.TopPLogitsWarper(0.83)),
    (DrawSettings(min_p=0.07), lambda: oracle.MinPLogitsWarper(0.07)),
    (DrawSettings(temperature=0.6), lambda: oracle.TemperatureLogitsWarper(0.6)),
]


@pytest.mark.parametrize(("settings", "make_warper"), WARPERS)
def test_each_filter_keeps_the_same_tokens_as_transformers(
    settings: DrawSettings, make_warper: Callable[[], Any]
) -> None:
    """Every token that transformers keeps is drawn for some uniform, in the same proportion."""
    logits = random_logits(8, VOCAB, seed=8)
    probabilities = make_warper()(None, logits.clone()).softmax(-1).double()
    for index in range(len(logits)):
        edges = probabilities[index].cumsum(-1)
        tokens = torch.nonzero(probabilities[index] > 1e-5)[:, 0]
        middles = (edges - probabilities[index] / 2)[tokens].numpy()
        drawn = draw(logits[index].expand(len(tokens), -1), [settings] * len(tokens), middles)
        assert drawn.tolist() == tokens.tolist()

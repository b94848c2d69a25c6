from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support_sampling import make_request, make_sampler, random_logits, sample
from tokenmill_engine.logprobs import gather_logprobs

VOCAB = 61


def test_values_and_ranks_equal_numpy_in_double_precision() -> None:
    logits = random_logits(6, VOCAB, seed=1)
    sampled = torch.tensor([0, 10, 20, 30, 40, 50])
    found = gather_logprobs(logits, sampled, [0, 1, 2, 5, 20, 3])
    table = logits.double().numpy()
    expected = table - np.log(np.exp(table).sum(-1, keepdims=True))
    for row, (token_id, count) in enumerate(
        zip(sampled.tolist(), [0, 1, 2, 5, 20, 3], strict=True)
    ):
        order = np.argsort(-expected[row])
        ids = [token_id, *order[:count]]
        assert list(found[row].token_ids) == ids
        assert found[row].logprobs == pytest.approx(expected[row, ids], abs=1e-5)
        ranks = [int(np.flatnonzero(order == token)[0]) + 1 for token in ids]
        assert list(found[row].ranks) == ranks


def test_among_equal_logits_the_lower_id_ranks_first() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [3, 9]] = -0.0
    logits[0, [50, 7]] = 1.0
    logits[0, 11] = -2.0
    (found,) = gather_logprobs(logits, torch.tensor([11]), [4])
    assert found.token_ids == (11, 7, 50, 0, 1)
    assert found.ranks == (VOCAB, 1, 2, 3, 4)


def test_more_alternatives_than_tokens_are_cut_to_the_vocabulary() -> None:
    (found,) = gather_logprobs(torch.tensor([[0.0, 1.0, -1.0]]), torch.tensor([1]), [20])
    assert found.token_ids == (1, 1, 0, 2)
    assert math.fsum(math.exp(value) for value in found.logprobs[1:]) == pytest.approx(1)


def test_they_come_from_the_raw_logits_whatever_changes_the_choice() -> None:
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 4.0
    biased = make_request("a", temperature=0, logit_bias={5: -100.0, 8: 50.0}, logprobs=1)
    first, _ = sample(make_sampler(), logits, biased, make_request("b"))
    assert first.token_id == 8
    assert first.logprobs is not None
    total = math.log(math.exp(4) + VOCAB - 1)
    assert first.logprobs.token_ids == (8, 5)
    assert first.logprobs.logprobs == pytest.approx((0 - total, 4 - total), abs=1e-6)
    assert first.logprobs.ranks == (9, 1)  # eight tokens of the same logit have a lower id or 5

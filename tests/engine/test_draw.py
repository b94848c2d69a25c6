"""Drawn frequencies against probabilities that numpy computes on its own, by chi-square."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support_sampling import random_logits
from tokenmill_engine.draw import NO_TOKEN, DrawSettings, argmax, draw
from tokenmill_engine.noise import uniform

VOCAB = 50
DRAWS = 8_000


CASES = [
    DrawSettings(),
    DrawSettings(temperature=0.4),
    DrawSettings(temperature=2.5),
    DrawSettings(top_k=1),
    DrawSettings(top_k=7),
    DrawSettings(top_k=VOCAB + 9),
    DrawSettings(top_p=0.8),
    DrawSettings(top_p=1e-6),
    DrawSettings(min_p=0.1),
    DrawSettings(min_p=1.0),
    DrawSettings(temperature=1.4, min_p=0.05, top_k=12, top_p=0.7),
    DrawSettings(temperature=3.0, top_k=40, top_p=0.6),  # the nucleus is much smaller than k
]


def expected_probabilities(logits: np.ndarray, case: DrawSettings) -> np.ndarray:
    """Straight from the definitions, in double precision, for logits without ties."""
    exponents = np.exp((logits - logits.max()).astype(np.float64) / case.temperature)
    probabilities = exponents / exponents.sum()
    probabilities[probabilities < case.min_p * probabilities.max()] = 0
    order = np.argsort(-probabilities)
    if case.top_k:
        probabilities[order[case.top_k :]] = 0
    probabilities /= probabilities.sum()
    before = np.cumsum(probabilities[order]) - probabilities[order]
    probabilities[order[before >= case.top_p]] = 0
    return probabilities / probabilities.sum()


def draw_many(logits: torch.Tensor, case: DrawSettings, count: int = DRAWS) -> np.ndarray:
    uniforms = uniform(np.full(count, 5), np.arange(count), np.zeros(count, dtype=int))
    return draw(logits.expand(count, -1), [case] * count, uniforms).numpy()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_frequencies_match_the_definition(case: DrawSettings) -> None:
    logits = random_logits(1, VOCAB, seed=12, scale=1.5)
    probabilities = expected_probabilities(logits[0].numpy(), case)
    found = np.bincount(draw_many(logits, case), minlength=VOCAB)
    assert found[probabilities == 0].sum() == 0
    expected = probabilities * DRAWS
    likely = expected >= 5  # the usual condition of the test; the rest is pooled into one cell
    cells = [*(found[likely] - expected[likely]) ** 2 / expected[likely]]
    if (rest := expected[~likely].sum()) >= 5:
        cells.append((found[~likely].sum() - rest) ** 2 / rest)
    freedom = len(cells) - 1
    assert sum(cells) <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_uniform_is_inverted_in_vocabulary_order(seed: int) -> None:
    logits = random_logits(1, VOCAB, seed=seed)
    for case in CASES:
        edges = np.cumsum(expected_probabilities(logits[0].numpy(), case))
        # The middle of every interval, so that the last bits of a float do not matter.
        middles = (edges + np.concatenate([[0], edges[:-1]])) / 2
        tokens = np.flatnonzero(np.diff(edges, prepend=0) > 1e-5)
        drawn = draw(logits.expand(len(tokens), -1), [case] * len(tokens), middles[tokens])
        assert drawn.tolist() == tokens.tolist()


@pytest.mark.parametrize("u", [1e-16, 1 - 1e-16])
def test_the_ends_of_the_unit_interval_stay_within_the_kept_tokens(u: float) -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [3, 4, VOCAB - 2]] = torch.tensor([0.0, 1.0, 2.0])
    drawn = draw(logits, [DrawSettings()], np.array([u]))
    assert drawn.item() == (3 if u < 0.5 else VOCAB - 2)


@pytest.mark.parametrize(
    "case", [DrawSettings(top_k=2), DrawSettings(top_p=0.3), DrawSettings(top_k=2, top_p=0.3)]
)
def test_ties_with_the_last_kept_token_are_kept(case: DrawSettings) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [10, 20, 30]] = torch.tensor([5.0, 4.0, 4.0])
    kept = set(draw_many(logits, case, 2000).tolist())
    # top_p 0.3 is reached by token 10 alone; top-k 2 cannot tell 20 from 30
    assert kept == ({10} if case.top_p < 1 else {10, 20, 30})


def test_a_nucleus_of_ties_at_the_kth_value_keeps_them_all() -> None:
    logits = torch.full((1, VOCAB), -4.0)
    logits[0, 5:45] = 1.0
    kept = set(draw_many(logits, DrawSettings(top_k=3, top_p=0.5), 4000).tolist())
    assert kept == set(range(5, 45))


def test_a_tiny_temperature_is_greedy_without_overflow() -> None:
    logits = random_logits(1, VOCAB, seed=13, scale=50)
    drawn = draw_many(logits, DrawSettings(temperature=1e-300), 50)
    assert set(drawn.tolist()) == {logits.argmax().item()}


def test_a_nearly_tied_pair_changing_places_does_not_change_the_draw() -> None:
    """What vocabulary order is for: the last bit of a logit moves no other token's interval."""
    logits = random_logits(1, VOCAB, seed=14)
    logits[0, 7] = logits[0, 31] = logits.max() + 1
    other = logits.clone()
    other[0, 31] = torch.nextafter(other[0, 31], torch.tensor(math.inf))
    first, second = draw_many(logits, DrawSettings()), draw_many(other, DrawSettings())
    assert (first != second).sum() <= 1  # an edge may fall between two uniforms


def test_filters_of_one_row_do_not_touch_another() -> None:
    logits = random_logits(1, VOCAB, seed=15).expand(len(CASES), -1).contiguous()
    uniforms = np.full(len(CASES), 0.61)
    together = draw(logits, CASES, uniforms).tolist()
    alone = [draw(logits[:1], [case], uniforms[:1]).item() for case in CASES]
    assert together == alone


def test_unusable_rows_are_marked() -> None:
    logits = torch.zeros(4, VOCAB)
    logits[1], logits[2, 3], logits[3, 3] = -math.inf, math.nan, math.inf
    settings = [DrawSettings(top_k=3, top_p=0.5, min_p=0.1)] * 4
    drawn = draw(logits, settings, np.full(4, 0.5))
    assert (drawn == NO_TOKEN).tolist() == [False, True, True, True]
    assert (argmax(logits) == NO_TOKEN).tolist() == [False, True, True, True]

"""The Triton kernels, run by Triton's interpreter, against attention by definition in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_paged import CHOICES, TOLERANCES, CaseRun, pairs_of, random_case

NUM_CASES = 240
NUM_FAST = 8


def seeds() -> list[object]:
    """A few in `make test`, all in `make test-all`."""
    return [
        pytest.param(seed, marks=() if seed < NUM_FAST else pytest.mark.slow)
        for seed in range(NUM_CASES)
    ]


@pytest.mark.parametrize("seed", seeds())
def test_equals_attention_by_definition(seed: int) -> None:
    run = CaseRun(random_case(seed))
    everyone = list(range(len(run.lengths)))
    rows, layer, meta = run.step(everyone)

    output = run.backend().write_and_attend(*rows, layer, meta, run.rule)

    error = (output.double() - run.expected()).abs().max()
    assert error <= TOLERANCES[run.case.dtype], run.case  # NaN fails as well


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(0, NUM_CASES, 5))
def test_a_sequence_alone_in_other_blocks_has_the_same_bits(seed: int) -> None:
    run = CaseRun(random_case(seed))
    everyone = list(range(len(run.lengths)))
    rows, layer, meta = run.step(everyone)
    together = run.backend().write_and_attend(*rows, layer, meta, run.rule)

    for i in everyone:
        rows, layer, alone = run.step([i], seed=1)
        output = run.backend().write_and_attend(*rows, layer, alone, run.rule)
        assert torch.equal(output, together[meta.cu_rows[i] : meta.cu_rows[i + 1]])


def test_the_cases_combine_every_two_choices() -> None:
    met = set().union(*(pairs_of(random_case(seed)) for seed in range(NUM_CASES)))
    names = list(CHOICES)
    wanted = {
        (one, a, other, b)
        for i, one in enumerate(names)
        for other in names[i + 1 :]
        for a, b in product(CHOICES[one], CHOICES[other])
        if not ({one, other} == {"window", "chunk"} and a is not None and b is not None)
    }
    assert wanted <= met

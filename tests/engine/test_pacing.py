"""The size of prompt chunks under a target time, against a machine of known speed."""

from __future__ import annotations

import pytest

from tokenmill_engine.pacing import LEAST_TOKENS, ChunkPacer


def run(pacer: ChunkPacer, *, base_s: float, row_s: float, steps: int = 60) -> list[float]:
    """Times of mixed steps, a prompt always waiting."""
    times = []
    for _ in range(steps):
        chunk = pacer.chunk_tokens or 0
        times.append(base_s + row_s * chunk)
        pacer.observe(num_decodes=8, num_chunk_tokens=chunk, seconds=times[-1])
    return times


@pytest.mark.parametrize("row_s", [0.0005, 0.002, 0.01])
@pytest.mark.parametrize("base_s", [0.01, 0.05])
def test_steps_settle_at_the_target(base_s: float, row_s: float) -> None:
    pacer = ChunkPacer(500, 2048)
    times = run(pacer, base_s=base_s, row_s=row_s)
    ideal = min(max((0.5 - base_s) / row_s, LEAST_TOKENS), 2048)
    assert pacer.chunk_tokens == pytest.approx(ideal, rel=0.05)
    assert times[-1] == pytest.approx(base_s + row_s * ideal, rel=0.05)


def test_it_follows_a_machine_that_becomes_faster_or_slower() -> None:
    pacer = ChunkPacer(100, 2048)
    run(pacer, base_s=0.01, row_s=0.001)
    assert pacer.chunk_tokens == pytest.approx(90, rel=0.05)
    run(pacer, base_s=0.01, row_s=0.0001)
    assert pacer.chunk_tokens == pytest.approx(900, rel=0.05)
    run(pacer, base_s=0.01, row_s=0.001)
    assert pacer.chunk_tokens == pytest.approx(90, rel=0.05)


def test_prompts_never_starve() -> None:
    pacer = ChunkPacer(50, 2048)
    run(pacer, base_s=0.2, row_s=0.001)
    assert pacer.chunk_tokens == LEAST_TOKENS


def test_one_slow_step_at_most_halves_the_allowance() -> None:
    pacer = ChunkPacer(100, 1000)
    pacer.observe(num_decodes=1, num_chunk_tokens=1000, seconds=60)
    assert pacer.chunk_tokens == 500
    pacer.observe(num_decodes=1, num_chunk_tokens=3, seconds=60)
    assert pacer.chunk_tokens == 250


def test_steps_that_say_nothing_change_nothing() -> None:
    pacer = ChunkPacer(100, 1000)
    pacer.observe(num_decodes=0, num_chunk_tokens=1000, seconds=9)  # nobody was kept waiting
    pacer.observe(num_decodes=5, num_chunk_tokens=0, seconds=9)  # not a prompt's fault
    pacer.observe(num_decodes=5, num_chunk_tokens=10, seconds=0.01)  # a short prompt
    assert pacer.chunk_tokens == 1000


def test_without_a_target_there_is_no_limit() -> None:
    pacer = ChunkPacer(None, 1000)
    pacer.observe(num_decodes=5, num_chunk_tokens=1000, seconds=9)
    assert pacer.chunk_tokens is None

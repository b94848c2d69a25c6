"""The arithmetic of the benchmark of gaps, over a model of a machine."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tokenmill_engine.pacing import ChunkPacer

REPOSITORY = Path(__file__).resolve().parents[2]
STEP_S, PROMPT_TOKEN_S = 0.05, 0.002


class ModelOfAMachine:
    """50 ms for a step and 2 ms for each prompt token in it; the real pacer sizes the chunks."""

    def __init__(self, target_ms: float | None) -> None:
        self.now_s = 0.0
        self.pacer = ChunkPacer(target_ms, 2048)
        self.missing_prompt: dict[str, int] = {}
        self.max_tokens: dict[str, int] = {}

    def add_request(self, name: str, prompt: list[int], params: Any) -> None:
        self.missing_prompt[name] = len(prompt)
        self.max_tokens[name] = params.max_tokens

    def abort_request(self, name: str) -> None:
        del self.missing_prompt[name], self.max_tokens[name]

    def step(self) -> list[Any]:
        decoding = [name for name, missing in self.missing_prompt.items() if not missing]
        limit = self.pacer.chunk_tokens if decoding else None
        budget = (2048 if limit is None else limit) - len(decoding)
        chunk = 0
        for name, missing in self.missing_prompt.items():
            taken = min(missing, budget - chunk)
            self.missing_prompt[name] -= taken
            chunk += taken
        seconds = STEP_S + PROMPT_TOKEN_S * chunk
        self.now_s += seconds
        self.pacer.observe(num_decodes=len(decoding), num_chunk_tokens=chunk, seconds=seconds)
        done = [name for name, missing in self.missing_prompt.items() if not missing]
        for name in done:
            if self.max_tokens[name] == 1:
                del self.missing_prompt[name], self.max_tokens[name]
        return [SimpleNamespace(request_id=name, new_token_ids=(7,)) for name in done]


def figures(monkeypatch: pytest.MonkeyPatch, target_ms: float | None) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import itl

    machine = ModelOfAMachine(target_ms)
    monkeypatch.setattr(itl.time, "perf_counter", lambda: machine.now_s)
    load = itl.Load(streams=4, long_prompts=3, long_tokens=1000, interval_s=3.0)
    itl.Run(machine, load).measure()  # the pacer learns the machine
    measured = itl.Run(machine, load).measure()
    assert not machine.missing_prompt  # nothing is left running
    return measured


def test_without_a_target_a_long_prompt_is_one_long_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = figures(monkeypatch, None)
    assert measured["itl_p50_ms"] == pytest.approx(50)
    assert measured["itl_p99_ms"] == pytest.approx(2050)
    assert measured["long_ttft_p50_s"] == pytest.approx(2.05, abs=0.05)


def test_the_target_is_held_once_the_pacer_knows_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = figures(monkeypatch, 200.0)
    without = figures(monkeypatch, None)
    assert measured["itl_p99_ms"] < without["itl_p99_ms"] / 3
    assert measured["itl_max_ms"] < 300
    # Prompts pay for it with a later first token.
    assert measured["long_ttft_p50_s"] > without["long_ttft_p50_s"]

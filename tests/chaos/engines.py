"""Engines for workers that are to be disturbed: slow, disagreeing, deadly."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from support_worker import FakeEngine
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_worker.engine_port import Engine, EngineFactory
from tokenmill_worker.model_engine import model_engine_factory
from tokenmill_worker.settings import Settings

#: A prompt that begins so kills the process that admits it.
POISON = "poison"

Kind = Literal["fake", "disagreeing", "model"]


class DisagreeingEngine(FakeEngine):
    """Its continuation depends on the process: what two GPUs say about a near tie, all the time."""

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, **rest: Any
    ) -> None:
        seed = (params.seed or 0) ^ os.getpid()
        super().add_request(request_id, prompt_token_ids, replace(params, seed=seed), **rest)


class DeadlyEngine:
    """Any engine, but the process dies like by the kernel's hand when it admits POISON."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._poison = engine.tokenizer.encode(POISON)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def add_request(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, **rest: Any
    ) -> None:
        if list(prompt_token_ids[: len(self._poison)]) == self._poison:
            os.kill(os.getpid(), 9)
        self._engine.add_request(request_id, prompt_token_ids, params, **rest)


def engine_factory(settings: Settings, kind: Kind, step_s: float) -> EngineFactory:
    def build(on_phase: Callable[[str], None]) -> Engine:
        on_phase("building")
        if kind == "model":
            return DeadlyEngine(model_engine_factory(settings)(on_phase))  # type: ignore[return-value]
        engine = DisagreeingEngine if kind == "disagreeing" else FakeEngine
        fake = engine(step_s=step_s, max_num_seqs=settings.max_num_seqs)
        return DeadlyEngine(fake)  # type: ignore[return-value]

    return build

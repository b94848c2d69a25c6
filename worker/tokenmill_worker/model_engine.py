"""The real engine, built on the engine thread from a worker's settings."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from .engine_port import Engine, EngineFactory
from .model_store import prepare_model
from .settings import Settings


def model_engine_factory(settings: Settings) -> EngineFactory:
    """A factory for the engine that `settings` describe; it raises what loading raises."""

    def build(on_phase: Callable[[str], None]) -> Engine:
        folder = prepare_model(settings.model, on_phase)
        # libgomp reads it when torch is loaded. Its threads spin at every barrier, and a worker
        # shares its cores with its own event loop, with Redis and perhaps with clients.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        on_phase("importing torch")
        # Not at the top: a wrong option or model must be reported without waiting for torch.
        from tokenmill_engine.llm_engine import LLMEngine

        config = replace(settings.engine_config(), model=str(folder))
        return LLMEngine.load(config, on_phase, text_later=True)

    return build

"""The real engine, built on the engine thread from a worker's settings."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tokenmill_engine.kernels.build import build_ahead

from .engine_port import Engine, EngineFactory
from .model_store import prepare_model
from .settings import Settings


def model_engine_factory(settings: Settings) -> EngineFactory:
    """A factory for the engine that `settings` describe; it raises what loading raises."""

    def build(on_phase: Callable[[str], None]) -> Engine:
        folder = prepare_model(settings.model, on_phase)
        if settings.kernels != "torch" and settings.device != "cuda":
            build_ahead()
        # libgomp reads it when torch is loaded. Its threads spin at every barrier, and a worker
        # shares its cores with its own event loop, with Redis and perhaps with clients.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        on_phase("importing torch")
        with _nothing_collected():
            # Not at the top: a wrong option or model must be reported without waiting for torch.
            from tokenmill_engine.llm_engine import LLMEngine

        config = replace(settings.engine_config(), model=str(folder))
        return LLMEngine.load(config, on_phase, text_later=True)

    return build


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Imports make a million objects that stay and few that don't.

    The garbage collector would go through them again and again: a fifth of the time to import
    torch and transformers. Afterwards they are left out of its rounds for good, which makes those
    shorter while requests are served, too.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()

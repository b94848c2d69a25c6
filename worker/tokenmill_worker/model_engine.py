"""The real engine, built on the engine thread from a worker's settings."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

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
        threading.Thread(target=_link_torch, name="torch library", daemon=True).start()
        with _nothing_collected():
            # Not at the top: a wrong option or model must be reported without waiting for torch.
            # transformers first: it begins without torch, whose library is linked meanwhile.
            import transformers  # noqa: F401

            from tokenmill_engine.llm_engine import LLMEngine

        config = replace(settings.engine_config(), model=str(folder))
        return LLMEngine.load(config, on_phase, text_later=True)

    return build


def _link_torch() -> None:
    """Loads torch's large library, for which `import torch` would hold Python up: 0.2 s of a core.

    Not with CUDA beside it: torch may have to find CUDA's libraries first.
    """
    torch = find_spec("torch")
    folder = Path(torch.origin).with_name("lib") if torch and torch.origin else None
    if folder is not None and not (folder / "libtorch_cuda.so").exists():
        with suppress(OSError):  # another system or torch: its own import does everything
            ctypes.CDLL(str(folder / "libtorch_cpu.so"))


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

"""How long vLLM's OpenAI server takes to be ready. Runs in vLLM's own environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from .contestant import Options, main
from .measure import Job
from .peer_vllm_server import ready_server
from .startup import startup_jobs


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    yield startup_jobs(lambda environment: ready_server(options, environment))


if __name__ == "__main__":
    main("vLLM's OpenAI server, from its start to ready", start)

"""vLLM's OpenAI server in another process, 64 streams read by this one.

Runs in vLLM's own environment (see `environments`), which has aiohttp.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import aiohttp

from .contestant import Options, main, progress
from .measure import Figures, Job, StreamClock, stream_figures
from .processes import answers, free_port, running, wait_until
from .workload import Request, mixed

START_TIMEOUT_S = 600.0
ENVIRONMENT = {
    **os.environ,
    "VLLM_CPU_KVCACHE_SPACE": os.environ.get("VLLM_CPU_KVCACHE_SPACE", "2"),
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    with ready_server(options) as url:
        asyncio.run(_stream_all(url, mixed(4)))
        yield {"stream64": lambda: asyncio.run(_stream_all(url, mixed(64)))}


@contextmanager
def ready_server(options: Options, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """The URL of a server that has said it is healthy. `environment` is added to this process's."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = _command(options, port)
    with running(command, environment={**ENVIRONMENT, **(environment or {})}) as server:
        progress("vllm server: starting")
        wait_until(
            lambda: answers(f"{url}/health"),
            server,
            timeout_s=START_TIMEOUT_S,
            what="vLLM's server",
        )
        yield url


def _command(options: Options, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", options.model, "--served-model-name", "m", "--dtype", options.dtype),
        *("--max-model-len", str(options.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--no-enable-prefix-caching", "--disable-uvicorn-access-log"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]


async def _stream_all(url: str, requests: Sequence[Request]) -> Figures:
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(600)
    ) as session:
        start = time.perf_counter()
        clocks = await asyncio.gather(
            *(_stream(session, f"{url}/v1/completions", request, start) for request in requests)
        )
        return stream_figures(requests, clocks, time.perf_counter() - start)


async def _stream(
    session: aiohttp.ClientSession, url: str, request: Request, sent: float
) -> StreamClock:
    clock = StreamClock(sent)
    body = {
        "model": "m",
        "prompt": request.prompt_token_ids,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post(url, json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[len(b"data: ") :])
            if chunk["choices"]:
                clock.arrived()
            else:  # the last chunk carries the usage instead
                clock.num_tokens = chunk["usage"]["completion_tokens"]
    return clock


if __name__ == "__main__":
    main("vLLM's OpenAI server, 64 streams", start)

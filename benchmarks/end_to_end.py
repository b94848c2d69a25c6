"""The whole way: an embedded Redis-compatible server, a worker process, and this one client."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from tokenmill import AsyncClient
from tokenmill.embedded import EmbeddedServer
from tokenmill.protocol import TokenEvent

from .contestant import Options, main, progress
from .measure import Figures, Job, StreamClock, stream_figures
from .processes import answers, free_port, running, wait_until
from .workload import Request, mixed

START_TIMEOUT_S = 300.0


@contextmanager
def start(options: Options) -> Iterator[Mapping[str, Job]]:
    with EmbeddedServer() as server, ready_worker(options, server.url):
        asyncio.run(_stream_all(server.url, mixed(4)))
        yield {"stream64": lambda: asyncio.run(_stream_all(server.url, mixed(64)))}


@contextmanager
def ready_worker(
    options: Options, redis_url: str, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A worker process that has said it is ready. `environment` is added to this process's own."""
    port = free_port()
    # The worker refuses variables that are not its options, and options would change the figures.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
    command = _command(options, redis_url, port)
    with running(command, environment={**inherited, **(environment or {})}) as worker:
        progress("worker: starting")
        wait_until(
            lambda: answers(f"http://127.0.0.1:{port}/readyz"),
            worker,
            timeout_s=START_TIMEOUT_S,
            what="the worker",
        )
        yield


def _command(options: Options, redis_url: str, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "tokenmill_worker"),
        *("--redis-url", redis_url, "--model", options.model, "--dtype", options.dtype),
        *("--max-model-len", str(options.max_model_len)),
        *("--max-num-seqs", str(options.max_num_seqs)),
        *("--no-enable-prefix-caching", "--metrics-port", str(port)),
    ]


async def _stream_all(redis_url: str, requests: Sequence[Request]) -> Figures:
    async with AsyncClient(redis_url) as client:
        start = time.perf_counter()
        clocks = await asyncio.gather(*(_stream(client, request, start) for request in requests))
        return stream_figures(requests, clocks, time.perf_counter() - start)


async def _stream(client: AsyncClient, request: Request, sent: float) -> StreamClock:
    clock = StreamClock(sent)
    async with client.stream(
        request.prompt_token_ids, max_tokens=request.max_tokens, temperature=0, ignore_eos=True
    ) as stream:
        async for event in stream.events():
            if isinstance(event, TokenEvent):
                clock.arrived()
                clock.num_tokens += len(event.token_ids)
        await stream.completion()  # raises if it did not end well
    return clock


if __name__ == "__main__":
    main("Tokenmill through the queue, 64 streams", start)

"""How long a token is on its way: from the engine that sampled it to the client's loop body.

A real Redis, a worker process whose engine is made up, and this client process. The text of each
token is the time at which it was sampled, on the clock that all processes of a machine share.
Milliseconds at the 50th and 99th percentile and the largest, for `--streams` requests at once whose
tokens come every `--step-ms`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from tokenmill import AsyncClient
from tokenmill.embedded import EmbeddedServer
from tokenmill.protocol import TokenEvent
from tokenmill_engine.outputs import RequestOutput

from . import environments, machine
from .hot_path_engine import NoEngine, serve
from .processes import running, wait_until

STREAMS = (1, 8, 64)
STEP_MS = 20.0
TOKENS = 250
WARM_UP_TOKENS = 20  # of each stream, not counted
SERVE = "serve"


class StampingEngine(NoEngine):
    """The text of a token is when it was made, in ns of the monotonic clock."""

    def step(self) -> list[RequestOutput]:
        outputs = super().step()
        stamp = f"{time.monotonic_ns()} "
        return [replace(output, text=stamp) for output in outputs]


def main() -> None:
    arguments = _parse()
    print(f"{'streams':>8}{'p50 ms':>10}{'p99 ms':>10}{'max ms':>10}")
    rows = []
    for streams in arguments.streams:
        delays_ms = sorted(measure(streams, arguments.tokens, arguments.step_ms / 1000))
        figures = {
            "p50_ms": delays_ms[len(delays_ms) // 2],
            "p99_ms": delays_ms[len(delays_ms) * 99 // 100],
            "max_ms": delays_ms[-1],
        }
        rows.append({"streams": streams, "step_ms": arguments.step_ms, **figures})
        print(f"{streams:>8}" + "".join(f"{value:10.2f}" for value in figures.values()))
    if arguments.output:
        record = {"machine": machine.describe(environments.REPOSITORY), "rows": rows}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ms from sampling a token to its client")
    parser.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=STEP_MS)
    parser.add_argument("--output", type=Path, help="JSON")
    return parser.parse_args()


def measure(streams: int, tokens: int, step_s: float) -> list[float]:
    """The delay of each token, in ms."""
    with EmbeddedServer() as server, tempfile.TemporaryDirectory(prefix="latency-") as folder:
        ready = Path(folder) / "ready"
        command = [
            *(sys.executable, "-m", "benchmarks.latency", SERVE),
            *(server.url, str(streams), str(ready), str(step_s)),
        ]
        # The worker refuses variables that are almost its options.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
        with running(command, environment=environment) as worker:
            wait_until(ready.exists, worker, timeout_s=60, what="the worker")
            return asyncio.run(_listen(server.url, streams, tokens + WARM_UP_TOKENS))


async def _listen(url: str, streams: int, tokens: int) -> list[float]:
    async with AsyncClient(url) as client:
        gc.freeze()  # what was imported is no part of the measurement
        found = await asyncio.gather(*(_stream(client, tokens) for _ in range(streams)))
    return [delay_ms for delays_ms in found for delay_ms in delays_ms]


async def _stream(client: AsyncClient, tokens: int) -> list[float]:
    delays_ms = []
    async with client.stream("x", max_tokens=tokens) as stream:
        async for event in stream.events():
            if isinstance(event, TokenEvent):
                now_ns = time.monotonic_ns()
                # Events may have been joined on their way: each token counts.
                delays_ms += [(now_ns - int(stamp)) / 1e6 for stamp in event.text.split()]
    return delays_ms[WARM_UP_TOKENS:]


def _serve() -> None:
    url, slots, ready, step_s = sys.argv[2:]
    serve(url, int(slots), Path(ready), lambda: StampingEngine(float(step_s)))


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVE]:
        _serve()
    else:
        main()

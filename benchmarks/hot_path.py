"""What one token costs between the engine and Redis: CPU time of the server and of the worker.

No model: outputs are made up, so that what is left is the way of a token through the dispatcher,
the publisher and the script `append`. Four figures for each number of requests per step:

    redis_us    the server's CPU time per token, one `append` call per step and one listener
    publish_us  the publisher's Python: events, their JSON, the call, its reply
    event_us    the same with the dispatcher before it: all of the event loop's work per token
    worker_us   a whole worker process, engine thread included, less what the made-up engine takes

`publish_us` and `event_us` are those of the median step. With `--prototype DIR` the prototype is
measured in turn with ours: its script, and its Python, which packed ready-made events into calls
and had no events to make, no metrics and no deliveries.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from tokenmill._redis import aconnect, connect
from tokenmill.calls import QueueCalls
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.scripts import run
from tokenmill_engine.outputs import EngineStats
from tokenmill_worker.delivery import Deliveries, Delivery
from tokenmill_worker.dispatcher import Dispatcher
from tokenmill_worker.engine_thread import Stepped
from tokenmill_worker.metrics import Metrics
from tokenmill_worker.packing import pack_in_c
from tokenmill_worker.publisher import Publisher
from tokenmill_worker.retrying import Retrier

from . import environments, machine
from .hot_path_engine import engine_us, output_of
from .hot_path_prototype import Prototype
from .hot_path_server import leases_of, redis_us
from .processes import running, wait_until

#: Requests per step.
BATCHES = (8, 64, 256)
TOKENS_PER_FIGURE = 60_000
FIGURES = ("redis_us", "publish_us", "event_us", "worker_us")
PROTOTYPE_FIGURES = ("prototype_redis_us", "prototype_publish_us")
RESULTS = environments.REPOSITORY / "benchmarks" / "results"
BUSY_WARNING_CORES = 0.15
#: Of the whole worker. Its engine takes STEP_S for a step, so that each token is an event.
WORKER_STEPS = 500


def main() -> None:
    arguments = _parse()
    busy_cores = machine.busy_cores()
    if busy_cores > BUSY_WARNING_CORES:
        print(
            f"warning: other processes keep {busy_cores:.2f} cores busy, which makes every figure "
            "larger",
            file=sys.stderr,
        )
    prototype = Prototype(arguments.prototype) if arguments.prototype else None
    names = (*FIGURES, *(PROTOTYPE_FIGURES if prototype else ()))
    rows = []
    for batch in arguments.batches:
        runs = [_measure(batch, arguments.tokens, prototype) for _ in range(arguments.rounds)]
        figures = {name: statistics.median(each[name] for each in runs) for name in names}
        rows.append({"requests": batch, **figures})
        print(_line(rows[-1]), file=sys.stderr)
    record = {
        "machine": machine.describe(environments.REPOSITORY),
        "busy_cores": round(busy_cores, 2),
        "rounds": arguments.rounds,
        "rows": rows,
    }
    print(_table(rows))
    path = arguments.output or RESULTS / "hot_path.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="µs of CPU per token, without a model")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--tokens", type=int, default=TOKENS_PER_FIGURE)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prototype", type=Path, help="folder of the prototype's scripts")
    parser.add_argument("--output", type=Path, help="JSON; default: benchmarks/results/")
    return parser.parse_args()


def _measure(batch: int, tokens: int, prototype: Prototype | None) -> dict[str, float]:
    steps = max(1, tokens // batch)
    figures = {}
    with EmbeddedServer() as server:
        figures["redis_us"] = redis_us(server, batch, steps)
    with EmbeddedServer() as server:
        figures["publish_us"] = asyncio.run(_loop_us(server, batch, steps, dispatch=False))
    if prototype is not None:
        with EmbeddedServer() as server:
            figures["prototype_redis_us"] = prototype.redis_us(server, batch, steps)
        with EmbeddedServer() as server:
            spent_us = asyncio.run(prototype.publish_us(server, batch, steps))
            figures["prototype_publish_us"] = statistics.median(spent_us)
    with EmbeddedServer() as server:
        figures["event_us"] = asyncio.run(_loop_us(server, batch, steps, dispatch=True))
    with EmbeddedServer() as server:
        figures["worker_us"] = _worker_us(server, batch)
    return figures


def _table(rows: list[dict[str, float]]) -> str:
    names = [name for name in rows[0] if name != "requests"]
    header = f"{'requests per step':>17}" + "".join(f"{name:>22}" for name in names)
    return "\n".join([header, *map(_line, rows)])


def _line(row: dict[str, float]) -> str:
    figures = "".join(f"{value:22.2f}" for name, value in row.items() if name != "requests")
    return f"{row['requests']:>17.0f}{figures}"


# ---- the event loop ----


class _NoEngine:
    """What the dispatcher needs of an engine thread: steps come out of a queue."""

    def __init__(self) -> None:
        self.events: asyncio.Queue[Any] = asyncio.Queue()

    def abort(self, attempt_id: str) -> None:
        """There is nothing to stop."""


async def _loop_us(server: EmbeddedServer, batch: int, steps: int, *, dispatch: bool) -> float:
    """CPU time of the loop's thread per token. Each step is written before the next comes."""
    calls = QueueCalls(Keyspace())
    with connect(server.url) as client:
        leases = leases_of(client, batch)
    redis = pack_in_c(aconnect(server.url))
    deliveries, metrics, engine = Deliveries(), Metrics("none", 4096), _NoEngine()
    dispatcher = Dispatcher(deliveries, engine, metrics)  # type: ignore[arg-type]  # a stand-in
    publisher = Publisher(
        redis,
        calls,
        deliveries,
        retrier=Retrier(metrics),
        metrics=metrics,
        text_of=str,
        on_lost=lambda delivery: None,
        on_end=lambda delivery, ending: None,
    )
    held = [Delivery(lease) for lease in leases]
    for delivery in held:
        deliveries.add(delivery)
    loops = [asyncio.create_task(publisher.run()), asyncio.create_task(dispatcher.run())]
    spent_s = []
    for number in range(1, steps + 1):
        outputs = [output_of(delivery.attempt_id, number) for delivery in held]
        if not dispatch:
            for delivery, output in zip(held, outputs, strict=True):
                delivery.pending.append(output)
        began_s = time.thread_time()
        if dispatch:
            engine.events.put_nowait(Stepped(outputs, EngineStats(steps_total=number)))
        else:
            deliveries.unwritten.set()
        while held[-1].acked < number:
            await publisher.settle()
        spent_s.append(time.thread_time() - began_s)
    for loop in loops:
        loop.cancel()
    await redis.aclose()
    return statistics.median(spent_s) / batch * 1e6


# ---- the whole worker ----


def _worker_us(server: EmbeddedServer, batch: int) -> float:
    with (
        tempfile.TemporaryDirectory(prefix="hot-path-") as folder,
        connect(server.url) as client,
    ):
        ready = Path(folder) / "ready"
        command = [
            *(sys.executable, "-m", "benchmarks.hot_path_engine"),
            *(server.url, str(batch), str(ready)),
        ]
        # The worker refuses variables that are almost its options.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENMILL_")}
        with running(command, environment=environment) as process:
            wait_until(ready.exists, process, timeout_s=60, what="the worker")
            worker = psutil.Process(process.pid)
            _serve(client, batch, 50, "warm")
            began_s = sum(worker.cpu_times()[:2])
            _serve(client, batch, WORKER_STEPS, "timed")
            spent_s = sum(worker.cpu_times()[:2]) - began_s
    return spent_s / (batch * WORKER_STEPS) * 1e6 - engine_us(batch)


def _serve(client: Any, batch: int, tokens: int, name: str) -> None:
    """Enqueue so many requests of `tokens` tokens, and wait for all to end."""
    calls = QueueCalls(Keyspace())
    body = json.dumps({"prompt": "x", "max_tokens": tokens})
    ids = [f"{name}-{number}" for number in range(batch)]
    for number, request_id in enumerate(ids):
        run(client, calls.enqueue(request_id, body=body, tenant=f"t{number}"))
    _poll(lambda: all(client.hget(calls.keys.record(each), "state") == "done" for each in ids))


def _poll(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 300
    while not condition():
        if time.monotonic() > give_up_at:
            raise SystemExit("the requests did not end")
        time.sleep(0.1)


if __name__ == "__main__":
    main()

"""A queue on a server of its own with real workers and readers, for one fault scenario."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis

from chaos.audience import Audience, Tasks, Threads
from chaos.checks import Verdict, View, check_after
from chaos.engines import Kind
from chaos.proxy import Proxy
from chaos.table import Row
from support_redis import unique_keyspace
from support_worker_process import (
    LEASE_MS,
    TESTS,
    Pool,
    WorkerProcess,
    clean_environment,
    eventually,
)  # fmt: skip
from tokenmill._redis import RedisOptions, connect
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import partition_of

#: Slots of one worker: two serve forty requests in three rounds.
SLOTS = 8
STEP_S = 0.01
PATIENCE_S = 60.0
#: The test itself waits for a server that is frozen on purpose.
PATIENT = RedisOptions(socket_timeout_s=30.0)


@dataclass
class ChaosPool(Pool):
    """Workers with an engine of `kind`."""

    kind: Kind = "fake"

    def start(self, name: str, *, step_s: float = STEP_S, **options: object) -> WorkerProcess:
        settings: dict[str, object] = {
            "redis_url": self.server.url,
            "namespace": self.keys.namespace,
            "pool": self.keys.pool,
            "name": name,
            "lease_ms": LEASE_MS,
            "max_num_seqs": SLOTS,
            "retry_backoff_ms": 100,
            **options,
        }
        log_file = self.folder / f"{name}.log"
        script = TESTS / "chaos" / "worker_process.py"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, str(script), json.dumps(settings), self.kind, str(step_s)],
                stderr=log,
                env=clean_environment() | {"OMP_NUM_THREADS": "1"},
            )
        self.workers.append(WorkerProcess(name, process, log_file))
        return self.workers[-1]


@dataclass
class Rig:
    """`server` is where the data are at the end. Close it with `close`, checks are in `finish`."""

    row: Row
    pool: ChaosPool
    stack: ExitStack
    began_s: float = field(default_factory=time.monotonic)
    audiences: list[Audience] = field(default_factory=list)
    #: Of all workers at any time; and of single ones, which were killed on purpose.
    allowed_exits: frozenset[int] = frozenset({os.EX_OK, -signal.SIGKILL})
    expected_exits: dict[str, int] = field(default_factory=dict)
    patience_s: float = PATIENCE_S

    @property
    def server(self) -> EmbeddedServer:
        return self.pool.server

    @property
    def redis(self) -> redis.Redis:
        return self.pool.client

    def connect(self) -> redis.Redis:
        """A client for another thread."""
        return connect(self.server.url, PATIENT)

    def proxy(self, **options: Any) -> Proxy:
        """A way to the server that can be disturbed."""
        return self.stack.enter_context(Proxy(self.server.url, **options))

    def move_to(self, server: EmbeddedServer) -> None:
        """From now on this server is the one that counts."""
        self.pool.client.close()
        self.pool.server = server
        self.pool.client = connect(server.url, PATIENT)

    # ---- workers ----

    def start(self, *names: str, **options: Any) -> list[WorkerProcess]:
        """Workers, all ready to serve."""
        workers = [self.pool.start(name, **options) for name in names]
        self.until(lambda: set(names) <= self.pool.ready_workers())
        return workers

    def held_by(self, worker: WorkerProcess) -> list[str]:
        """Ids of the requests that a worker has leased."""
        owned = list(self.redis.hkeys(self.pool.keys.owners))
        with self.redis.pipeline(transaction=False) as pipe:
            for request_id in owned:
                pipe.hget(self.pool.keys.record(request_id), "worker")
            holders = pipe.execute()
        prefix = f"{worker.name}-{worker.process.pid}-"
        return [
            request_id
            for request_id, holder in zip(owned, holders, strict=True)
            if str(holder).startswith(prefix)
        ]

    def kill(self, worker: WorkerProcess) -> None:
        worker.kill()
        self.expected_exits[worker.name] = -signal.SIGKILL

    # ---- readers ----

    def tasks(self, url: str | None = None, **options: Any) -> Tasks:
        """Readers on one AsyncClient."""
        return self._add(Tasks(url or self.server.url, self.pool.keys, **options))

    def threads(self, url: str | None = None, **options: Any) -> Threads:
        """Readers on one Client."""
        return self._add(Threads(url or self.server.url, self.pool.keys, **options))

    def until_streaming(self, *, streams: int = SLOTS, tokens: int = 20) -> None:
        """Until so many streams have brought so many tokens each, and go on."""
        self.until(lambda: sum(a.num_streaming(tokens) for a in self.audiences) >= streams)

    def until(self, condition: Callable[[], object]) -> None:
        """Wait; no worker may fail meanwhile."""

        def holds() -> object:
            for worker in self.pool.workers:
                code = worker.process.poll()
                if code not in {None, *self.allowed_exits}:
                    last = worker.log.splitlines()[-1:]
                    raise AssertionError(f"worker {worker.name} failed with {code}: {last}")
            return condition()

        eventually(holds, self.patience_s)

    def until_all_ended(self) -> None:
        self.until(lambda: all(audience.all_ended for audience in self.audiences))

    # ---- faults and the end ----

    def fault(self, inject: Callable[[], object], *, times: int = 1) -> None:
        self.row.faults += times
        inject()

    def views(self) -> list[View]:
        """Every partition; request ids are spread over them in this order."""
        return [View(self.redis, self.pool.keys)]

    def finish(self, *, statuses: Mapping[str, int] | None = None, **options: Any) -> Verdict:
        """Wait for every stream, stop everybody, and check everything.

        `statuses`: how many streams must end how, by default all `done`; `options` are those of
        `check_after`.
        """
        self.until_all_ended()
        self.stop_workers()
        transcripts = [t for audience in self.audiences for t in audience.transcripts.values()]
        self.close_audiences()
        self.row.seconds = time.monotonic() - self.began_s
        verdict, views = Verdict(), self.views()
        for number, view in enumerate(views):
            here = [t for t in transcripts if partition_of(t.request.id, len(views)) == number]
            check_after(verdict, view, here, **options)
        wanted = Counter(statuses or {"done": len(transcripts)})
        verdict.demand(verdict.statuses == wanted, f"ended {verdict.statuses}, expected {wanted}")
        self.row.requests += len(transcripts)
        self.row.requeued += verdict.requeued
        self.row.rewinds += sum(t.num_rewinds for t in transcripts)
        self.row.lost += verdict.lost
        self.row.duplicated += sum(t.num_repeated for t in transcripts)
        verdict.raise_if_wrong()
        return verdict

    def stop_workers(self) -> None:
        """All leave in an orderly way, but those that were killed on purpose."""
        alive = [worker for worker in self.pool.workers if worker.process.poll() is None]
        for worker in alive:
            worker.process.send_signal(signal.SIGCONT)
        # Before it is ready, a worker has no say in how it ends.
        self.until(lambda: all(_is_ready_or_gone(worker) for worker in alive))
        for worker in alive:
            worker.process.send_signal(signal.SIGTERM)
        exits = {worker.name: worker.wait() for worker in self.pool.workers}
        allowed = self.allowed_exits - {-signal.SIGKILL}
        wrong = {
            name: code
            for name, code in exits.items()
            if code not in allowed and code != self.expected_exits.get(name)
        }
        assert not wrong, f"workers ended with {wrong}"
        tracebacks = [worker.name for worker in self.pool.workers if "Traceback" in worker.log]
        assert not tracebacks, f"a traceback in the log of {tracebacks}"

    def close_audiences(self) -> None:
        for audience in self.audiences:
            audience.close()
        self.audiences.clear()

    def close(self) -> None:
        for audience in self.audiences:
            audience.close()
        self.stack.close()
        if not self.row.seconds:
            self.row.seconds = time.monotonic() - self.began_s

    def _add(self, audience: Any) -> Any:
        self.audiences.append(audience)
        return audience


def build_rig(
    row: Row,
    folder: Path,
    *,
    kind: Kind = "fake",
    server: EmbeddedServer | None = None,
    binary: Path | None = None,
    append_only: bool = True,
    extra_args: Sequence[str] = (),
) -> Rig:
    """Starts a server, unless there is one (which then is somebody else's to stop)."""
    with ExitStack() as stack:
        if server is None:
            server = stack.enter_context(
                EmbeddedServer(binary=binary, append_only=append_only, extra_args=tuple(extra_args))
            )
        pool = ChaosPool(server, unique_keyspace(), folder, kind=kind)
        pool.client.close()
        pool.client = connect(server.url, PATIENT)
        stack.callback(_end_pool, pool)
        return Rig(row, pool, stack.pop_all())


def _is_ready_or_gone(worker: WorkerProcess) -> bool:
    return "INFO ready" in worker.log or worker.process.poll() is not None


def _end_pool(pool: ChaosPool) -> None:
    for worker in pool.workers:
        if worker.process.poll() is None:
            worker.kill()
    pool.client.close()

"""What `tokenmill exporter` serves: the numbers of a queue, once for all workers and partitions.

Every request reads Redis itself, unless that was done a moment ago. When it cannot be read, there
are no numbers: neither Prometheus nor an autoscaler may take a silent Redis for an empty queue.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, field
from http import HTTPStatus

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from tokenmill import Client
from tokenmill._backlog import PoolReading
from tokenmill._backlog_reader import read_pool
from tokenmill._redis_errors import translated
from tokenmill.errors import TokenmillError

from .endpoints import Reply, Route, json_reply
from .logs import fields
from .queue_metrics import QueueCollector

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`reading` is None while Redis cannot be read; `error` says why."""

    reading: PoolReading | None
    error: str
    took_s: float
    read_at_s: float  # monotonic


@dataclass(slots=True)
class PoolReader:
    """Reads one pool, at most once in `max_age_s`. Thread-safe. `url` is for messages."""

    client: Client
    url: str
    max_age_s: float
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _latest: Snapshot | None = field(default=None, init=False)

    def read(self) -> Snapshot:
        with self._lock:
            latest = self._latest
            if latest is None or time.monotonic() - latest.read_at_s >= self.max_age_s:
                latest = self._latest = self._read()
            return latest

    def _read(self) -> Snapshot:
        began_s = time.monotonic()
        reading, error = None, ""
        try:
            with translated(self.url):
                homes = self.client._link.partitions()
                reading = read_pool([(home.redis, home.keys) for home in homes])
        except TokenmillError as failure:
            error = str(failure)
            logger.warning("queue not read", extra=fields(error=error))
        now_s = time.monotonic()
        return Snapshot(reading, error, now_s - began_s, now_s)


class Exporter:
    """The routes of an exporter. `assumed_tokens_per_s`: the speed of one worker until one has
    measured it."""

    def __init__(self, reader: PoolReader, pool: str, assumed_tokens_per_s: float) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._reader = reader
        self._pool = pool
        self._assumed_tokens_per_s = assumed_tokens_per_s
        self._registry = CollectorRegistry()
        self._registry.register(QueueCollector(pool, reader.read, self._backlog_s))

    def routes(self) -> dict[str, Route]:
        return {
            "/metrics": self._metrics,
            "/scaling": self._scaling,
            "/healthz": lambda: json_reply(True, {"status": "alive"}),
            "/readyz": self._readyz,
        }

    def _metrics(self) -> Reply:
        # Text 0.0.4 for the same reason as a worker's, see `Metrics.render`.
        return HTTPStatus.OK, generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _readyz(self) -> Reply:
        snapshot = self._reader.read()
        return json_reply(snapshot.reading is not None, {"error": snapshot.error})

    def _scaling(self) -> Reply:
        """The same numbers for KEDA's `metrics-api` scaler."""
        snapshot = self._reader.read()
        reading = snapshot.reading
        if reading is None:
            return json_reply(False, {"pool": self._pool, "error": snapshot.error})
        return json_reply(
            True,
            {
                "pool": self._pool,
                "backlog_seconds": round(self._backlog_s(reading), 3),
                "backlog_tokens": reading.backlog_tokens,
                "waiting_tokens": reading.startable_tokens,
                "running_tokens": reading.running_tokens,
                "deferred_tokens": reading.deferred_tokens,
                "waiting": reading.waiting,
                "delayed": reading.delayed,
                "running": reading.leased,
                "paused": reading.is_paused,
                "oldest_s": round(reading.oldest_s, 3),
                "workers": len(reading.cards),
                "tokens_per_s": reading.tokens_per_s or self._assumed_tokens_per_s,
                "tokens_per_s_is_measured": reading.tokens_per_s is not None,
            },
        )

    def _backlog_s(self, reading: PoolReading) -> float:
        """Seconds that one worker would need for all that may be computed now."""
        return reading.backlog_tokens / (reading.tokens_per_s or self._assumed_tokens_per_s)

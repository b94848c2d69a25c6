"""The metrics of a queue as Prometheus sees them: made of what was read of Redis just now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from tokenmill._backlog import MemoryReading, PoolReading
from tokenmill.cli.snapshot import CLASS_NAMES

WORKER_STATES = ("loading", "ready", "draining")


class Snapshot(Protocol):
    """What was read, and how long that took; None: Redis cannot be read."""

    @property
    def reading(self) -> PoolReading | None: ...
    @property
    def took_s(self) -> float: ...


class QueueCollector(Collector):
    """Collects one pool. `backlog_s` says how many seconds one worker would need for all of it."""

    def __init__(
        self,
        pool: str,
        read: Callable[[], Snapshot],
        backlog_s: Callable[[PoolReading], float],
    ) -> None:
        self._pool = pool
        self._read = read
        self._backlog_s = backlog_s

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Nothing in advance: registering must not read Redis."""
        return []

    def collect(self) -> Iterator[GaugeMetricFamily]:
        snapshot = self._read()
        up = snapshot.reading is not None
        yield self._gauge("tokenmill_exporter_up", "1: Redis can be read; 0: not.", up)
        yield self._gauge(
            "tokenmill_exporter_read_seconds", "How long reading Redis took.", snapshot.took_s
        )
        if snapshot.reading is not None:
            yield from self._work(snapshot.reading)
            yield from self._depth(snapshot.reading)
            yield from self._workers(snapshot.reading)
            if snapshot.reading.memory is not None:
                yield from self._memory(snapshot.reading.memory)

    def _work(self, reading: PoolReading) -> Iterator[GaugeMetricFamily]:
        yield self._gauge(
            "tokenmill_backlog_seconds",
            "Seconds that one worker would need for all that may start now or runs.",
            self._backlog_s(reading),
        )
        tokens = self._family(
            "tokenmill_backlog_tokens",
            "Tokens of prompts and, at most, of answers, still to be computed.",
            "state",
        )
        tokens.add_metric([self._pool, "waiting"], reading.startable_tokens)
        tokens.add_metric([self._pool, "running"], reading.running_tokens)
        yield tokens
        yield self._gauge(
            "tokenmill_backlog_deferred_tokens",
            "Tokens that wait and count in no backlog: not due yet, or the queue is paused.",
            reading.deferred_tokens,
        )
        yield self._gauge(
            "tokenmill_queue_speed_tokens_per_second",
            "Tokens that one worker computes per second with enough to do; 0: never measured.",
            reading.tokens_per_s or 0.0,
        )
        yield self._gauge(
            "tokenmill_queue_ends_per_second",
            "Requests that end per second, over about half a minute.",
            reading.ends_per_s,
        )

    def _depth(self, reading: PoolReading) -> Iterator[GaugeMetricFamily]:
        gauge = self._gauge
        yield gauge("tokenmill_queue_waiting", "Requests that no worker has.", reading.waiting)
        yield gauge("tokenmill_queue_running", "Requests that workers have.", reading.leased)
        yield gauge(
            "tokenmill_queue_delayed", "Of the waiting: those not due yet.", reading.delayed
        )
        yield gauge("tokenmill_queue_dead_letters", "Dead letters.", reading.dead_letters)
        yield gauge(
            "tokenmill_queue_memory_pressure",
            "1: Redis is short of memory and requests are refused.",
            reading.memory_pressure,
        )
        yield gauge(
            "tokenmill_queue_paused", "1: an operator has stopped the queue.", reading.is_paused
        )
        requests = self._family(
            "tokenmill_queue_requests",
            "Waiting requests by class: ready to be taken, or held until their tenant has room.",
            "class",
            "state",
        )
        oldest = self._family(
            "tokenmill_queue_oldest_seconds", "Age of the first ready request; 0: none.", "class"
        )
        lag = self._family("tokenmill_queue_lag", "Entries that the group has not read.", "class")
        pending = self._family("tokenmill_queue_pending", "Entries that workers have.", "class")
        for ready_class, found in reading.classes.items():
            labels = [self._pool, CLASS_NAMES[ready_class]]
            requests.add_metric([*labels, "ready"], found.ready)
            requests.add_metric([*labels, "held"], found.held)
            oldest.add_metric(labels, found.oldest_s)
            lag.add_metric(labels, found.lag)
            pending.add_metric(labels, found.pending)
        yield from (requests, oldest, lag, pending)

    def _memory(self, memory: MemoryReading) -> Iterator[GaugeMetricFamily]:
        yield self._gauge(
            "tokenmill_redis_memory_used_bytes",
            "Memory that Redis uses; of several servers the fullest.",
            memory.used_bytes,
        )
        yield self._gauge(
            "tokenmill_redis_memory_max_bytes",
            "Its maxmemory; 0: no limit. From 85 % on requests are refused.",
            memory.max_bytes,
        )

    def _workers(self, reading: PoolReading) -> Iterator[GaugeMetricFamily]:
        states = Counter(card.get("state") for card in reading.cards.values())
        workers = self._family("tokenmill_queue_workers", "Workers by state.", "state")
        for state in WORKER_STATES:
            workers.add_metric([self._pool, state], states[state])
        yield workers
        yield self._gauge(
            "tokenmill_queue_places",
            "Requests that the workers together compute at a time, at most.",
            sum(int(card.get("slots", 0)) for card in reading.cards.values()),
        )

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = self._family(name, text)
        family.add_metric([self._pool], value)
        return family

    def _family(self, name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=["pool", *labels])

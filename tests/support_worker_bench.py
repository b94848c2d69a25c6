"""A queue on fakeredis with everything of a worker but its engine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio
from redis.exceptions import ConnectionError as RedisConnectionError

from support_worker import text_of
from tokenmill.calls import QueueCalls
from tokenmill.keys import GROUP, Keyspace
from tokenmill.ready import acreate_groups, read_entries
from tokenmill.scripts import arun
from tokenmill_worker.delivery import Deliveries, Delivery, Ending
from tokenmill_worker.metrics import Metrics
from tokenmill_worker.publisher import Publisher
from tokenmill_worker.retrying import Retrier

WORKER = "worker-1"


@dataclass
class Bench:
    """The parts of a worker that write, on a queue of their own."""

    redis: redis.asyncio.Redis
    keys: Keyspace
    calls: QueueCalls
    deliveries: Deliveries = field(default_factory=Deliveries)
    metrics: Metrics = field(default_factory=lambda: Metrics("model", 1000))
    lost: list[Delivery] = field(default_factory=list)
    ended: list[tuple[Delivery, Ending]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.retrier = Retrier(self.metrics)
        self.publisher = Publisher(
            self.redis,
            self.calls,
            self.deliveries,
            retrier=self.retrier,
            metrics=self.metrics,
            text_of=lambda token_id: text_of([token_id]),
            on_lost=self._lose,
            on_end=self._end,
        )

    def _lose(self, delivery: Delivery) -> None:
        self.lost.append(delivery)
        self.deliveries.remove(delivery)

    def _end(self, delivery: Delivery, ending: Ending) -> None:
        self.ended.append((delivery, ending))
        self.deliveries.remove(delivery)

    async def enqueue(self, request_id: str, priority_class: str = "1") -> None:
        body = json.dumps({"prompt": request_id})
        await arun(
            self.redis, self.calls.enqueue(request_id, body=body, priority_class=priority_class)
        )

    async def deliver(self, *request_ids: str) -> list[Delivery]:
        """Enqueue, lease and hold these requests."""
        for request_id in request_ids:
            await self.enqueue(request_id)
        return await self.deliver_with("")

    async def deliver_with(self, fingerprint: str, ready_class: str = "1") -> list[Delivery]:
        """Lease and hold what stands in a ready stream, as a worker with this model."""
        await acreate_groups(self.redis, self.keys)
        reply = await self.redis.xreadgroup(GROUP, WORKER, {self.keys.ready(ready_class): ">"})
        entries = read_entries(self.keys, reply)
        call = self.calls.lease(WORKER, entries, fingerprint=fingerprint)
        replies = await arun(self.redis, call)
        deliveries = [Delivery(reply.lease) for reply in replies if reply.lease is not None]
        for delivery in deliveries:
            self.deliveries.add(delivery)
        return deliveries

    async def log(self, request_id: str) -> list[dict[str, Any]]:
        entries: Any = await self.redis.xrange(self.keys.log(request_id))
        return [json.loads(fields["d"]) for _, fields in entries]

    async def lose_log_after(self, request_id: str, num_events: int) -> None:
        """What a failover may do: the end of the log is gone, as if it had never been written."""
        key = self.keys.log(request_id)
        entries: Any = await self.redis.xrange(key)
        await self.redis.delete(key)
        for entry_id, fields in entries[:num_events]:
            await self.redis.xadd(key, fields, id=entry_id)


class Flaky:
    """A client whose next calls fail: before they are sent, or after (the reply is lost)."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self.fail_before = 0
        self.fail_after = 0
        self.num_calls = 0

    async def eval(self, *arguments: Any) -> Any:
        return await self._client.eval(*arguments)

    async def evalsha(self, *arguments: Any) -> Any:
        self.num_calls += 1
        if self.fail_before:
            self.fail_before -= 1
            raise RedisConnectionError("secret")
        reply = await self._client.evalsha(*arguments)
        if self.fail_after:
            self.fail_after -= 1
            raise RedisConnectionError("secret")
        return reply


@asynccontextmanager
async def running(*loops: Awaitable[None]) -> AsyncIterator[None]:
    """Run loops meanwhile; what ends one of them early fails the test."""
    tasks = [asyncio.ensure_future(loop) for loop in loops]
    try:
        async with asyncio.timeout(10):
            yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def until(condition: Callable[[], object]) -> None:
    """Give the loops time until `condition` holds."""
    give_up_at = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up_at, "the condition did not come true"
        await asyncio.sleep(0.001)

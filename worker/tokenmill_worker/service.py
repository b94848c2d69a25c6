"""The loops of a worker that has its engine, put together, and their orderly end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from redis.asyncio import Redis

from tokenmill.calls import QueueCalls

from .consumer import Consumer
from .delivery import Deliveries, Delivery
from .dispatcher import Dispatcher
from .engine_port import Engine
from .engine_thread import EngineThread
from .give_back import GiveBack
from .handover import Handover
from .health import Health
from .heartbeat import Heartbeat
from .intake import Identity, Intake
from .logs import fields
from .maintenance import Maintenance
from .metrics import Metrics
from .publisher import Publisher
from .retrying import Retrier
from .room import Room
from .settings import Settings
from .shutdown import Shutdown
from .watchdog import Watchdog

logger = logging.getLogger(__name__)

#: Texts of single tokens kept for logprobs: the same few come again and again.
TOKEN_TEXTS = 65_536


class _Drained(Exception):
    """Ends the task group in an orderly way."""


@dataclass(frozen=True, slots=True)
class Connections:
    """One client for each kind of call, so that none waits behind another."""

    fetch: Redis
    publish: Redis
    control: Redis

    async def close(self) -> None:
        for client in (self.fetch, self.publish, self.control):
            await client.aclose()


class Service:
    """Fetches, generates, publishes, renews and tidies up until it is told to stop."""

    def __init__(
        self,
        settings: Settings,
        calls: QueueCalls,
        connections: Connections,
        *,
        identity: Identity,
        engine: Engine,
        engine_thread: EngineThread,
        health: Health,
    ) -> None:
        self._settings = settings
        self._calls = calls
        self._connections = connections
        self._identity = identity
        self._engine_thread = engine_thread
        self._health = health
        self.metrics = Metrics(identity.model_names[0], engine.max_model_len)
        self.deliveries = Deliveries()
        self._retrier = Retrier(self.metrics)
        self._room = Room(settings.max_num_seqs, self.deliveries, lambda: self._dispatcher.stats)
        self._dispatcher = Dispatcher(
            self.deliveries, engine_thread, self.metrics, on_done=self._room.learn
        )
        self._dispatcher.stats = engine.stats()  # nobody uses the engine yet
        self._publisher = Publisher(
            connections.publish,
            calls,
            self.deliveries,
            retrier=self._retrier,
            metrics=self.metrics,
            text_of=lru_cache(TOKEN_TEXTS)(lambda token_id: engine.tokenizer.decode([token_id])),
            on_lost=self._dispatcher.drop,
            on_end=self._dispatcher.conclude,
            flush_s=settings.flush_ms / 1000,
        )
        self._intake = Intake(
            redis=connections.publish,
            keys=calls.keys,
            deliveries=self.deliveries,
            dispatcher=self._dispatcher,
            engine=engine,
            engine_thread=engine_thread,
            retrier=self._retrier,
            identity=identity,
        )
        self._handover = self._make_handover()

    def occupancy(self) -> dict[str, object]:
        """For the worker's card."""
        return {
            "running": len(self.deliveries),
            "waiting": self._dispatcher.stats.num_waiting,
            "room_tokens": self._room.tokens(),
        }

    async def run(self, shutdown: Shutdown) -> bool:
        """Work until `shutdown`, then drain. Returns whether everything was handed over.

        Raises:
            ExceptionGroup: a loop ended with an error. Call `abandon` then.
        """
        handed_over = False
        try:
            async with asyncio.TaskGroup() as group:
                consumer = self._make_consumer(group)
                fetching = group.create_task(consumer.run())
                for loop in (*self._loops(), self._make_give_back(consumer).run()):
                    group.create_task(loop)
                await shutdown.requested.wait()
                handed_over = await self._drain(consumer, fetching, shutdown)
                raise _Drained
        except* _Drained:
            pass
        return handed_over

    async def abandon(self) -> None:
        """After a failure: give back what can be given back in time."""
        await _within(self._settings.handover_timeout_s, self._handover.give_up_all())

    def _make_handover(self) -> Handover:
        return Handover(
            redis=self._connections.publish,
            calls=self._calls,
            deliveries=self.deliveries,
            retrier=self._retrier,
            metrics=self.metrics,
            worker_id=self._identity.worker_id,
            retry_backoff_ms=self._settings.retry_backoff_ms,
        )

    def _make_consumer(self, group: asyncio.TaskGroup) -> Consumer:
        def take(delivery: Delivery) -> None:
            self._dispatcher.hold(delivery)
            group.create_task(self._intake.admit(delivery))

        return Consumer(
            redis=self._connections.fetch,
            calls=self._calls,
            deliveries=self.deliveries,
            identity=self._identity,
            capacity=self._room.num_requests,
            aging_ms=self._settings.aging_ms,
            on_lease=take,
            retrier=self._retrier,
            metrics=self.metrics,
            health=self._health,
        )

    def _make_give_back(self, consumer: Consumer) -> GiveBack:
        after_s = self._settings.give_back_ms / 1000

        def given_back(delivery: Delivery) -> None:
            self._engine_thread.abort(delivery.attempt_id)
            consumer.leave_resumed(after_s)

        return GiveBack(
            redis=self._connections.control,
            keys=self._calls.keys,
            deliveries=self.deliveries,
            handover=self._handover,
            retrier=self._retrier,
            worker_id=self._identity.worker_id,
            after_s=after_s,
            waiting=lambda: self._dispatcher.stats.waiting,
            size_of=self._room.expected_tokens,
            on_given_back=given_back,
        )

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        settings, control = self._settings, self._connections.control
        heartbeat = Heartbeat(
            redis=control,
            calls=self._calls,
            deliveries=self.deliveries,
            publisher=self._publisher,
            retrier=self._retrier,
            health=self._health,
            worker_id=self._identity.worker_id,
            interval_s=settings.heartbeat_interval_ms / 1000,
            lease_s=settings.lease_ms / 1000,
            on_lost=self._dispatcher.drop,
            pause=partial(self._engine_thread.pause, "lease"),
        )
        maintenance = Maintenance(
            redis=control,
            calls=self._calls,
            retrier=self._retrier,
            metrics=self.metrics,
            interval_s=settings.lease_ms / 5000,
        )
        watchdog = Watchdog(lambda: self._engine_thread.busy_s, settings.engine_stall_ms / 1000)
        return [
            self._dispatcher.run(),
            self._publisher.run(),
            heartbeat.run(),
            maintenance.run(),
            watchdog.run(),
            self._engine_thread.wait_for_failure(),
        ]

    async def _drain(
        self, consumer: Consumer, fetching: asyncio.Task[None], shutdown: Shutdown
    ) -> bool:
        self._health.enter("draining")
        logger.info("draining", extra=fields(running=len(self.deliveries)))
        timeout_s = self._settings.handover_timeout_s
        consumer.stop()
        # A read under way would fetch what is given back, so the engine works on until it is over.
        await shutdown.wait(fetching, timeout_s)
        if self._settings.drain_grace_s:
            await shutdown.wait(self._until_idle(), self._settings.drain_grace_s)
        self._engine_thread.pause("drain")
        # What was generated is stored first, so that nobody generates it again.
        await shutdown.wait(self._publisher.settle(), timeout_s)
        return await _within(timeout_s, self._leave())

    async def _until_idle(self) -> None:
        while self.deliveries:
            self.deliveries.changed.clear()
            await self.deliveries.changed.wait()

    async def _leave(self) -> None:
        await self._handover.hand_over_all()
        await self._handover.leave_groups()


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> bool:
    try:
        await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        return False
    return True

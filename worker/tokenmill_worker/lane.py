"""A worker's loops for one partition of its pool: fetch, publish, renew, tidy up, hand over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from .consumer import Consumer
from .delivery import Deliveries, Delivery
from .dispatcher import Dispatcher
from .engine_port import Engine
from .engine_thread import EngineThread
from .give_back import GiveBack
from .handover import Handover
from .health import Loops
from .heartbeat import Heartbeat
from .intake import Identity, Intake
from .maintenance import Maintenance
from .metrics import Metrics
from .places import Places
from .publisher import Publisher
from .retrying import Retrier
from .room import Room
from .settings import Settings
from .ways import Way
from .workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all lanes of a worker have in common. `text_of` gives the text of a token."""

    settings: Settings
    identity: Identity
    engine: Engine
    engine_thread: EngineThread
    dispatcher: Dispatcher
    room: Room
    places: Places
    metrics: Metrics
    workload: Workload
    on_released: Callable[[Delivery], None]
    text_of: Callable[[int], str]
    quarantine: asyncio.Lock  # held by the one suspect that may begin


class Lane:
    """Starts with `start`; ends in steps, which `Service` takes for all lanes together."""

    def __init__(
        self,
        shared: Shared,
        way: Way,
        deliveries: Deliveries,
        health: Loops,
        on_stale: Callable[[bool], None],
    ) -> None:
        self._shared = shared
        self._way = way
        self._deliveries = deliveries
        self._health = health
        self._on_stale = on_stale  # told at each heartbeat whether the leases may have run out
        self._retrier = Retrier(shared.metrics)
        self._publisher = self._make_publisher()
        self._intake = self._make_intake()
        self._handover = self._make_handover()
        self._consumer: Consumer | None = None
        self._fetching: asyncio.Task[None] | None = None

    def start(self, group: asyncio.TaskGroup) -> None:
        consumer = self._consumer = self._make_consumer(group)
        self._fetching = group.create_task(consumer.run())
        group.create_task(self._publisher.run())
        group.create_task(self._make_heartbeat().run())
        group.create_task(self._make_maintenance().run())
        group.create_task(self._make_give_back(consumer).run())

    async def stop_fetching(self) -> None:
        """Returns when what was read is leased; cancelled, it gives up the read under way."""
        if self._consumer is not None and self._fetching is not None:
            self._consumer.stop()
            await self._fetching

    async def settle(self) -> None:
        """Wait until everything that was generated is stored."""
        await self._publisher.settle()

    async def leave(self) -> None:
        """Hand over everything, and leave the consumer groups."""
        await self._handover.hand_over_all()
        await self._handover.leave_groups()

    async def abandon(self) -> None:
        """After a failure: give back everything."""
        await self._handover.give_up_all()

    def _make_publisher(self) -> Publisher:
        dispatcher = self._shared.dispatcher
        return Publisher(
            self._way.connections.publish,
            self._way.calls,
            self._deliveries,
            retrier=self._retrier,
            metrics=self._shared.metrics,
            text_of=self._shared.text_of,
            on_lost=dispatcher.drop,
            on_end=dispatcher.conclude,
            flush_s=self._shared.settings.flush_ms / 1000,
        )

    def _make_intake(self) -> Intake:
        return Intake(
            redis=self._way.connections.publish,
            keys=self._way.calls.keys,
            deliveries=self._deliveries,
            dispatcher=self._shared.dispatcher,
            engine=self._shared.engine,
            engine_thread=self._shared.engine_thread,
            retrier=self._retrier,
            identity=self._shared.identity,
            quarantine=self._shared.quarantine,
        )

    def _make_handover(self) -> Handover:
        return Handover(
            redis=self._way.connections.publish,
            calls=self._way.calls,
            deliveries=self._deliveries,
            retrier=self._retrier,
            metrics=self._shared.metrics,
            worker_id=self._shared.identity.worker_id,
            retry_backoff_ms=self._shared.settings.retry_backoff_ms,
            on_released=self._shared.on_released,
        )

    def _make_consumer(self, group: asyncio.TaskGroup) -> Consumer:
        partition = self._way.calls.keys.partition

        def take(delivery: Delivery) -> None:
            delivery.partition = partition
            self._shared.dispatcher.hold(delivery)
            group.create_task(self._intake.admit(delivery))

        return Consumer(
            redis=self._way.connections.fetch,
            calls=self._way.calls,
            deliveries=self._deliveries,
            identity=self._shared.identity,
            places=self._shared.places,
            aging_ms=self._shared.settings.aging_ms,
            on_lease=take,
            retrier=self._retrier,
            metrics=self._shared.metrics,
            health=self._health,
        )

    def _make_give_back(self, consumer: Consumer) -> GiveBack:
        shared = self._shared
        after_s = shared.settings.give_back_ms / 1000

        def given_back(delivery: Delivery) -> None:
            shared.engine_thread.abort(delivery.attempt_id)
            consumer.leave_resumed(after_s)

        return GiveBack(
            redis=self._way.connections.control,
            keys=self._way.calls.keys,
            deliveries=self._deliveries,
            handover=self._handover,
            retrier=self._retrier,
            worker_id=shared.identity.worker_id,
            after_s=after_s,
            waiting=lambda: shared.dispatcher.stats.waiting,
            size_of=shared.room.expected_tokens,
            on_given_back=given_back,
        )

    def _make_heartbeat(self) -> Heartbeat:
        settings = self._shared.settings
        return Heartbeat(
            redis=self._way.connections.control,
            calls=self._way.calls,
            deliveries=self._deliveries,
            publisher=self._publisher,
            retrier=self._retrier,
            health=self._health,
            worker_id=self._shared.identity.worker_id,
            interval_s=settings.heartbeat_interval_ms / 1000,
            lease_s=settings.lease_ms / 1000,
            on_lost=self._shared.dispatcher.drop,
            pause=self._on_stale,
        )

    def _make_maintenance(self) -> Maintenance:
        return Maintenance(
            redis=self._way.connections.control,
            calls=self._way.calls,
            retrier=self._retrier,
            metrics=self._shared.metrics,
            workload=self._shared.workload,
            interval_s=self._shared.settings.lease_ms / 5000,
        )

"""A worker that has its engine: its lanes and what they share, put together, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache, partial
from typing import Any

from tokenmill_engine.outputs import EngineStats

from .delivery import AllDeliveries, Deliveries, DeliveriesOfLanes, Delivery, Ending
from .dispatcher import Dispatcher
from .engine_port import Engine
from .engine_thread import EngineThread
from .health import Health
from .intake import Identity
from .lane import Lane, Shared
from .logs import fields
from .metrics import Metrics
from .places import Places
from .room import Room
from .settings import Settings
from .shutdown import Shutdown
from .throughput import Throughput
from .tracing import OnAttempt, Outcome, no_tracing
from .watchdog import Watchdog
from .ways import Way
from .workload import Workload

logger = logging.getLogger(__name__)

#: Texts of single tokens kept for logprobs: the same few come again and again.
TOKEN_TEXTS = 65_536


#: Of the time after which a step that hangs ends the process, so much makes the worker unready.
STALE_AFTER_STALLS = 0.25


class _Drained(Exception):
    """Ends the task group in an orderly way."""


class Service:
    """Fetches, generates, publishes, renews and tidies up until it is told to stop.

    One lane for each partition served; they share the engine and its room.
    """

    def __init__(
        self,
        settings: Settings,
        ways: Sequence[Way],
        *,
        identity: Identity,
        engine: Engine,
        engine_thread: EngineThread,
        health: Health,
        on_attempt: OnAttempt = no_tracing,
    ) -> None:
        self._settings = settings
        self._on_attempt = on_attempt
        self._keys = {way.calls.keys.partition: way.calls.keys for way in ways}
        self._engine_thread = engine_thread
        self._health = health
        stall_s = settings.engine_stall_ms / 1000
        health.watch_engine(self._engine_busy_s, stall_s * STALE_AFTER_STALLS)
        self.metrics = Metrics(identity.model_names[0], engine.max_model_len)
        changed = asyncio.Event()
        held = {way.calls.keys.partition: Deliveries(changed) for way in ways}
        self.deliveries: AllDeliveries = (
            next(iter(held.values())) if len(held) == 1 else DeliveriesOfLanes(held, changed)
        )
        self._generated = Throughput()
        self._room = Room(settings.max_num_seqs, self.deliveries, lambda: self._dispatcher.stats)
        self._workload = Workload(
            self.deliveries, lambda: self._dispatcher.stats, lambda: self._room.num_requests() <= 0
        )
        self._dispatcher = Dispatcher(
            self.deliveries,
            engine_thread,
            self.metrics,
            on_done=self._learn,
            on_over=self._over,
        )
        self._dispatcher.stats = engine.stats()  # nobody uses the engine yet
        self.metrics.configured(_cache_facts(settings, self._dispatcher.stats))
        shared = self._shared(identity, engine)
        self._is_stale = dict.fromkeys(held, False)
        self._lanes = [
            Lane(shared, way, held[number], health.lane(number), partial(self._on_stale, number))
            for number, way in zip(held, ways, strict=True)
        ]

    def _shared(self, identity: Identity, engine: Engine) -> Shared:
        return Shared(
            settings=self._settings,
            identity=identity,
            engine=engine,
            engine_thread=self._engine_thread,
            dispatcher=self._dispatcher,
            room=self._room,
            places=Places(self._room.num_requests),
            metrics=self.metrics,
            workload=self._workload,
            on_released=self._released,
            text_of=lru_cache(TOKEN_TEXTS)(lambda token_id: engine.tokenizer.decode([token_id])),
            quarantine=asyncio.Lock(),
        )

    def occupancy(self) -> dict[str, object]:
        """For the worker's card."""
        stats = self._dispatcher.stats
        return {
            "running": len(self.deliveries),
            "waiting": stats.num_waiting,
            "room_tokens": self._room.tokens(),
            "kv_usage": round(stats.kv_cache_usage, 3),
            "generated_per_s": round(self._generated.per_second(stats.generation_tokens_total), 1),
            "remaining_tokens": self._workload.remaining_tokens(),
            "capacity_tokens_per_s": round(self._workload.capacity_tokens_per_s or 0.0, 1),
        }

    def _engine_busy_s(self) -> float:
        return self._engine_thread.busy_s

    def _over(self, delivery: Delivery, ending: Ending | None) -> None:
        outcome: Outcome = "lost" if ending is None else "ended"
        self._on_attempt(self._keys[delivery.partition], delivery, outcome, ending)

    def _released(self, delivery: Delivery) -> None:
        self._on_attempt(self._keys[delivery.partition], delivery, "released", None)

    def _learn(self, delivery: Delivery) -> None:
        """A request ended well."""
        self._room.learn(delivery)
        self._workload.ended(delivery)

    async def run(self, shutdown: Shutdown) -> bool:
        """Work until `shutdown`, then drain. Returns whether everything was handed over.

        Raises:
            ExceptionGroup: a loop ended with an error. Call `abandon` then.
        """
        handed_over = False
        watchdog = Watchdog(self._engine_busy_s, self._settings.engine_stall_ms / 1000)
        try:
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes:
                    lane.start(group)
                group.create_task(self._dispatcher.run())
                group.create_task(watchdog.run())
                group.create_task(self._engine_thread.wait_for_failure())
                await shutdown.requested.wait()
                handed_over = await self._drain(shutdown)
                raise _Drained
        except* _Drained:
            pass
        return handed_over

    async def abandon(self) -> None:
        """After a failure: give back what can be given back in time."""
        await _within(self._settings.handover_timeout_s, self._each(Lane.abandon))

    async def _drain(self, shutdown: Shutdown) -> bool:
        self._health.enter("draining")
        logger.info("draining", extra=fields(running=len(self.deliveries)))
        timeout_s = self._settings.handover_timeout_s
        # A read under way would fetch what is given back, so the engine works on until it is over.
        await shutdown.wait(self._each(Lane.stop_fetching), timeout_s)
        if self._settings.drain_grace_s:
            await shutdown.wait(self._until_idle(), self._settings.drain_grace_s)
        self._engine_thread.pause("drain")
        # What was generated is stored first, so that nobody generates it again.
        await shutdown.wait(self._each(Lane.settle), timeout_s)
        return await _within(timeout_s, self._each(Lane.leave))

    async def _each(self, step: Callable[[Lane], Coroutine[Any, Any, None]]) -> None:
        await asyncio.gather(*(step(lane) for lane in self._lanes))

    async def _until_idle(self) -> None:
        while self.deliveries:
            self.deliveries.changed.clear()
            await self.deliveries.changed.wait()

    def _on_stale(self, partition: int, is_stale: bool) -> None:
        """The engine rests when no lane can prove its leases: one partition's trouble must not
        stop the others. Fencing keeps every log right in any case."""
        self._is_stale[partition] = is_stale
        self._engine_thread.pause("lease", all(self._is_stale.values()))


def _cache_facts(settings: Settings, stats: EngineStats) -> dict[str, object]:
    """Under the names of vLLM's `cache_config_info`."""
    return {
        "block_size": stats.block_size,
        "num_gpu_blocks": stats.num_blocks,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "enable_prefix_caching": settings.enable_prefix_caching,
    }


async def _within(timeout_s: float, work: Coroutine[Any, Any, None]) -> bool:
    try:
        await asyncio.wait_for(work, timeout_s)
    except TimeoutError:
        return False
    return True

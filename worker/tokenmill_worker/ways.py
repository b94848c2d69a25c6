"""The ways to the partitions that a worker serves: how many there are, connections, checks."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from redis.asyncio import Redis

from tokenmill._redis import aconnect, is_cluster, share_locator
from tokenmill._redis_errors import REDIS_ERRORS, translate
from tokenmill._server_check import acheck_server
from tokenmill.calls import QueueCalls, QueuePolicy
from tokenmill.errors import (
    AuthenticationFailed,
    ConfigurationError,
    QueueUnavailable,
    TokenmillError,
)
from tokenmill.pool_meta import akeep_partitions, asettle_partitions

from .cancellation import raise_if_cancelled
from .errors import QueueNotReady, StartupError, describe
from .logs import fields
from .packing import pack_in_c
from .settings import Settings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connections:
    """One client for each kind of call, so that none waits behind another."""

    fetch: Redis
    publish: Redis
    control: Redis

    async def close(self) -> None:
        for client in (self.fetch, self.publish, self.control):
            await client.aclose()


@dataclass(frozen=True, slots=True)
class Way:
    """How to reach one partition."""

    calls: QueueCalls
    connections: Connections


class Ways:
    """Those that `settings` ask for, once `open` has found out how many partitions there are."""

    def __init__(self, settings: Settings, worker_id: str) -> None:
        self._settings = settings
        self._worker_id = worker_id
        self._opened: list[Way] = []
        self._count = 1
        try:
            self._url = settings.redis_url_with_password()
            self._is_cluster = is_cluster(self._url)
            self._meta = self._connect(settings.keyspace.meta_slot, for_control=True)
        except ConfigurationError as error:
            raise StartupError(str(error)) from None

    async def open(self) -> list[Way]:
        """Raises `StartupError` if the queue is not there or not fit."""
        keys = self._settings.keyspace
        first = self._way(0)
        self._opened.append(first)
        try:
            await self._check(first.connections.control)
            self._count = await asettle_partitions(
                self._meta, first.connections.control, keys, self._settings.partitions
            )
            served = self._settings.served_partitions(self._count)
            ways = [first if number == 0 else self._way(number) for number in served]
            self._opened += [way for way in ways if way is not first]
            if self._is_cluster:
                for way in ways:
                    await self._check(way.connections.control)
        except REDIS_ERRORS as error:
            raise _not_ready(translate(error, self._url)) from None
        except ConfigurationError as error:
            raise StartupError(str(error)) from None
        return ways

    async def close(self) -> None:
        for way in self._opened:
            await way.connections.close()
        await self._meta.aclose()

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Meanwhile write down again how many partitions there are, should Redis lose it."""
        if self._count == 1:  # that is what a pool has of which nothing is written
            yield
            return
        task = asyncio.create_task(self._keep())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self) -> None:
        while True:
            raise_if_cancelled()
            interval_s = self._settings.heartbeat_interval_ms / 1000
            await asyncio.sleep(interval_s * random.uniform(0.8, 1.2))
            try:
                await akeep_partitions(self._meta, self._settings.keyspace, self._count)
            except REDIS_ERRORS as error:
                logger.debug("partitions not written", extra=fields(error=describe(error)))

    def _way(self, partition: int) -> Way:
        keys = replace(self._settings.keyspace, partition=partition)
        connections = Connections(
            fetch=self._connect(keys.slot),
            publish=self._connect(keys.slot),
            control=self._connect(keys.slot, for_control=True),
        )
        share_locator(connections.fetch, connections.publish, connections.control)
        return Way(QueueCalls(keys, _policy(self._settings, self._is_cluster)), connections)

    def _connect(self, slot: int, *, for_control: bool = False) -> Redis:
        options = self._settings.redis_options(self._worker_id, for_control=for_control)
        return pack_in_c(aconnect(self._url, options, slot=slot))

    async def _check(self, client: Redis) -> None:
        for finding in await acheck_server(client, is_cluster=self._is_cluster):
            if finding.severity == "error":
                raise QueueNotReady(f"Redis: {finding.message}")
            logger.warning("redis: %s", finding.message)


def _policy(settings: Settings, in_cluster: bool) -> QueuePolicy:
    return QueuePolicy(
        deadline_ms=int(settings.default_deadline_s * 1000),
        retention_ms=int(settings.retention_s * 1000),
        dead_letter_body_ms=int(settings.dead_letter_body_s * 1000),
        max_queued=settings.max_queued,
        max_running_per_tenant=settings.max_running_per_tenant,
        lease_ms=settings.lease_ms,
        max_strikes=settings.max_strikes,
        max_attempts=settings.max_attempts,
        max_retries=settings.max_retries,
        backoff_ms=settings.retry_backoff_ms,
        publish="SPUBLISH" if in_cluster else "PUBLISH",
    )


def _not_ready(error: TokenmillError) -> QueueNotReady:
    """Whoever restarts the worker may help when Redis is away, not when a password is wrong."""
    away = isinstance(error, QueueUnavailable) and not isinstance(error, AuthenticationFailed)
    return QueueNotReady(str(error), exit_code=os.EX_UNAVAILABLE if away else os.EX_CONFIG)

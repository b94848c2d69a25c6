"""A worker's life: check the queue, load the engine, serve, drain."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import secrets
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path

from tokenmill._redis import aconnect
from tokenmill._redis_errors import REDIS_ERRORS, translate
from tokenmill._server_check import acheck_server
from tokenmill._version import __version__
from tokenmill.calls import QueueCalls, QueuePolicy
from tokenmill.errors import (
    AuthenticationFailed,
    ConfigurationError,
    QueueUnavailable,
    TokenmillError,
)
from tokenmill_engine.errors import EngineError

from .card import Card
from .endpoints import Endpoints, Reply, json_reply
from .engine_port import Engine, EngineFactory
from .engine_thread import EngineThread
from .errors import EngineFailed, QueueNotReady, StartupError, WorkerError, describe
from .health import Health
from .intake import Identity
from .logs import fields
from .packing import pack_in_c
from .phases import Phases
from .service import Connections, Service
from .settings import Settings
from .shutdown import Shutdown

logger = logging.getLogger(__name__)

#: A step under way is waited for so long at the end.
STOP_TIMEOUT_S = 5.0


class Worker:
    """One process, one engine, one pool. `run` returns the exit code."""

    def __init__(self, settings: Settings, engine_factory: EngineFactory) -> None:
        self._settings = settings
        self._factory = engine_factory
        # A new name at every start: a name that comes back would inherit the old one's entries.
        self.id = f"{settings.name}-{os.getpid()}-{secrets.token_hex(4)}"
        self._calls = QueueCalls(settings.keyspace, _policy(settings))
        self._health = Health(stale_after_s=max(settings.lease_ms / 1000, 5.0))
        self._service: Service | None = None
        self._address = ""

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Raises:
            StartupError: the worker cannot start.
        """
        shutdown = Shutdown()
        shutdown.listen()
        settings = self._settings
        connections = self._connect()
        endpoints = Endpoints(settings.metrics_host, settings.metrics_port, self._routes())
        self._address = endpoints.address
        try:
            await self._check_queue(connections)
            async with self._card(connections).shown():
                return await self._load_and_serve(connections, shutdown)
        finally:
            await asyncio.to_thread(endpoints.close)
            await connections.close()

    async def _load_and_serve(self, connections: Connections, shutdown: Shutdown) -> int:
        phases = Phases()
        engine_thread = EngineThread(self._factory, phases)
        engine = await self._load(engine_thread, shutdown)
        if engine is None:
            logger.info("stopped while loading")
            return os.EX_OK
        phases.end()
        identity = self._identity()
        service = Service(
            self._settings,
            self._calls,
            connections,
            identity=identity,
            engine=engine,
            engine_thread=engine_thread,
            health=self._health,
        )
        self._service = service
        self._health.enter("ready")
        logger.info(
            "ready",
            extra=fields(
                model=identity.model_names[0],
                worker=self.id,
                seconds=phases.seconds,
                metrics=self._address,
            ),
        )
        try:
            handed_over = await service.run(shutdown)
        except ExceptionGroup as failures:
            _log_failures(failures)
            await service.abandon()
            return EngineFailed.exit_code
        finally:
            await engine_thread.stop(STOP_TIMEOUT_S)
        logger.info("stopped", extra=fields(handed_over=handed_over))
        return os.EX_OK if handed_over else os.EX_TEMPFAIL

    async def _load(self, engine_thread: EngineThread, shutdown: Shutdown) -> Engine | None:
        """The engine, or None if the worker is told to stop meanwhile."""
        loading = asyncio.ensure_future(engine_thread.load())
        stopping = asyncio.ensure_future(shutdown.requested.wait())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if not loading.done():
            loading.cancel()
            return None
        try:
            return loading.result()
        except (EngineError, TokenmillError, StartupError) as error:
            raise StartupError(str(error)) from None

    def _connect(self) -> Connections:
        settings = self._settings
        options = settings.redis_options(self.id)
        control = settings.redis_options(self.id, for_control=True)
        try:
            url = settings.redis_url_with_password()
            clients = [aconnect(url, chosen) for chosen in (options, options, control)]
            return Connections(*map(pack_in_c, clients))
        except ConfigurationError as error:
            raise StartupError(str(error)) from None

    async def _check_queue(self, connections: Connections) -> None:
        try:
            found = await acheck_server(connections.control)
        except REDIS_ERRORS as error:
            raise _not_ready(
                translate(error, self._settings.redis_url.get_secret_value())
            ) from None
        for finding in found:
            if finding.severity == "error":
                raise QueueNotReady(f"Redis: {finding.message}")
            logger.warning("redis: %s", finding.message)

    def _card(self, connections: Connections) -> Card:
        settings = self._settings
        return Card(
            redis=connections.control,
            key=self._calls.keys.worker_card(self.id),
            interval_s=settings.heartbeat_interval_ms / 1000,
            lease_ms=settings.lease_ms,
            facts={
                "id": self.id,
                "model": settings.model_names[0],
                "slots": settings.max_num_seqs,
                "host": platform.node(),
                "pid": os.getpid(),
                "metrics": self._address,
                "versions": {"tokenmill": __version__, "python": platform.python_version()},
            },
            state=self._card_state,
            changed=self._health.changed,
        )

    def _card_state(self) -> dict[str, object]:
        occupancy = self._service.occupancy() if self._service else {"running": 0, "waiting": 0}
        return {"state": self._health.state, **occupancy}

    def _identity(self) -> Identity:
        settings = self._settings
        # Of the folder only its name: on another host the same model has another path.
        model = Path(settings.model).name
        facts = (model, settings.revision, settings.tokenizer, settings.dtype)
        return Identity(
            worker_id=self.id,
            model_names=settings.model_names,
            fingerprint=hashlib.sha256(repr(facts).encode()).hexdigest()[:16],
            resume_any_model=settings.resume_policy == "prefix",
        )

    def _routes(self) -> dict[str, Callable[[], Reply]]:
        return {
            "/metrics": self._metrics_reply,
            "/healthz": lambda: json_reply(True, {"status": "alive"}),
            "/readyz": self._readyz_reply,
        }

    def _metrics_reply(self) -> Reply:
        if self._service is None:
            return json_reply(False, {"state": self._health.state})
        body, content_type = self._service.metrics.render()
        return HTTPStatus.OK, body, content_type

    def _readyz_reply(self) -> Reply:
        health = self._health
        return json_reply(health.is_ready, {"state": health.state, "stuck": health.stuck_loops})


def _policy(settings: Settings) -> QueuePolicy:
    return QueuePolicy(
        deadline_ms=int(settings.default_deadline_s * 1000),
        retention_ms=int(settings.retention_s * 1000),
        max_queued=settings.max_queued,
        lease_ms=settings.lease_ms,
        max_strikes=settings.max_strikes,
        max_attempts=settings.max_attempts,
        max_retries=settings.max_retries,
        backoff_ms=settings.retry_backoff_ms,
    )


def _not_ready(error: TokenmillError) -> QueueNotReady:
    """Whoever restarts the worker may help when Redis is away, not when a password is wrong."""
    away = isinstance(error, QueueUnavailable) and not isinstance(error, AuthenticationFailed)
    return QueueNotReady(str(error), exit_code=os.EX_UNAVAILABLE if away else os.EX_CONFIG)


def _log_failures(failures: BaseExceptionGroup) -> None:
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _log_failures(error)
        else:
            text = str(error) if isinstance(error, WorkerError) else describe(error)
            logger.critical("worker failed", extra=fields(error=text))

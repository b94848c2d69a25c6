"""A worker's life: check the queue, load the engine, serve, drain."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from http import HTTPStatus
from pathlib import Path

from tokenmill._version import __version__
from tokenmill.errors import TokenmillError
from tokenmill_engine.errors import EngineError

from .card import Card
from .endpoints import Endpoints, Reply, json_reply
from .engine_port import Engine, EngineFactory
from .engine_thread import EngineThread
from .errors import EngineFailed, StartupError, WorkerError, describe
from .health import Health
from .intake import Identity
from .logs import fields
from .phases import Phases
from .service import Service
from .settings import Settings
from .shutdown import Shutdown
from .tracing import OnAttempt, no_tracing, tracing
from .ways import Way, Ways

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
        self._health = Health(stale_after_s=max(settings.lease_ms / 1000, 5.0))
        self._service: Service | None = None
        self._on_attempt: OnAttempt = no_tracing
        self._address = ""

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Raises:
            StartupError: the worker cannot start.
        """
        shutdown = Shutdown()
        shutdown.listen()
        settings = self._settings
        phases = Phases()
        ways = Ways(settings, self.id)
        endpoints = Endpoints(settings.metrics_host, settings.metrics_port, self._routes())
        self._address = endpoints.address
        try:
            phases("connecting to the queue")
            opened = await ways.open()
            async with AsyncExitStack() as shown:
                model = settings.model_names[0]
                self._on_attempt = await shown.enter_async_context(tracing(self.id, model))
                await shown.enter_async_context(ways.kept())
                for way in opened:
                    await shown.enter_async_context(self._card(way).shown())
                return await self._load_and_serve(opened, shutdown, phases)
        finally:
            await asyncio.to_thread(endpoints.close)
            await ways.close()

    async def _load_and_serve(self, ways: Sequence[Way], shutdown: Shutdown, phases: Phases) -> int:
        engine_thread = EngineThread(self._factory, phases)
        engine = await self._load(engine_thread, shutdown)
        if engine is None:
            logger.info("stopped while loading")
            return os.EX_OK
        phases.end()
        identity = self._identity()
        service = Service(
            self._settings,
            ways,
            identity=identity,
            engine=engine,
            engine_thread=engine_thread,
            health=self._health,
            on_attempt=self._on_attempt,
        )
        self._service = service
        service.metrics.started(phases.durations_s, phases.seconds)
        self._health.enter("ready")
        logger.info(
            "ready",
            extra=fields(
                model=identity.model_names[0],
                worker=self.id,
                seconds=round(phases.seconds, 2),
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

    def _card(self, way: Way) -> Card:
        settings = self._settings
        return Card(
            redis=way.connections.control,
            keys=way.calls.keys,
            worker_id=self.id,
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


def _log_failures(failures: BaseExceptionGroup) -> None:
    for error in failures.exceptions:
        if isinstance(error, BaseExceptionGroup):
            _log_failures(error)
        else:
            text = str(error) if isinstance(error, WorkerError) else describe(error)
            logger.critical("worker failed", extra=fields(error=text))

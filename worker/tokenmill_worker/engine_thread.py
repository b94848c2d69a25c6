"""The one thread that owns the engine: commands go in between steps, events come out.

It never touches Redis, and nothing else touches the engine. What leaves the thread is put into a
queue of the event loop, one event per step.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill_engine.outputs import EngineStats, RequestOutput

from .conversion import EngineRequest
from .engine_port import Engine, EngineFactory
from .errors import EngineFailed, describe


@dataclass(frozen=True, slots=True)
class Submit:
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class Abort:
    attempt_id: str


@dataclass(frozen=True, slots=True)
class SetPaused:
    """A paused engine keeps its requests and takes no step."""

    paused: bool


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = Submit | Abort | SetPaused | Stop


@dataclass(frozen=True, slots=True)
class Stepped:
    outputs: list[RequestOutput]
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Refused:
    """The engine did not take a request; its neighbours are not affected."""

    attempt_id: str
    error: Exception


EngineEvent = Stepped | Refused


class EngineThread:
    """Create and use on the event loop; `events` is what the engine did, in order."""

    def __init__(self, factory: EngineFactory, on_phase: Callable[[str], None]) -> None:
        self._factory = factory
        self._on_phase = on_phase  # called on the engine thread
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._busy_since_s: float | None = None  # monotonic; None while it waits for commands
        self._pauses: set[str] = set()  # reasons, on the loop's side
        self._paused = False  # on the thread's side
        self._stopping = False
        self._loaded: asyncio.Future[Engine] = self._loop.create_future()
        self._failed: asyncio.Future[None] = self._loop.create_future()
        self.events: asyncio.Queue[EngineEvent] = asyncio.Queue()

    async def load(self) -> Engine:
        """Start the thread and wait for the engine. Raises what the factory raised."""
        self._thread.start()
        return await self._loaded

    def submit(self, request: EngineRequest) -> None:
        self._commands.put(Submit(request))

    def abort(self, attempt_id: str) -> None:
        self._commands.put(Abort(attempt_id))

    def pause(self, reason: str, wanted: bool = True) -> None:
        """Take no more steps while any reason is wanted."""
        before = bool(self._pauses)
        (self._pauses.add if wanted else self._pauses.discard)(reason)
        if bool(self._pauses) is not before:
            self._commands.put(SetPaused(bool(self._pauses)))

    async def stop(self, timeout_s: float) -> None:
        """End the thread after the step it is in; give up waiting after `timeout_s`."""
        self._commands.put(Stop())
        await asyncio.to_thread(self._thread.join, timeout_s)

    async def wait_for_failure(self) -> None:
        """Never returns; raises `EngineFailed` when a step raised."""
        await self._failed

    @property
    def busy_s(self) -> float:
        """How long the engine has been inside one call; 0 when it is idle."""
        since_s = self._busy_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    # ---- on the engine thread ----

    def _run(self) -> None:
        try:
            engine = self._factory(self._on_phase)
        except Exception as error:  # noqa: BLE001 - raised again by load()
            self._tell(_set_exception, self._loaded, error)
            return
        self._tell(_set_result, self._loaded, engine)
        try:
            while not self._stopping:
                self._obey(engine)
                if not self._paused and not self._stopping and engine.has_unfinished_requests:
                    self._step(engine)
        except Exception as error:  # noqa: BLE001 - crosses to the loop, which ends the worker
            failure = EngineFailed(f"the engine failed: {describe(error)}")
            self._tell(_set_exception, self._failed, failure)

    def _obey(self, engine: Engine) -> None:
        """Do all waiting commands; with nothing to compute, sleep until there is one."""
        idle = self._paused or not engine.has_unfinished_requests
        while not self._stopping:
            try:
                command = self._commands.get(block=idle)
            except queue.Empty:
                return
            self._busy_since_s = time.monotonic()
            self._do(engine, command)
            self._busy_since_s = None
            idle = False

    def _do(self, engine: Engine, command: Command) -> None:
        match command:
            case Submit(request):
                self._add(engine, request)
            case Abort(attempt_id):
                engine.abort_request(attempt_id)
                # Perhaps no step follows that would tell that there is room again.
                self._tell(self.events.put_nowait, Stepped([], engine.stats()))
            case SetPaused(paused):
                self._paused = paused
            case Stop():
                self._stopping = True

    def _add(self, engine: Engine, request: EngineRequest) -> None:
        try:
            engine.add_request(
                request.attempt_id,
                request.prompt_token_ids,
                request.params,
                output_token_ids=request.output_token_ids,
                emitted_chars=request.emitted_chars,
                priority=request.priority,
                cache_salt=request.cache_salt,
                alone=request.alone,
            )
        except Exception as error:  # noqa: BLE001 - one request's failure is not its neighbours'
            self._tell(self.events.put_nowait, Refused(request.attempt_id, error))

    def _step(self, engine: Engine) -> None:
        self._busy_since_s = time.monotonic()
        outputs = engine.step()
        self._busy_since_s = None
        self._tell(self.events.put_nowait, Stepped(outputs, engine.stats()))

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: the worker is gone, and nobody listens
            self._stopping = True


def _set_result(future: asyncio.Future[Engine], engine: Engine) -> None:
    if not future.done():
        future.set_result(engine)


def _set_exception(future: asyncio.Future[object], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)

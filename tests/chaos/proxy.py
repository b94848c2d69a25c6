"""A proxy in front of Redis that can stall, swallow, cut and delay, on an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self
from urllib.parse import urlsplit

#: hole: nothing gets through, connections stay open. noreply: requests arrive, replies wait.
#: refuse: new connections are dropped at once.
Mode = Literal["pass", "hole", "noreply", "refuse"]
CHUNK_BYTES = 65_536
HOLD_S = 0.01


@dataclass
class Proxy:
    """Listens on a free port of 127.0.0.1. `mode`, `cut_share` and `delay_s` may be set at any
    time, from any thread; `upstream` (redis:// or unix://) counts for new connections.

    `cut_share` of the replies (as they arrive, a TCP chunk each) are dropped together with their
    connection; every other one is held back for `delay_s`.
    """

    upstream: str
    mode: Mode = "pass"
    cut_share: float = 0.0
    delay_s: float = 0.0
    seed: int = 7
    num_cuts: int = field(default=0, init=False)
    url: str = field(default="", init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._loop = asyncio.new_event_loop()
        self._links: set[_Link] = set()
        self._listening = threading.Event()
        self._closing = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="chaos-proxy", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._listening.wait(5), "the proxy did not start"
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(5)

    def cut(self) -> None:
        """Drop every connection, with whatever was held back."""
        done = threading.Event()
        self._loop.call_soon_threadsafe(self._abort_all, done)
        done.wait(5)

    # ---- on the proxy's thread ----

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"
        self._listening.set()
        await self._closing.wait()
        self.mode = "pass"
        server.close()
        self._abort_all()
        while self._links:  # noqa: ASYNC110 - their own tasks empty it, in a moment
            await asyncio.sleep(HOLD_S)

    def _abort_all(self, done: threading.Event | None = None) -> None:
        for link in list(self._links):
            link.abort()
            self.num_cuts += 1
        if done is not None:
            done.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.mode == "refuse":
            writer.transport.abort()
            return
        try:
            upstream = await _dial(self.upstream)
        except OSError:
            writer.transport.abort()
            return
        link = _Link((reader, writer), upstream)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, reader, upstream[1], is_reply=False))
                group.create_task(self._pump(link, upstream[0], writer, is_reply=True))
        finally:
            self._links.discard(link)
            link.abort()

    async def _pump(
        self,
        link: _Link,
        source: asyncio.StreamReader,
        sink: asyncio.StreamWriter,
        *,
        is_reply: bool,
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(CHUNK_BYTES):
                if not await self._let_through(link, is_reply=is_reply):
                    break
                sink.write(chunk)
                await sink.drain()
        link.abort()

    async def _let_through(self, link: _Link, *, is_reply: bool) -> bool:
        while self.mode == "hole" or (  # noqa: ASYNC110 - other threads set the mode
            is_reply and self.mode == "noreply"
        ):
            await asyncio.sleep(HOLD_S)
        if is_reply and self._random.random() < self.cut_share:
            self.num_cuts += 1
            return False
        if is_reply and self.delay_s:
            await asyncio.sleep(self.delay_s)
        return not link.aborted


Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(eq=False)
class _Link:
    client: Connection
    server: Connection
    aborted: bool = False

    def abort(self) -> None:
        self.aborted = True
        for _, writer in (self.client, self.server):
            writer.transport.abort()


async def _dial(url: str) -> Connection:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return await asyncio.open_unix_connection(parts.path)
    return await asyncio.open_connection(parts.hostname, parts.port)

"""Readers of streams through the real SDK, and everything that it handed out to them."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support_worker import expected_tokens
from tokenmill import AsyncClient, Client
from tokenmill._session import StreamStats
from tokenmill.errors import TokenmillError
from tokenmill.keys import Keyspace
from tokenmill.protocol import EndEvent, Event, RewindEvent, TokenEvent

SEED = 7


@dataclass(frozen=True)
class Request:
    """What is asked; `options` are further keywords of `stream()`."""

    id: str
    prompt: str
    max_tokens: int
    tenant: str = "default"
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def keywords(self) -> dict[str, Any]:
        fixed = {"request_id": self.id, "max_tokens": self.max_tokens, "tenant": self.tenant}
        return {**fixed, "seed": SEED, **self.options}

    def expected(self, count: int) -> list[int]:
        """The first `count` tokens that the fake engine gives in any number of attempts."""
        return expected_tokens(self.prompt.encode(), SEED, min(count, self.max_tokens))


def requests(count: int = 40, tokens: int = 120, *, spread: int = 40) -> list[Request]:
    """Of three tenants; `tokens` to `tokens + spread` long, so that they do not end together."""
    return [
        Request(
            id=f"request-{number:03d}",
            prompt=f"prompt {number}",
            max_tokens=tokens + (number * 7) % max(spread, 1),
            tenant=f"tenant-{number % 3}",
        )
        for number in range(count)
    ]


@dataclass
class Transcript:
    """One stream, as its reader saw it. Written by the reader's thread alone."""

    request: Request
    events: list[Event] = field(default_factory=list)
    error: BaseException | None = None
    stats: StreamStats = field(default_factory=StreamStats)
    token_ids: list[int] = field(default_factory=list)  # with rewinds applied
    num_rewinds: int = 0
    num_missing: int = 0  # tokens that a later one skipped
    num_repeated: int = 0  # tokens handed out again without a rewind
    opened_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None

    def take(self, event: Event) -> None:
        self.events.append(event)
        if isinstance(event, TokenEvent):
            self.first_token_s = self.first_token_s or time.monotonic()
            self.num_missing += max(0, event.index - len(self.token_ids))
            self.num_repeated += max(0, len(self.token_ids) - event.index)
            self.token_ids += event.token_ids
        elif isinstance(event, RewindEvent):
            self.num_rewinds += 1
            del self.token_ids[event.index :]

    def close(self, error: BaseException | None, stats: StreamStats) -> None:
        self.error, self.stats = error, stats
        self.ended_s = time.monotonic()

    @property
    def ends(self) -> list[EndEvent]:
        return [event for event in self.events if isinstance(event, EndEvent)]

    @property
    def text(self) -> str:
        """Without rewinds only: what was shown, in a row."""
        shown = [e.text for e in self.events if isinstance(e, TokenEvent | EndEvent)]
        return "".join(shown)

    @property
    def first_token_after_s(self) -> float:
        assert self.first_token_s is not None, f"{self.request.id}: no token came"
        return self.first_token_s - self.opened_s


class Audience:
    """Readers in the background; `transcripts` grow while they read."""

    def __init__(self) -> None:
        self.transcripts: dict[str, Transcript] = {}

    def read(self, wanted: Iterable[Request]) -> list[Transcript]:
        """Open a stream for each, all at once."""
        opened = [Transcript(request) for request in wanted]
        self.transcripts |= {transcript.request.id: transcript for transcript in opened}
        self._open(opened)
        return opened

    @property
    def all_ended(self) -> bool:
        return all(transcript.ended_s is not None for transcript in self.transcripts.values())

    def num_streaming(self, num_tokens: int) -> int:
        """Streams under way that have brought so many tokens."""
        return sum(
            len(transcript.token_ids) >= num_tokens and transcript.ended_s is None
            for transcript in list(self.transcripts.values())
        )

    def close(self) -> None:
        raise RuntimeError("this audience has no client")

    def _open(self, transcripts: Sequence[Transcript]) -> None:
        raise RuntimeError("this audience has no client")


class Threads(Audience):
    """One `Client`, a thread per stream. `pause_s`: how long a reader thinks about an event."""

    def __init__(self, url: str, keys: Keyspace, *, pause_s: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.client = Client(url, namespace=keys.namespace, pool=keys.pool, **options)
        self.pause_s = pause_s
        self._threads: list[threading.Thread] = []

    def close(self) -> None:
        self.client.close()
        for thread in self._threads:
            thread.join(5)

    def _open(self, transcripts: Sequence[Transcript]) -> None:
        for transcript in transcripts:
            thread = threading.Thread(target=self._read, args=(transcript,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self, transcript: Transcript) -> None:
        request, error = transcript.request, None
        transcript.opened_s = time.monotonic()
        stream = None
        try:
            with self.client.stream(request.prompt, **request.keywords) as stream:
                for event in stream.events():
                    transcript.take(event)
                    if self.pause_s:
                        time.sleep(self.pause_s)
        except (TokenmillError, RuntimeError) as raised:
            error = raised
        transcript.close(error, stream._state.stats if stream else StreamStats())


class Tasks(Audience):
    """One `AsyncClient` on an event loop in a thread of its own, a task per stream."""

    def __init__(self, url: str, keys: Keyspace, *, pause_s: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.pause_s = pause_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.client = self._do(_client(url, keys, options))
        self._tasks: set[asyncio.Task[None]] = set()

    def close(self) -> None:
        self._do(self.client.aclose())
        self._do(self._cancel_readers())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def _open(self, transcripts: Sequence[Transcript]) -> None:
        self._do(self._start_readers(transcripts))

    def _do(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _start_readers(self, transcripts: Sequence[Transcript]) -> None:
        self._tasks |= {asyncio.create_task(self._read(transcript)) for transcript in transcripts}

    async def _cancel_readers(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _read(self, transcript: Transcript) -> None:
        request, error = transcript.request, None
        transcript.opened_s = time.monotonic()
        stream = None
        try:
            async with self.client.stream(request.prompt, **request.keywords) as stream:
                async for event in stream.events():
                    transcript.take(event)
                    if self.pause_s:
                        await asyncio.sleep(self.pause_s)
        except (TokenmillError, RuntimeError) as raised:
            error = raised
        transcript.close(error, stream._state.stats if stream else StreamStats())


async def _client(url: str, keys: Keyspace, options: dict[str, Any]) -> AsyncClient:
    return AsyncClient(url, namespace=keys.namespace, pool=keys.pool, **options)

"""A worker without a model, for the tests of programs that use Tokenmill.

    server = fakeredis.FakeServer()
    redis = fakeredis.FakeRedis(server=server, decode_responses=True)
    with FakeWorker(redis, lambda prompt: "Hello there"), Client(redis=redis) as client:
        assert client.generate("Hi").text == "Hello there"

It speaks the real protocol with the real scripts, on fakeredis or a real server. In a `with` block
it works in a thread of its own; without one, `step()` makes one token for every running request,
so that a test decides what happens when.
"""

from __future__ import annotations

import json
import re
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ._events import parse_event
from .calls import AppendEvent, QueueCalls, QueuePolicy
from .errors import InvalidRequest
from .keys import GROUP, Keyspace
from .protocol import GenerateRequest, Message, TokenEvent
from .ready import create_groups, read_entries
from .replies import LOST, AdmitStatus, Lease, LeaseCode, ReadyEntry
from .scripts import run

if TYPE_CHECKING:
    from redis import Redis

#: Gets the prompt as it was sent; returns the text, or one piece of text per token.
Answer = Callable[[str | list[int] | list[Message]], str | Iterable[str]]

_TICK_AT_MOST_EVERY_S = 0.25
_BLOCK_MS = 20


def pieces_of(text: str) -> list[str]:
    """Text cut into the worker's tokens: a word with the space behind it."""
    return re.findall(r"\S+\s*|\s+", text)


def token_id_of(piece: str) -> int:
    """The id that the worker gives to a token: the same text, the same id."""
    return zlib.crc32(piece.encode()) % 50_000


@dataclass(slots=True)
class _Running:
    lease: Lease
    request: GenerateRequest
    pieces: Iterator[str]
    seq: int  # events in the log
    index: int  # tokens in the log


class FakeWorker:
    """Leases requests and answers them token by token with what `answer` returns.

    An `InvalidRequest` raised by `answer` ends the request as `invalid_request`, any other
    exception as `internal`.
    """

    def __init__(
        self,
        redis: Redis,
        answer: Answer,
        *,
        namespace: str = "tokenmill",
        pool: str = "default",
        worker_id: str = "fake-worker",
        policy: QueuePolicy | None = None,
    ) -> None:
        self.keys = Keyspace(namespace, pool)
        self.worker_id = worker_id
        self._redis = redis
        self._answer = answer
        self._calls = QueueCalls(self.keys, policy)
        self._running: dict[str, _Running] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        create_groups(redis, self.keys)

    @property
    def running(self) -> list[str]:
        """Ids of the requests under way."""
        return list(self._running)

    def step(self, *, block_ms: int | None = None) -> bool:
        """Take what waits, then one token or the end for every request; False if idle.

        `block_ms`: when nothing runs, wait that long for a request.
        """
        self._take(None if self._running else block_ms)
        running = list(self._running.values())
        for request in running:
            self._advance(request)
        return bool(running)

    def tick(self) -> None:
        """Renew the leases, then one round of the queue's maintenance (deadlines, lost leases)."""
        leases = [running.lease for running in self._running.values()]
        codes = run(self._redis, self._calls.heartbeat(self.worker_id, leases))
        for lease, code in zip(leases, codes, strict=True):
            if code == LOST:
                self._running.pop(lease.request_id, None)
        run(self._redis, self._calls.tick(jitter=0.5))

    def hand_over(self) -> None:
        """Give everything back, as a worker that drains: another one continues."""
        for running in self._running.values():
            run(self._redis, self._calls.hand_over(running.lease.request_id, running.lease.fence))
        self._running.clear()

    def vanish(self) -> None:
        """Forget everything without a word, as a worker that was killed."""
        self._running.clear()

    def __enter__(self) -> Self:
        self._stop.clear()
        self._thread = threading.Thread(target=self._work, name="tokenmill-fake-worker")
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        # Several ticks to a lease: with fewer, the queue takes the pause for an outage.
        tick_every_s = min(_TICK_AT_MOST_EVERY_S, self._calls.policy.lease_ms / 5000)
        tick_at = 0.0
        while not self._stop.is_set():
            self.step(block_ms=_BLOCK_MS)
            if time.monotonic() >= tick_at:
                self.tick()
                tick_at = time.monotonic() + tick_every_s

    def _take(self, block_ms: int | None) -> None:
        streams: dict[Any, Any] = dict.fromkeys(self.keys.ready_streams.values(), ">")
        entries = read_entries(
            self.keys,
            self._redis.xreadgroup(GROUP, self.worker_id, streams, count=64, block=block_ms),
        )
        entries = [entry for entry in entries if self._admit(entry)]
        if not entries:
            return
        replies = run(self._redis, self._calls.lease(self.worker_id, entries))
        for reply in replies:
            if reply.lease is not None:
                self._start(reply.lease)
        if any(reply.code is LeaseCode.PAUSED for reply in replies):
            self._stop.wait(_BLOCK_MS / 1000)  # it is back in the queue, and would come at once

    def _admit(self, entry: ReadyEntry) -> bool:
        """Make the record of a request that came by plain XADD."""
        if entry.body is None:
            return True
        return run(self._redis, self._calls.admit(entry)) is AdmitStatus.OK

    def _start(self, lease: Lease) -> None:
        request = GenerateRequest.model_validate_json(lease.body)
        running = _Running(lease, request, iter(()), seq=lease.num_events, index=0)
        log: Any = self._redis.xrange(self.keys.log(lease.request_id))
        for _, fields in log:
            event = parse_event(fields["d"])
            if isinstance(event, TokenEvent):
                running.index += len(event.token_ids)
        self._running[lease.request_id] = running
        if not self._append(running, ev="start", i=running.index, w=self.worker_id):
            return
        try:
            answer = self._answer(_prompt_of(request))
        except InvalidRequest as error:
            self._finish(running, "failed", code=error.code, msg=str(error))
        except Exception as error:  # noqa: BLE001  # whatever the test's function does
            self._finish(running, "failed", code="internal", msg=type(error).__name__)
        else:
            pieces = pieces_of(answer) if isinstance(answer, str) else answer
            running.pieces = islice(pieces, running.index, None)

    def _advance(self, running: _Running) -> None:
        if running.lease.request_id not in self._running:
            return
        if running.index >= running.request.max_tokens:
            self._finish(running, "done", fin="length")
            return
        piece = next(running.pieces, None)
        if piece is None:
            self._finish(running, "done", fin="stop")
            return
        token_id = token_id_of(piece)
        fields: dict[str, Any] = {"i": running.index, "k": [token_id], "t": piece}
        if running.request.logprobs is not None:
            fields["lp"] = [[[token_id, -0.125, 1, piece]]]
        if self._append(running, **fields):
            running.index += 1

    def _append(self, running: _Running, **fields: Any) -> bool:
        lease = running.lease
        payload = json.dumps({"e": running.seq + 1, "a": lease.attempt, **fields})
        event = AppendEvent(lease.request_id, lease.fence, running.seq + 1, payload)
        (code,) = run(self._redis, self._calls.append([event]))
        if code == LOST:
            self._running.pop(lease.request_id, None)
            return False
        running.seq += 1
        return True

    def _finish(self, running: _Running, state: Any, **fields: Any) -> None:
        lease = running.lease
        self._running.pop(lease.request_id, None)
        prompt_tokens = _prompt_tokens(running.request)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": running.index,
            "total_tokens": prompt_tokens + running.index,
        }
        seq = running.seq + 1
        end = {"e": seq, "ev": "end", "a": lease.attempt, "st": state, "n": running.index, **fields}
        if running.request.meta is not None:
            end["meta"] = running.request.meta
        event = AppendEvent(lease.request_id, lease.fence, seq, json.dumps({**end, "usage": usage}))
        call = self._calls.finish(
            event,
            state=state,
            usage=json.dumps(usage),
            code=fields.get("code", ""),
            message=fields.get("msg", ""),
            facts=json.dumps({"prompt_tokens": prompt_tokens, "tokens": running.index}),
        )
        run(self._redis, call)


def _prompt_of(request: GenerateRequest) -> str | list[int] | list[Message]:
    prompt = request.prompt or request.prompt_token_ids or request.messages
    assert prompt is not None
    return prompt


def _prompt_tokens(request: GenerateRequest) -> int:
    prompt = _prompt_of(request)
    return len(pieces_of(prompt)) if isinstance(prompt, str) else len(prompt)


__all__ = ["Answer", "FakeWorker", "pieces_of", "token_id_of"]

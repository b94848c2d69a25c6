"""The demo's requests: all at once, each with the times that the report needs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenmill import AsyncClient
from tokenmill.protocol import EndEvent, TokenEvent


@dataclass(slots=True)
class StreamRecord:
    """One request, as its client saw it. Times are monotonic, in seconds."""

    number: int
    question: str
    started_s: float = 0.0
    first_token_s: float | None = None
    ended_s: float | None = None
    num_tokens: int = 0
    finish_reason: str = ""
    text: str = ""

    def take_tokens(self, count: int) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.monotonic()
        self.num_tokens += count

    def end(self, reason: str) -> None:
        self.ended_s = time.monotonic()
        self.finish_reason = reason

    @property
    def time_to_first_token_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def tokens_per_s(self) -> float | None:
        """After the first token: how fast the answer was written."""
        if self.first_token_s is None or self.ended_s is None or self.num_tokens < 2:
            return None
        return (self.num_tokens - 1) / (self.ended_s - self.first_token_s)


#: Told of each piece of text as it arrives, and once (with "") at the end of a request.
OnText = Callable[[StreamRecord, str], None]


async def stream_all(
    client: AsyncClient, records: Sequence[StreamRecord], *, max_tokens: int, on_text: OnText
) -> None:
    """Send every question at once and follow all answers to their end."""
    async with asyncio.TaskGroup() as tasks:
        for record in records:
            tasks.create_task(_stream_one(client, record, max_tokens, on_text))


async def _stream_one(
    client: AsyncClient, record: StreamRecord, max_tokens: int, on_text: OnText
) -> None:
    record.started_s = time.monotonic()
    messages = [{"role": "user", "content": record.question}]
    async with client.stream(messages, max_tokens=max_tokens, temperature=0.0) as stream:
        async for event in stream.events():
            if isinstance(event, TokenEvent):
                record.take_tokens(len(event.token_ids))
            elif isinstance(event, EndEvent):
                record.end(event.finish_reason or event.status)
            if isinstance(event, TokenEvent | EndEvent) and event.text:
                record.text += event.text
                on_text(record, event.text)
    on_text(record, "")

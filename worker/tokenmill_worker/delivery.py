"""One leased request: its events, what is not yet written, and how it is to end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from json.encoder import encode_basestring as quoted
from typing import Any, Literal

from pydantic_core import to_json

from tokenmill.protocol import ErrorCode, FinishReason, Usage
from tokenmill.replies import Lease
from tokenmill_engine.outputs import RequestOutput

#: Tokens carried by one event at most; with logprobs fewer, because each brings up to 21 texts.
EVENT_TOKENS = 256
EVENT_TOKENS_WITH_LOGPROBS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """The end event to be written once all other events are stored."""

    status: Literal["done", "failed"]
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    text: str = ""  # held back by the detokenizer, with no token to travel with
    code: ErrorCode | None = None
    message: str | None = None


@dataclass(slots=True)
class Times:
    """On the monotonic clock, in seconds."""

    leased_s: float = field(default_factory=time.monotonic)
    submitted_s: float | None = None  # to the engine
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass(slots=True, eq=False)
class Delivery:
    """The state of one attempt. Belongs to the event loop; no other thread touches it."""

    lease: Lease
    #: The name inside the engine: attempts of one request never mix, nor do requests that had one
    #: id after another.
    attempt_id: str = field(init=False)
    times: Times = field(default_factory=Times)
    #: The JSON of every event so far, that of number e at index e - 1. Kept until the end, because
    #: Redis may lose the end of a log (failover) and then asks for it again.
    events: list[str] = field(default_factory=list)
    acked: int = 0  # events known to be in the log
    num_tokens: int = 0  # tokens in `events`
    num_resumed_tokens: int = 0  # those of them that earlier attempts made
    pending: list[RequestOutput] = field(default_factory=list)  # not yet made into events
    ending: Ending | None = None
    finishing: bool = False  # the end event is on its way
    usage: Usage = field(default_factory=Usage)
    latest: RequestOutput | None = None  # of this attempt: its counts are totals so far
    prompt_tokens: int | None = None  # None: not tokenized yet
    max_tokens: int = 0
    meta: dict[str, Any] | None = None
    expiry: asyncio.TimerHandle | None = None
    stored: asyncio.Event | None = None  # if set: told of every write, and of the removal
    partition: int = 0

    def __post_init__(self) -> None:
        self.attempt_id = f"{self.lease.request_id}/{self.lease.fence}"

    @property
    def ids(self) -> dict[str, str]:
        """For log lines: the request, and the trace it belongs to, if any."""
        trace = self.lease.traceparent.split("-")
        ids = {"request": self.lease.request_id}
        return ids | {"trace": trace[1]} if len(trace) == 4 else ids

    @property
    def next_seq(self) -> int:
        return len(self.events) + 1

    @property
    def is_stored(self) -> bool:
        """Whether everything that was generated is in the log."""
        return not self.pending and self.acked == len(self.events)

    @property
    def num_unstored_tokens(self) -> int:
        """Generated, but not known to be in the log."""
        unstored = [json.loads(event).get("k", ()) for event in self.events[self.acked :]]
        unstored += [output.new_token_ids for output in self.pending]
        return sum(map(len, unstored))

    @property
    def num_output_tokens(self) -> int:
        """All tokens so far, of earlier attempts too."""
        return self.num_resumed_tokens if self.latest is None else self.latest.num_output_tokens

    @property
    def made_progress(self) -> bool:
        """Whether this attempt stored more than its start event: then a crash is not its fault."""
        return self.acked > self.lease.num_events + 1

    def restore(self, events: list[str], num_tokens: int) -> None:
        """Take over the log of earlier attempts."""
        self.events = events
        self.acked = len(events)
        self.num_tokens = self.num_resumed_tokens = num_tokens

    def add_event(self, **event: object) -> None:
        """Append an event; fields that are None are left out."""
        numbered = {"e": self.next_seq, **event, "a": self.lease.attempt}
        self.events.append(_dump(numbered))

    def add_tokens(
        self, token_ids: Sequence[int], text: str, logprobs: Sequence[object] | None
    ) -> None:
        """Append the event of the next tokens.

        This runs for every token, so its JSON is put together by hand: an encoder takes twice as
        long.
        """
        ids = token_ids[0] if len(token_ids) == 1 else ",".join(map(str, token_ids))
        more = f',"lp":{to_json(logprobs).decode()}' if logprobs else ""
        self.events.append(
            f'{{"e":{len(self.events) + 1},"i":{self.num_tokens},"k":[{ids}],"t":{quoted(text)}'
            f'{more},"a":{self.lease.attempt}}}'
        )
        self.num_tokens += len(token_ids)

    def start(self, worker_id: str) -> None:
        self.add_event(ev="start", i=self.num_tokens, w=worker_id)

    def acknowledge(self, seq: int) -> None:
        """Event `seq` is in the log, by this call or an earlier one."""
        self.acked = max(self.acked, seq)
        if self.stored is not None:
            self.stored.set()

    def rewind_to(self, num_events: int) -> None:
        """The log holds fewer events than were acknowledged: the rest is to be sent again."""
        self.acked = min(num_events, len(self.events))

    def take_pending(self) -> Sequence[Sequence[RequestOutput]]:
        """Everything pending, in runs that fit one event each."""
        outputs, self.pending = self.pending, []
        return [outputs] if len(outputs) == 1 else list(_runs(outputs))

    def facts(self) -> str:
        """JSON of numbers for the request's history: what this attempt did. Times in ms.

        `first_token_ms` counts from the enqueue and is absent when an earlier attempt gave it.
        """
        latest, times = self.latest or RequestOutput(self.attempt_id), self.times
        first_s, submitted_s = times.first_token_s, times.submitted_s
        prefill_ms = first_token_ms = None
        if first_s is not None and submitted_s is not None:
            prefill_ms = round((first_s - submitted_s) * 1000)
            if not self.num_resumed_tokens:
                first_token_ms = self.lease.waited_ms + round((first_s - times.leased_s) * 1000)
        return _dump({
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": latest.num_cached_tokens,
            "prefill_chunks": latest.num_prefill_chunks,
            "prefill_ms": prefill_ms,
            "tokens": self.num_output_tokens,
            "preemptions": latest.num_preemptions,
            "first_token_ms": first_token_ms,
        })  # fmt: skip

    def end_event(self, ending: Ending) -> str:
        """The JSON of the end event, to be stored under `next_seq`."""
        return _dump({
            "e": self.next_seq,
            "ev": "end",
            "st": ending.status,
            "fin": ending.finish_reason,
            "sr": ending.stop_reason,
            "n": self.num_tokens,
            "t": ending.text or None,
            "usage": self.usage.model_dump() if ending.status == "done" else None,
            "code": ending.code,
            "msg": ending.message,
            "meta": self.meta,
            "a": self.lease.attempt,
        })  # fmt: skip


class Deliveries:
    """The requests that a worker holds of one partition, by attempt id. All its lanes share
    `changed`: the room that one of them gives up is room for the others."""

    def __init__(self, changed: asyncio.Event | None = None) -> None:
        self._by_attempt: dict[str, Delivery] = {}
        self.changed = changed or asyncio.Event()  # set whenever one comes or goes
        self.unwritten = asyncio.Event()  # set whenever one may have something to write

    def __len__(self) -> int:
        return len(self._by_attempt)

    def __iter__(self) -> Iterator[Delivery]:
        return iter(list(self._by_attempt.values()))

    def __contains__(self, delivery: Delivery) -> bool:
        return self._by_attempt.get(delivery.attempt_id) is delivery

    def get(self, attempt_id: str) -> Delivery | None:
        return self._by_attempt.get(attempt_id)

    def write_soon(self) -> None:
        """One may have something to write."""
        self.unwritten.set()

    def add(self, delivery: Delivery) -> None:
        self._by_attempt[delivery.attempt_id] = delivery
        self.changed.set()

    def remove(self, delivery: Delivery) -> None:
        if delivery.expiry is not None:
            delivery.expiry.cancel()
        if delivery.stored is not None:
            delivery.stored.set()
        self._by_attempt.pop(delivery.attempt_id, None)
        self.changed.set()


class DeliveriesOfLanes:
    """Those of all lanes, by partition."""

    def __init__(self, lanes: Mapping[int, Deliveries], changed: asyncio.Event) -> None:
        self._lanes = lanes
        self.changed = changed

    def __len__(self) -> int:
        return sum(map(len, self._lanes.values()))

    def __iter__(self) -> Iterator[Delivery]:
        return chain.from_iterable(self._lanes.values())

    def __contains__(self, delivery: Delivery) -> bool:
        return delivery in self._lanes[delivery.partition]

    def get(self, attempt_id: str) -> Delivery | None:
        for lane in self._lanes.values():
            delivery = lane.get(attempt_id)
            if delivery is not None:
                return delivery
        return None

    def add(self, delivery: Delivery) -> None:
        self._lanes[delivery.partition].add(delivery)

    def remove(self, delivery: Delivery) -> None:
        self._lanes[delivery.partition].remove(delivery)

    def write_soon(self) -> None:
        """Any of them may have something to write."""
        for lane in self._lanes.values():
            lane.write_soon()


#: Of a worker: with one lane, those of that lane.
AllDeliveries = Deliveries | DeliveriesOfLanes


def _runs(outputs: Sequence[RequestOutput]) -> Iterator[list[RequestOutput]]:
    run: list[RequestOutput] = []
    size = 0
    for output in outputs:
        limit = EVENT_TOKENS_WITH_LOGPROBS if output.logprobs else EVENT_TOKENS
        if run and size + len(output.new_token_ids) > limit:
            yield run
            run, size = [], 0
        run.append(output)
        size += len(output.new_token_ids)
    if run:
        yield run


def _dump(event: dict[str, object]) -> str:
    """Compact JSON without empty fields; text travels as UTF-8, not as escapes."""
    return to_json({name: value for name, value in event.items() if value is not None}).decode()

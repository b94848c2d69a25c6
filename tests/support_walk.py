"""A random walk over the queue's scripts: two workers, clients, foreign producers and mishaps.

After every step the whole keyspace is read and checked: the invariants, and against what the walk
remembers (nothing accepted is lost, what has ended stays as it is, what is stored is published).
Time is not waited for: deadlines, due times and idle times are moved in Redis.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import redis

from support_invariants import applying_deadlines, check_invariants, check_lag_is_known
from support_snapshot import Snapshot, take_snapshot
from tokenmill.calls import AppendEvent, QueueCalls, QueuePolicy
from tokenmill.keys import GROUP, READY_CLASSES, Keyspace
from tokenmill.operator_calls import OperatorCalls
from tokenmill.protocol import TERMINAL_STATES
from tokenmill.ready import create_groups, read_entries
from tokenmill.replies import Lease, LeaseCode, ReadyEntry
from tokenmill.scripts import Script, ScriptCall, load_script, run

T = TypeVar("T")

WORKERS = ("worker-a", "worker-b")
#: All times are longer than a walk takes, also on a busy machine.
POLICY = QueuePolicy(
    deadline_ms=1_000_000, retention_ms=500_000, max_queued=9, max_queued_per_tenant=6, window=2,
    max_body_bytes=200, lease_ms=600_000, max_strikes=2, max_attempts=3, max_retries=1,
    max_deliveries=3, dead_letter_body_ms=700_000,
)  # fmt: skip
#: A walk in so many forgets the bodies of dead requests, and one in so many has a cap.
WITHOUT_BODIES = 3
WITH_CAP = 2
MARKER = "marker"
#: Ended requests that are kept in Redis; older ones reach the end of their retention.
KEPT = 3


@dataclass
class Memory:
    """What the walk knows besides Redis."""

    bodies: dict[str, str] = field(default_factory=dict)  # accepted requests
    plain: set[str] = field(default_factory=set)  # ids of plain XADDs
    forgotten: set[str] = field(default_factory=set)  # their lifetime is over
    attempts: dict[str, int] = field(default_factory=dict)
    ended: dict[str, Any] = field(default_factory=dict)  # id → record and log at its end
    #: (ready class, entry) of what has been pending for more than a lease.
    aged: set[tuple[str, str]] = field(default_factory=set)


def _check_letter(request_id: str, record: dict[str, str], letter: dict[str, str]) -> None:
    """A dead letter tells who and why, never what was asked."""
    assert letter.keys() == {"id", "tenant", "why", "attempts", "worker"}, f"{request_id}: letter"
    told = (letter["id"], letter["tenant"], letter["why"], letter["attempts"])
    known = (request_id, record["tenant"], record["code"], record["attempts"])
    assert told == known, f"{request_id}: letter {told}, record {known}"
    if record["code"] == "too_many_attempts":
        blamed = int(record["attempts"]) - int(record["handovers"])
        assert blamed >= POLICY.max_attempts, f"{request_id}: given up after {blamed} attempts"


class Walk:
    """One walk. `step()` raises AssertionError when anything is wrong."""

    def __init__(
        self,
        client: redis.Redis,
        keys: Keyspace,
        seed: int,
        script_of: Callable[[str], Script] = load_script,
    ) -> None:
        self.client = client
        self.keys = keys
        self.policy = POLICY
        if seed % WITHOUT_BODIES == 0:
            self.policy = dataclasses.replace(self.policy, dead_letter_body_ms=0)
        if seed % WITH_CAP == 0:
            self.policy = dataclasses.replace(self.policy, max_running_per_tenant=2)
        self.calls = QueueCalls(keys, self.policy)
        self.operator = OperatorCalls(keys, self.policy)
        self.random = random.Random(seed)
        self.script_of = script_of
        self.memory = Memory()
        self.leases: list[tuple[str, Lease]] = []  # (worker, live lease)
        self.stale: deque[tuple[str, Lease]] = deque(maxlen=12)
        self.read_only: deque[ReadyEntry] = deque(maxlen=12)
        self.outcomes: Counter[str] = Counter()
        self.history: deque[str] = deque(maxlen=8)
        self.num_ids = 0
        create_groups(client, keys)
        run(client, self.calls.tick(jitter=0.5))
        self.subscriber = client.pubsub()
        self.subscriber.psubscribe(keys.channel("*"))
        self.subscriber.get_message(timeout=5.0)  # the confirmation
        self.snapshot = take_snapshot(client, keys)

    def close(self) -> None:
        """Leave nothing behind: every step reads all keys of the server."""
        self.subscriber.close()
        for key in self.client.keys(f"{self.keys.prefix}*"):
            self.client.delete(key)

    # How a call is made

    def call(self, call: ScriptCall[T]) -> T:
        """Send a call; now and then again, as after a lost reply: nothing may change then."""
        call = dataclasses.replace(call, script=self.script_of(call.script.name))
        reply = run(self.client, call)
        if call.script.name != "tick" and self.random.random() < 0.1:
            once = self.take().content()
            run(self.client, call)
            assert self.take().content() == once, f"repeated {call.script.name} changed something"
        return reply

    def call_stale(self, call: ScriptCall[T]) -> T:
        """Send a call of somebody who lost the lease: nothing may change."""
        call = dataclasses.replace(call, script=self.script_of(call.script.name))
        reply = run(self.client, call)
        assert self.take().content() == self.snapshot.content(), f"stale {call.script.name} wrote"
        return reply

    def take(self) -> Snapshot:
        """All but the lifetimes."""
        return take_snapshot(self.client, self.keys, lifetimes=False)

    def now_ms(self) -> int:
        seconds, micros = self.client.time()
        return seconds * 1000 + micros // 1000

    def await_next_ms(self) -> None:
        now_ms = self.now_ms()
        while self.now_ms() == now_ms:
            pass

    def new_id(self) -> str:
        self.num_ids += 1
        return f"id-{self.num_ids}"

    def some_id(self, *states: str) -> str | None:
        """An id in one of the states (none given: any)."""
        records = self.snapshot.records.items()
        ids = [name for name, record in records if not states or record["state"] in states]
        return self.random.choice(ids) if ids else None

    def some_lease(self) -> tuple[str, Lease] | None:
        return self.random.choice(self.leases) if self.leases else None

    def num_events(self, request_id: str) -> int:
        return len(self.snapshot.logs.get(request_id, {}))

    # One step and its checks

    def step(self, name: str, action: Callable[[Walk], None]) -> None:
        self.history.append(name)
        action(self)
        if name.startswith("tick"):  # has checked by itself
            check_lag_is_known(self.snapshot)
        else:
            self.check()
        self._forget_old()

    def check(self) -> None:
        """Look at everything that changed since the last check; also in the middle of a step."""
        before, self.snapshot = self.snapshot, take_snapshot(self.client, self.keys)
        check_invariants(self.snapshot, self.keys, self.policy, before)
        self._check_memory(self.snapshot)
        self._check_published(before, self.snapshot)
        self._sort_leases()

    def _check_memory(self, now: Snapshot) -> None:
        memory = self.memory
        self._welcome_reborn(now)
        buried = {letter["id"] for letter in now.dead_letters.values()}
        waiting = {fields.get("id") for _, _, fields in now.ready_entries()}
        for request_id in memory.bodies.keys() - memory.forgotten:
            assert request_id in now.records, f"I10 {request_id}: accepted, but lost"
        for request_id in memory.plain - memory.forgotten - now.records.keys():
            assert request_id in waiting | buried, f"I10 {request_id}: plain, but lost"
        for request_id, record in now.records.items():
            body = memory.bodies.get(request_id)
            if body is not None and "body" in record:
                assert record["body"] == body, f"{request_id}: body changed"
            attempts = int(record["attempts"])
            assert attempts >= memory.attempts.get(request_id, 0), f"I3 {request_id}: attempts"
            memory.attempts[request_id] = attempts
            if record["state"] not in TERMINAL_STATES:
                continue
            if request_id not in memory.ended:
                self.outcomes[f"{record['state']} {record.get('code', '')}"] += 1
            end = (record, now.logs[request_id])
            assert memory.ended.setdefault(request_id, end) == end, f"{request_id}: not final"
            if record["state"] == "dead":
                _check_letter(request_id, record, now.dead_letters.get(record["letter"], {}))

    def _welcome_reborn(self, now: Snapshot) -> None:
        """An id whose lifetime is over may be used again: a plain XADD of it was waiting."""
        for request_id in self.memory.forgotten & now.records.keys():
            self.memory.forgotten.remove(request_id)
            self.memory.attempts.pop(request_id, None)
            self.memory.ended.pop(request_id, None)

    def _check_published(self, before: Snapshot, after: Snapshot) -> None:
        """Pub/Sub carries exactly what the logs gained, in order."""
        published: dict[str, list[str]] = {}
        for message in self._messages():
            request_id = self.keys.request_of_channel(message["channel"])
            published.setdefault(request_id, []).append(message["data"])
        gained = {}
        for request_id, log in after.logs.items():
            new = [log[entry]["d"] for entry in log if entry not in before.logs.get(request_id, {})]
            if new:
                gained[request_id] = new
        assert published == gained, f"published {published}, stored {gained}"

    def _messages(self) -> list[dict[str, Any]]:
        # The marker comes after everything that was published before it.
        self.client.publish(self.keys.channel(MARKER), "")
        messages = []
        while True:
            message = self.subscriber.get_message(timeout=5.0)
            assert message is not None, "the marker did not arrive"
            if message["channel"] == self.keys.channel(MARKER):
                return messages
            messages.append(message)

    def _check_blame(self, before: Snapshot, after: Snapshot) -> None:
        """Maintenance takes a lease only from the lost and the overdue."""
        for request_id in before.owners.keys() - after.owners.keys() - self.memory.forgotten:
            record = before.records[request_id]
            overdue = min(applying_deadlines(before, request_id).values()) <= self.now_ms()
            in_grace = self.history[-1] == "tick_in_grace"
            aged = (record["ready"], record["entry"]) in self.memory.aged
            lost = aged and not in_grace
            assert overdue or lost, f"{request_id}: a living worker was declared lost"

    def _check_deadlines(self, before: Snapshot, after: Snapshot) -> None:
        """Maintenance ends exactly the overdue. What it did before that (feeding windows, losing
        workers) changes no deadline of another."""
        now = self.now_ms()
        for request_id, record in before.records.items():
            state = after.records.get(request_id, {}).get("state")
            if record["state"] in TERMINAL_STATES or state is None:
                continue
            applying = applying_deadlines(before, request_id).values()
            overdue = any(deadline <= now for deadline in applying)
            expired = state == "expired"
            assert expired == overdue, f"{request_id}: {state}, but overdue is {overdue}"

    def _sort_leases(self) -> None:
        owners = self.snapshot.owners
        live = [held for held in self.leases if owners.get(held[1].request_id) == held[1].fence]
        self.stale.extend(held for held in self.leases if held not in live)
        self.leases = live

    def _forget_old(self) -> None:
        ended = [name for name in self.memory.ended if name not in self.memory.forgotten]
        for request_id in ended[:-KEPT]:
            self.forget(request_id)
            del self.snapshot.records[request_id]

    def revive(self, request_id: str, body: str) -> None:
        """The id stands for a new request from now on."""
        self.memory.bodies[request_id] = body
        self.memory.attempts.pop(request_id, None)
        self.memory.ended.pop(request_id, None)
        self.snapshot.logs.pop(request_id, None)

    def forget(self, request_id: str, *, with_log: bool = True) -> None:
        """The lifetime of record and log is over."""
        self.client.delete(self.keys.record(request_id))
        if with_log:
            self.client.delete(self.keys.log(request_id), self.keys.history(request_id))
        self.stale.extend(held for held in self.leases if held[1].request_id == request_id)
        self.leases = [held for held in self.leases if held[1].request_id != request_id]
        self.snapshot.logs.pop(request_id, None)
        self.snapshot.histories.pop(request_id, None)
        self.memory.forgotten.add(request_id)
        self.memory.bodies.pop(request_id, None)

    # What several steps do

    def read(self, worker: str, count: int, ready_class: str = "") -> list[ReadyEntry]:
        """Read one ready stream, any if none is named."""
        stream = self.keys.ready(ready_class or self.random.choice(READY_CLASSES))
        reply = self.client.xreadgroup(GROUP, worker, {stream: ">"}, count=count)
        return read_entries(self.keys, reply)

    def read_and_admit(self, worker: str, count: int, ready_class: str = "") -> list[ReadyEntry]:
        """`read`, and make the records of plain entries."""
        entries = self.read(worker, count, ready_class)
        return [entry for entry in entries if entry.body is None or self.admit(entry)]

    def admit(self, entry: ReadyEntry) -> bool:
        assert entry.body is not None
        status = self.call(self.calls.admit(entry))
        self.outcomes[f"admit {status}"] += 1
        if status == "OK":
            self.memory.bodies[entry.request_id] = entry.body
        elif status in ("FULL", "TOO_LARGE"):
            state = self.client.hget(self.keys.record(entry.request_id), "state")
            assert state == "failed", f"{entry.request_id}: refused, but {state}"
        return status == "OK"

    def lease(self, worker: str, entries: list[ReadyEntry]) -> None:
        if not entries:
            return
        before, now = self.take(), self.now_ms()
        for reply in self.call(self.calls.lease(worker, entries, fingerprint="model")):
            self.outcomes[f"lease {reply.code}"] += 1
            if reply.code is LeaseCode.OK:
                assert reply.lease is not None
                applying = applying_deadlines(before, reply.lease.request_id)
                assert min(applying.values()) > now, f"{reply.lease.request_id}: leased too late"
                known = {(lease.request_id, lease.fence) for _, lease in self.leases}
                if (reply.lease.request_id, reply.lease.fence) not in known:
                    self.leases.append((worker, reply.lease))

    def events(self, lease: Lease, distance: int = 1) -> AppendEvent:
        """The event `distance` after the last stored one; an attempt begins with `start`."""
        log = self.snapshot.events(lease.request_id)
        num_tokens = sum(len(event["k"]) for event in log if "k" in event)
        event: dict[str, Any] = {"e": len(log) + distance, "a": lease.attempt, "i": num_tokens}
        if not log or log[-1]["a"] != lease.attempt:
            event |= {"ev": "start", "w": "worker"}
        else:
            event |= {"k": [self.random.randrange(1000)], "t": "é "}
        return AppendEvent(lease.request_id, lease.fence, event["e"], json.dumps(event))

    def set_clock(self, **fields: int) -> None:
        """Maintenance has run a moment ago and is out of its grace, but for `fields`."""
        now = self.now_ms()
        mapping = {"last": now, "reap_after": 0, "tidied": now} | fields
        self.client.hset(self.keys.maintenance, mapping=mapping)

    def tick(self) -> None:
        before = self.take()
        report = self.call(self.calls.tick(jitter=self.random.random()))
        self.check()
        self._check_blame(before, self.snapshot)
        self._check_deadlines(before, self.snapshot)
        for name, count in dataclasses.asdict(report).items():
            self.outcomes[f"tick {name}"] += count

"""One pool of the queue, and what a client, a worker and time do with it, in one-line calls."""

from __future__ import annotations

import dataclasses
import json

from tokenmill.calls import AppendEvent, QueueCalls, QueuePolicy
from tokenmill.keys import GROUP
from tokenmill.operator_calls import OperatorCalls
from tokenmill.protocol import EndEvent
from tokenmill.ready import create_groups, read_entries
from tokenmill.record import RECORD_FIELDS, Record
from tokenmill.scripts import run

POLICY = QueuePolicy(window=2, max_queued=6, max_queued_per_tenant=4, max_body_bytes=100)


class Queue:
    """One pool, and what a client and a worker do with it."""

    def __init__(self, client, keys, policy=POLICY):
        self.client, self.keys, self.policy = client, keys, policy
        self.calls = QueueCalls(keys, policy)
        self.operator = OperatorCalls(keys, policy)
        create_groups(client, keys)
        if policy.max_running_per_tenant:
            self.tick(reap=False)  # a worker says so

    def run(self, call):
        return run(self.client, call)

    def enqueue(self, request_id, body="{}", **options):
        return self.run(self.calls.enqueue(request_id, body=body, **options))

    def read(self, worker="w", count=10):
        streams = dict.fromkeys(self.keys.ready_streams.values(), ">")
        return read_entries(self.keys, self.client.xreadgroup(GROUP, worker, streams, count=count))

    def lease(self, worker="w", count=10):
        replies = self.run(self.calls.lease(worker, self.read(worker, count), fingerprint="m1"))
        return [reply.lease for reply in replies if reply.lease]

    def leased(self, request_id="a", **options):
        """A fresh request, leased."""
        self.enqueue(request_id, **options)
        (lease,) = self.lease()
        return lease

    def append(self, lease, seq, **fields):
        payload = json.dumps({"e": seq, "a": lease.attempt, **fields})
        event = AppendEvent(lease.request_id, lease.fence, seq, payload)
        return self.run(self.calls.append([event]))[0]

    def finish(self, lease, seq, **options):
        payload = json.dumps({"e": seq, "ev": "end", "st": options.get("state", "done")})
        event = AppendEvent(lease.request_id, lease.fence, seq, payload)
        return self.run(self.calls.finish(event, **options))

    def record(self, request_id="a"):
        return Record.parse(self.client.hmget(self.keys.record(request_id), RECORD_FIELDS))

    def end(self, request_id="a"):
        (_, fields) = self.client.xrange(self.keys.log(request_id))[-1]
        return EndEvent.model_validate_json(fields["d"])

    def tick(self, *, reap=True, **policy):
        """One round of maintenance, with the grace over (`reap`) and idle times long enough."""
        if reap:
            now_ms = self.now_ms()
            mapping = {"last": now_ms, "reap_after": 0, "tidied": 0}
            self.client.hset(self.keys.maintenance, mapping=mapping)
        calls = QueueCalls(self.keys, dataclasses.replace(self.policy, **policy))
        return self.run(calls.tick(jitter=0.5))

    def pass_deadline(self, name="deadline", request_id="a"):
        """That deadline of a request has just passed."""
        past = self.now_ms() - 1
        self.client.hset(self.keys.record(request_id), name, past)
        self.client.zadd(self.keys.deadlines, {request_id: past}, lt=True)

    def history(self, request_id="a"):
        lines = self.client.lrange(self.keys.history(request_id), 0, -1)
        return [json.loads(line) for line in lines]

    def lose_worker(self):
        """Whoever holds or has read something has been silent for longer than a lease."""
        for stream in self.keys.ready_streams.values():
            for one in self.client.xpending_range(stream, GROUP, "-", "+", 100):
                self.client.xclaim(
                    stream, GROUP, one["consumer"], 0, [one["message_id"]],
                    idle=10 * self.policy.lease_ms, justid=True,
                )  # fmt: skip

    def now_ms(self):
        seconds, micros = self.client.time()
        return seconds * 1000 + micros // 1000

    def await_next_ms(self):
        now_ms = self.now_ms()
        while self.now_ms() == now_ms:
            pass

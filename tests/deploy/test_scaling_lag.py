"""Redis' `lag`, which KEDA scales on, stays the number of unread entries whatever ends requests."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest
import redis

from support_queue import POLICY, Queue
from support_redis import ServerBackend
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, Keyspace

ROOMY = dataclasses.replace(POLICY, max_queued=1000, max_queued_per_tenant=1000)


@pytest.fixture
def queue(server: EmbeddedServer, keyspace: Keyspace) -> Iterator[Queue]:
    """On a real server: an emulated one has no lag of its own."""
    with ServerBackend(server).client() as client:
        queue = Queue(client, keyspace, ROOMY)
        if "lag" not in client.xinfo_groups(keyspace.ready("1"))[0]:
            pytest.skip("this server reports no lag")
        yield queue


def lags(queue: Queue) -> dict[str, int | None]:
    """Of each ready stream, as KEDA's redis-streams scaler reads it."""
    return {
        stream: queue.client.xinfo_groups(stream)[0]["lag"]
        for stream in queue.keys.ready_streams.values()
    }


def unread(client: redis.Redis, stream: str) -> int:
    """Entries behind the last one that the group was given, counted one by one."""
    (group,) = client.xinfo_groups(stream)
    return len(client.xrange(stream, f"({group['last-delivered-id']}", "+"))


def assert_exact(queue: Queue) -> None:
    for stream, lag in lags(queue).items():
        assert lag == unread(queue.client, stream), stream


def test_a_hundred_cancelled_requests(queue: Queue) -> None:
    for number in range(100):
        queue.enqueue(f"a{number}", tenant=f"t{number}")
    for number in range(100):
        assert queue.run(queue.calls.cancel(f"a{number}")).cancelled
    queue.tick()
    assert_exact(queue)
    # The next reader drops them all, and nothing is left that would keep a worker.
    assert queue.lease(count=60) == queue.lease(count=60) == []
    queue.tick()
    assert set(lags(queue).values()) == {0}
    assert all(
        queue.client.xpending(stream, GROUP)["pending"] == 0
        for stream in queue.keys.ready_streams.values()
    )


def test_a_hundred_requests_whose_deadline_passes(queue: Queue) -> None:
    for number in range(100):
        queue.enqueue(f"a{number}", tenant=f"t{number}")
        queue.pass_deadline(request_id=f"a{number}")
    while queue.tick().expired:
        assert_exact(queue)
    assert queue.lease(count=200) == []
    queue.tick()
    assert set(lags(queue).values()) == {0}


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_random(queue: Queue, seed: int) -> None:
    draw = random.Random(seed)
    waiting: list[str] = []
    running = []
    for number in range(100):
        action = draw.choice(["enqueue", "enqueue", "cancel", "expire", "lease", "finish"])
        if action == "enqueue":
            name = f"s{seed}-{number}"
            queue.enqueue(name, tenant=f"t{number % 7}", priority_class=draw.choice("012"))
            waiting.append(name)
        elif action == "lease":
            running += queue.lease(count=draw.randint(1, 3))
        elif action == "finish" and running:
            queue.finish(running.pop(draw.randrange(len(running))), 1)
        elif action == "cancel" and waiting:
            queue.run(queue.calls.cancel(waiting.pop(draw.randrange(len(waiting)))))
        elif action == "expire" and waiting:
            queue.pass_deadline(request_id=waiting.pop(draw.randrange(len(waiting))))
        queue.await_next_ms()  # the ids of one millisecond are neighbours: the next read repairs
        queue.tick()
        assert_exact(queue)

"""`peek`: how long the requests wait that nobody has read, by class."""

from __future__ import annotations

import pytest
import redis

from support_queue import POLICY, Queue
from tokenmill.keys import Keyspace


@pytest.fixture
def queue(redis_client: redis.Redis, keyspace: Keyspace) -> Queue:
    return Queue(redis_client, keyspace, POLICY)


def test_without_a_stream_nothing_waits(redis_client: redis.Redis, keyspace: Keyspace) -> None:
    queue = Queue(redis_client, keyspace, POLICY)
    redis_client.delete(*keyspace.ready_streams.values())
    assert queue.run(queue.calls.peek(8)).ages_ms == {
        "r": [], "0": [], "1": [], "2": [],
    }  # fmt: skip


def test_ages_are_those_of_the_first_entries_nobody_has_read(queue: Queue) -> None:
    now_ms = queue.now_ms()
    for ago_ms in (9_000, 5_000, 2_000):
        queue.client.xadd(queue.keys.ready("2"), {"id": "x"}, id=f"{now_ms - ago_ms}-0")
    queue.client.xadd(queue.keys.ready("0"), {"id": "y"}, id=f"{now_ms + 60_000}-0")
    later_ms = queue.now_ms()

    ages = queue.run(queue.calls.peek(2)).ages_ms

    drift_ms = queue.now_ms() - later_ms + 100
    assert [len(ages[name]) for name in ("r", "0", "1", "2")] == [0, 1, 0, 2]
    assert 9_000 <= ages["2"][0] <= 9_000 + drift_ms + later_ms - now_ms
    assert ages["2"][0] - ages["2"][1] == 4_000
    assert ages["0"] == [0]  # from the future


def test_what_was_read_is_seen_no_more(queue: Queue) -> None:
    for request_id in "ab":
        queue.enqueue(request_id)
    queue.lease(count=1)
    assert len(queue.run(queue.calls.peek(8)).ages_ms["1"]) == 1
    queue.lease()
    assert queue.run(queue.calls.peek(8)).ages_ms["1"] == []

"""`explain` says what a request waits for, at every station of its life."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis
from redis.exceptions import NoPermissionError, ResponseError

from support_redis import RedisBackend
from tokenmill import AsyncClient, Client, UnknownRequest
from tokenmill._inquiry import answers
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker


def test_a_queue_without_workers(client: Client) -> None:
    explanation = client.explain(client.submit("x", priority="low").id)
    assert explanation.status.state == "queued"
    assert explanation.workers == []
    assert "priority low" in explanation.summary
    assert "start one" in explanation.summary


def test_a_request_on_its_way(client: Client, worker: FakeWorker) -> None:
    worker.step()
    first, second = client.submit("x").id, client.submit("y").id
    assert (client.explain(first).queued, client.explain(first).workers) == (2, ["fake-worker"])
    worker.step()
    running = client.explain(second)
    assert (running.queued, running.running, running.events) == (0, 2, 2)
    assert running.summary == "attempt 1 runs on fake-worker; 2 events"
    worker.hand_over()
    assert "again, after attempt 1" in client.explain(first).summary
    client.cancel(first)
    assert client.explain(first).summary == "ended: cancelled (cancelled: cancelled by the client)"
    assert str(client.explain(first)).startswith(first)
    while worker.step():
        pass
    assert client.explain(second).summary == "ended: done"


def test_a_tenant_that_waits_for_its_own_window(make_client: Callable[..., Client]) -> None:
    client = make_client(policy=QueuePolicy(window=1))
    ids = [client.submit(text, tenant="acme").id for text in ("a", "b", "c")]
    explanation = client.explain(ids[-1])
    assert explanation.status.state == "held"
    assert explanation.queued_of_tenant == 3
    assert "tenant acme" in explanation.summary


def test_a_worker_not_heard_of(
    make_client: Callable[..., Client], redis_client: redis.Redis, worker: FakeWorker
) -> None:
    client = make_client(policy=QueuePolicy(lease_ms=0))
    handle = client.submit("x")
    worker.step()
    key = client.keys.record(handle.id)
    redis_client.hset(key, "worker", "another")
    assert "not been heard of" in client.explain(handle.id).summary


async def test_the_async_client_explains_the_same(
    client: Client, redis_backend: RedisBackend, keyspace: Keyspace, worker: FakeWorker
) -> None:
    handle = client.submit("x")
    worker.step()
    async with (
        redis_backend.async_client() as connection,
        AsyncClient(redis=connection, namespace=keyspace.namespace) as other,
    ):
        assert await other.explain(handle.id) == client.explain(handle.id)
        with pytest.raises(UnknownRequest):
            await other.explain("nobody")


def test_a_missing_right_is_not_taken_for_missing_workers() -> None:
    denied = NoPermissionError("this user has no permissions to run 'xinfo|consumers'")
    with pytest.raises(NoPermissionError):
        answers(["1", denied])
    unread = [ResponseError("no such key"), ResponseError("NOGROUP No such consumer group")]
    assert answers(["1", *unread]) == ["1", [], []]

"""Entries of a plain XADD whose fields are not what they should be."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from support_queue import Queue
from tokenmill.replies import AdmitStatus


@pytest.fixture
def queue(redis_client, keyspace):
    return Queue(redis_client, keyspace)


def add(queue, **fields):
    queue.client.xadd(queue.keys.ready("1"), {"id": "a", "body": "{}", **fields})


@pytest.mark.parametrize("tenant", ["a:b", "x" * 65, "{}", " ", "ä", "a\n"])
def test_a_strange_tenant_is_refused_with_an_end_event(queue, tenant):
    add(queue, tenant=tenant)
    (entry,) = queue.read()
    assert queue.run(queue.calls.admit(entry)) is AdmitStatus.INVALID
    end = queue.end()
    assert (end.status, end.code) == ("failed", "invalid_request")
    assert end.message.startswith("tenant: ")
    assert queue.record().tenant == "default"
    assert set(queue.client.hgetall(queue.keys.counters).values()) <= {"0"}
    with pytest.raises(ResponseError, match="tenant"):
        queue.enqueue("b", tenant=tenant)


def test_a_strange_id_is_refused(queue):
    for request_id in ("", "a b", "x" * 65, "{a}"):
        with pytest.raises(ResponseError, match="id"):
            queue.enqueue(request_id)


@pytest.mark.parametrize(
    "deliveries", ["many", "nan", "inf", "-5", "1e400", "0x10", "", " 3", "9" * 40]
)
def test_a_strange_count_of_deliveries_stops_nobodys_maintenance(queue, deliveries):
    add(queue, deliveries=deliveries)
    queue.read(worker="gone")
    queue.lose_worker()
    assert queue.tick().redelivered == 1
    (entry,) = queue.read()
    assert entry.request_id == "a"
    assert queue.run(queue.calls.admit(entry)) is AdmitStatus.OK

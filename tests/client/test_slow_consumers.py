"""A consumer that does not keep up holds up nobody, costs a bounded amount, and misses nothing."""

from __future__ import annotations

import pytest
import redis

from support_redis import RedisBackend
from support_waiting import await_until, wait_until
from tokenmill import AsyncClient, Client
from tokenmill._mailbox import LiveBuffer
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker

MAX_MESSAGES = 20
PIECES = [f"word{number} " for number in range(150)]


@pytest.fixture(autouse=True)
def small_mailboxes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill._mailbox.MAX_MESSAGES", MAX_MESSAGES)


@pytest.fixture
def chatty(redis_client: redis.Redis, keyspace: Keyspace) -> FakeWorker:
    return FakeWorker(redis_client, lambda _: PIECES, namespace=keyspace.namespace)


def test_the_slow_one_reads_the_log_and_the_others_live(client: Client, chatty: FakeWorker) -> None:
    with client.stream("slow") as slow, client.stream("quick") as quick:
        chatty.step()
        texts, lazy = iter(quick), iter(slow)
        received, begun = [next(texts)], [next(lazy)]
        reads = quick._state.stats.reads
        assert slow._mailbox is not None
        while chatty.step():
            received.append(next(texts, ""))
            assert len(slow._mailbox._buffer._payloads) <= MAX_MESSAGES
        assert "".join(received) == "".join(PIECES)
        assert quick._state.stats.reads == reads  # all of it live
        wait_until(lambda: slow._mailbox is not None and slow._mailbox._buffer._missed)
        assert begun + list(lazy) == PIECES


async def test_the_slow_one_reads_the_log_and_the_others_live_async(
    redis_backend: RedisBackend, keyspace: Keyspace, chatty: FakeWorker
) -> None:
    async with (
        redis_backend.async_client() as connection,
        AsyncClient(redis=connection, namespace=keyspace.namespace) as client,
        client.stream("slow") as slow,
        client.stream("quick") as quick,
    ):
        chatty.step()
        texts, lazy = aiter(quick), aiter(slow)
        received, begun = [await anext(texts)], [await anext(lazy)]
        reads = quick._state.stats.reads
        assert slow._mailbox is not None
        while chatty.step():
            received.append(await anext(texts, ""))
            assert len(slow._mailbox._buffer._payloads) <= MAX_MESSAGES
        assert "".join(received) == "".join(PIECES)
        assert quick._state.stats.reads == reads
        await await_until(lambda: slow._mailbox is not None and slow._mailbox._buffer._missed)
        assert begun + [text async for text in lazy] == PIECES


@pytest.mark.parametrize("count", [MAX_MESSAGES, MAX_MESSAGES + 1, 10 * MAX_MESSAGES])
def test_a_buffer_holds_so_many_messages_or_none(count: int) -> None:
    buffer = LiveBuffer()
    for number in range(count):
        buffer.add(str(number))
    payloads, missed = buffer.take()
    assert missed == (count > MAX_MESSAGES)
    assert payloads == ([] if missed else [str(number) for number in range(count)])
    assert not buffer.has_news

"""What happens to clients when Redis, the network or their process does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis

from support_sdk import IDS, PIECES, TEXT
from support_waiting import await_until, wait_until
from tokenmill import (
    AsyncClient,
    AuthenticationFailed,
    Client,
    ConfigurationError,
    QueueUnavailable,
    UnknownRequest,
)
from tokenmill._base import FIRST_CONTACT_S
from tokenmill._redis import aconnect, connect
from tokenmill._subscribers import PING_AFTER_S, PONG_WITHIN_S, Outage, Pulse
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import Keyspace
from tokenmill.testing import FakeWorker


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server that the test may kill; it keeps its data over `restart()`."""
    with EmbeddedServer(append_only=True) as server:
        yield server


@pytest.fixture
def real_worker(server: EmbeddedServer, keyspace: Keyspace) -> Iterator[FakeWorker]:
    with connect(server.url) as connection:
        yield FakeWorker(connection, lambda _: TEXT, namespace=keyspace.namespace)


def subscribers(connection: redis.Redis, client: Client | AsyncClient) -> int:
    """Connections that listen for this client."""
    ((_, count),) = connection.pubsub_numsub(client.keys.channel(""))
    return int(count)


def kill_subscriptions(connection: redis.Redis) -> None:
    connection.client_kill_filter(_type="pubsub")


def test_a_killed_connection_loses_and_repeats_nothing(
    server: EmbeddedServer, keyspace: Keyspace, real_worker: FakeWorker
) -> None:
    with (
        connect(server.url) as admin,
        Client(server.url, namespace=keyspace.namespace) as client,
        client.stream("x") as stream,
    ):
        texts, received = iter(stream), []
        for number in range(len(PIECES)):
            real_worker.step()
            if number in {2, 5}:
                kill_subscriptions(admin)
            received.append(next(texts))
        real_worker.step()
        assert received + list(texts) == PIECES
        assert stream.completion().token_ids == IDS


async def test_a_killed_connection_loses_and_repeats_nothing_async(
    server: EmbeddedServer, keyspace: Keyspace, real_worker: FakeWorker
) -> None:
    with connect(server.url) as admin:
        async with (
            AsyncClient(server.url, namespace=keyspace.namespace) as client,
            client.stream("x") as stream,
        ):
            texts, received = aiter(stream), []
            for number in range(len(PIECES)):
                real_worker.step()
                if number in {2, 5}:
                    kill_subscriptions(admin)
                received.append(await anext(texts))
            real_worker.step()
            received += [text async for text in texts]
            assert received == PIECES


def test_a_restart_of_redis_is_a_pause(own_server: EmbeddedServer) -> None:
    with (
        connect(own_server.url) as connection,
        Client(own_server.url) as client,
        client.stream("x") as stream,
    ):
        worker = FakeWorker(connection, lambda _: TEXT)
        texts = iter(stream)
        worker.step()
        first = next(texts)
        own_server.kill()
        own_server.restart()
        while worker.step():
            pass
        assert [first, *texts] == PIECES


def test_a_request_that_redis_lost_is_unknown_or_enqueued_again(
    own_server: EmbeddedServer,
) -> None:
    with (
        connect(own_server.url) as connection,
        Client(own_server.url) as client,
        Client(own_server.url, resubmit=True) as stubborn,
        ThreadPoolExecutor(2) as pool,
    ):
        worker = FakeWorker(connection, lambda _: TEXT)
        streams = [client.stream("x"), stubborn.stream("x")]
        answers = [pool.submit(stream.completion) for stream in streams]
        wait_until(lambda: worker.step() and len(worker.running) == 2)
        connection.flushall()
        worker.vanish()
        again = FakeWorker(connection, lambda _: TEXT)
        kill_subscriptions(connection)
        with pytest.raises(UnknownRequest):
            answers[0].result()
        with again:
            assert answers[1].result().token_ids == IDS


NOBODY = "redis://127.0.0.1:1/0"


def test_a_redis_that_is_down_is_reported_in_bounded_time() -> None:
    began_s = time.monotonic()
    with (
        Client(NOBODY, connect_timeout_s=0.5) as client,
        pytest.raises(QueueUnavailable, match=r"^Redis at redis://127.0.0.1:1/0 .*$"),
    ):
        client.generate("x")
    assert time.monotonic() - began_s < FIRST_CONTACT_S + 10  # a bound, not a measurement


async def test_a_redis_that_is_down_is_reported_async() -> None:
    async with AsyncClient(NOBODY, connect_timeout_s=0.5) as client:
        with pytest.raises(QueueUnavailable, match=r"^Redis at redis://127.0.0.1:1/0 .*$"):
            await client.generate("x")


def with_password(server: EmbeddedServer) -> str:
    return server.url.replace("unix://", "unix://somebody:hunter2@")


def test_a_wrong_password_is_one_clear_line(server: EmbeddedServer) -> None:
    with (
        Client(with_password(server)) as client,
        pytest.raises(AuthenticationFailed, match=r"^[^\n]*refused the user[^\n]*$") as caught,
    ):
        client.submit("x")
    assert "hunter2" not in str(caught.value)


async def test_a_wrong_password_is_one_clear_line_async(server: EmbeddedServer) -> None:
    async with AsyncClient(with_password(server)) as client:
        with pytest.raises(AuthenticationFailed) as caught:
            await client.submit("x")
    assert "hunter2" not in str(caught.value)


def test_nothing_is_left_after_close(
    server: EmbeddedServer, keyspace: Keyspace, real_worker: FakeWorker
) -> None:
    threads = set(threading.enumerate())
    with connect(server.url) as admin:
        client = Client(server.url, namespace=keyspace.namespace)
        with real_worker:
            client.generate("x")
        assert subscribers(admin, client) == 1
        client.close()
        client.close()
        assert set(threading.enumerate()) == threads
        wait_until(lambda: subscribers(admin, client) == 0)
        with pytest.raises(RuntimeError, match="closed"):
            client.generate("x")


def test_channels_are_given_up_with_their_streams(
    server: EmbeddedServer, keyspace: Keyspace, real_worker: FakeWorker
) -> None:
    with (
        connect(server.url) as admin,
        Client(server.url, namespace=keyspace.namespace) as client,
        real_worker,
    ):
        for _ in range(3):
            client.generate("x")
        anchor = client.keys.channel("")
        wait_until(lambda: admin.pubsub_channels(f"{anchor}*") == [anchor])


async def test_no_task_is_left_after_aclose(server: EmbeddedServer, keyspace: Keyspace) -> None:
    with connect(server.url) as admin:
        client = AsyncClient(server.url, namespace=keyspace.namespace)
        async with client.stream("x"):
            await await_until(lambda: subscribers(admin, client) == 1)
        await client.aclose()
        await await_until(lambda: subscribers(admin, client) == 0)


def test_closing_wakes_a_stream_in_another_thread(
    server: EmbeddedServer, keyspace: Keyspace
) -> None:
    with connect(server.url) as admin, ThreadPoolExecutor(1) as pool:
        client = Client(server.url, namespace=keyspace.namespace)
        reading = pool.submit(client.stream("x").completion)
        wait_until(lambda: subscribers(admin, client) == 1)
        client.close()
        with pytest.raises(RuntimeError, match="closed"):
            reading.result()


def test_a_forked_child_uses_the_client_with_connections_of_its_own(
    server: EmbeddedServer, keyspace: Keyspace, real_worker: FakeWorker
) -> None:
    with (
        Client(server.url, namespace=keyspace.namespace) as client,
        client.stream("x") as stream,
        real_worker,
    ):
        texts = iter(stream)
        first = next(texts)
        child = os.fork()
        if child == 0:  # exits without pytest's and the parent's cleanup
            try:
                stream.close()  # must not cancel what the parent is reading
                os._exit(0 if client.generate("x").text == TEXT else 1)
            except BaseException:  # noqa: BLE001
                os._exit(2)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert [first, *texts] == PIECES
        assert client.generate("x").text == TEXT


def test_a_stream_belongs_to_the_process_that_made_it(
    server: EmbeddedServer, keyspace: Keyspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(server.url, namespace=keyspace.namespace) as client:
        stream = client.attach(client.submit("x").id)
        monkeypatch.setattr(stream, "_pid", os.getpid() + 1)
        with pytest.raises(ConfigurationError, match="attach"):
            next(iter(stream))


def test_a_client_that_hands_out_bytes_is_refused(server: EmbeddedServer) -> None:
    with (
        redis.Redis() as bytes_client,
        pytest.raises(ConfigurationError, match="decode_responses"),
    ):
        Client(redis=bytes_client)


async def test_a_given_client_stays_open(server: EmbeddedServer) -> None:
    with connect(server.url) as connection:
        Client(redis=connection).close()
        assert connection.ping()
    async with aconnect(server.url) as async_connection:
        await AsyncClient(redis=async_connection).aclose()
        assert await async_connection.ping()


def test_a_silent_connection_is_asked_and_then_given_up() -> None:
    now = [0.0]
    pulse = Pulse(clock=lambda: now[0])
    now[0] = PING_AFTER_S
    assert not pulse.must_ping()
    now[0] += 0.1
    assert pulse.must_ping()
    assert not pulse.must_ping()  # one question at a time
    pulse.heard()
    now[0] += PING_AFTER_S + 0.1
    assert pulse.must_ping()
    now[0] += PONG_WITHIN_S + 0.1
    with pytest.raises(redis.ConnectionError):
        pulse.must_ping()


def impatient(monkeypatch: pytest.MonkeyPatch, side: str) -> None:
    """Looks after a silent connection within milliseconds instead of seconds."""
    monkeypatch.setattr("tokenmill._subscribers.PING_AFTER_S", 0.01)
    monkeypatch.setattr("tokenmill._subscribers.PONG_WITHIN_S", 0.05)
    monkeypatch.setattr(f"tokenmill.{side}.READ_TIMEOUT_S", 0.01)


def subscription_ids(connection: redis.Redis) -> set[str]:
    return {entry["id"] for entry in connection.client_list(_type="pubsub")}


def is_replaced(connection: redis.Redis, before: set[str]) -> bool:
    now = subscription_ids(connection)
    return bool(now) and not now & before


def test_a_connection_that_answers_no_ping_is_replaced(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch, "_listener")
    with connect(own_server.url) as admin, Client(own_server.url) as client:
        worker = FakeWorker(admin, lambda _: TEXT)
        with client.stream("x") as stream:
            worker.step()
            texts = iter(stream)
            first = next(texts)
            before = subscription_ids(admin)
            admin.client_pause(300)
            wait_until(lambda: is_replaced(admin, before))
            while worker.step():
                pass
            assert [first, *texts] == PIECES


async def test_a_connection_that_answers_no_ping_is_replaced_async(
    own_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch, "_async_listener")
    with connect(own_server.url) as admin:
        worker = FakeWorker(admin, lambda _: TEXT)
        async with AsyncClient(own_server.url) as client, client.stream("x") as stream:
            worker.step()
            texts = aiter(stream)
            received = [await anext(texts)]
            before = subscription_ids(admin)
            admin.client_pause(300)
            await asyncio.to_thread(wait_until, lambda: is_replaced(admin, before))
            while worker.step():
                pass
            received += [text async for text in texts]
            assert received == PIECES


def test_pauses_grow_within_an_outage_and_start_anew_after_it() -> None:
    outage = Outage()
    pauses = [outage.next_pause_s() for _ in range(12)]
    assert outage.is_on
    assert pauses[-1] > pauses[0]
    outage.is_over()
    assert not outage.is_on
    assert outage.next_pause_s() <= 0.02

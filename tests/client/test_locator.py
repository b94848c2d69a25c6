"""Finding the master, and leaving one that is no longer it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from redis import exceptions

from support_servers import Server, single, until
from tokenmill._locator import Answer, Locator, Search, cluster_search, sentinel_search
from tokenmill._redis import RedisOptions, aconnect, connect, share_locator
from tokenmill._redis_errors import RetryPolicy, is_retryable, retry, translate
from tokenmill._server_check import findings
from tokenmill._url import Address
from tokenmill.errors import AuthenticationFailed, ConfigurationError

A, B, C = (Address("127.0.0.1", port) for port in (1, 2, 3))
MASTER = Address("10.0.0.1", 6379)


def make_locator(search: Search, *, insecure: bool = False) -> Locator:
    return Locator(
        servers=(A, B, C), search=search, uses_tls=False, connection={}, verified=False,
        insecure=insecure,
    )  # fmt: skip


Replies = dict[Address, Any]


def both_ways(locator: Locator, replies: Replies) -> list[Callable[[], Address]]:
    """`locate` and `alocate`, asking servers that answer, or raise, what `replies` says."""

    def ask(server: Address, question: tuple[str, ...], **_: Any) -> Any:
        assert question == locator.search.question
        reply = replies.get(server, exceptions.ConnectionError("nobody there"))
        if isinstance(reply, Exception):
            raise reply
        return reply

    async def aask(*arguments: Any, **options: Any) -> Any:
        return ask(*arguments, **options)

    return [lambda: locator.locate(ask), lambda: asyncio.run(locator.alocate(aask))]


def sentinel_reply(master: Address, epoch: int) -> list[str]:
    return [
        "name", "main", "ip", master.host, "port", str(master.port), "config-epoch", str(epoch)
    ]  # fmt: skip


NO_SUCH_MASTER = exceptions.ResponseError("No such master with that name")


def test_one_sentinel_that_knows_is_enough() -> None:
    replies = {B: sentinel_reply(MASTER, 3), C: NO_SUCH_MASTER}
    for locate in both_ways(make_locator(sentinel_search("main")), replies):
        assert locate() == MASTER


def test_a_sentinel_with_an_older_configuration_is_not_believed() -> None:
    old = Address("10.0.0.9", 1)
    locator = make_locator(sentinel_search("main"))
    replies = {A: sentinel_reply(old, 4), B: sentinel_reply(MASTER, 5), C: sentinel_reply(old, 4)}
    found = {locate() for _ in range(30) for locate in both_ways(locator, {B: replies[B]})}
    found |= {locate() for _ in range(30) for locate in both_ways(locator, replies)}
    assert found == {MASTER}
    assert locator.master == MASTER
    # Unless nobody has a newer one: the Sentinels were set up anew.
    assert {locate() for locate in both_ways(locator, {A: replies[A]})} == {old}


def test_nobody_knows() -> None:
    locator = make_locator(sentinel_search("main"))
    for locate in both_ways(locator, dict.fromkeys((A, B, C), NO_SUCH_MASTER)):
        with pytest.raises(exceptions.ConnectionError, match="no Sentinel knows"):
            locate()
    for locate in both_ways(locator, {A: exceptions.AuthenticationError("no")}):
        with pytest.raises((exceptions.AuthenticationError, exceptions.ConnectionError)):
            locate()


CLUSTER = [
    [0, 99, ["10.0.0.1", 7001, "id1"], ["10.0.0.4", 7004, "id4"]],
    [100, 16383, ["", 7002, "id2"]],  # without a host: on that of the node that answers
]


def test_the_owner_of_a_slot_and_whom_to_ask_next_time() -> None:
    for slot, owner in ((99, Address("10.0.0.1", 7001)), (100, Address(A.host, 7002))):
        locator = make_locator(cluster_search(slot))
        for locate in both_ways(locator, {A: CLUSTER}):
            assert locate() == owner
        later = {Address("10.0.0.4", 7004): CLUSTER}  # the nodes of the URL are gone
        for locate in both_ways(locator, later):
            assert locate().port == owner.port


def test_a_slot_that_nobody_has() -> None:
    for locate in both_ways(make_locator(cluster_search(5)), dict.fromkeys((A, B, C), CLUSTER[1:])):
        with pytest.raises(exceptions.ConnectionError, match="master of the slot"):
            locate()


def test_a_master_on_the_public_internet_is_refused_without_tls() -> None:
    public = sentinel_reply(Address("8.8.8.8", 6379), 1)
    for locate in both_ways(make_locator(sentinel_search("main")), {A: public}):
        with pytest.raises(exceptions.ConnectionError) as refused:
            locate()
        assert not is_retryable(refused.value)
        ours = translate(refused.value, "redis+sentinel://h/main")
        assert isinstance(ours, ConfigurationError)
        assert "--insecure-redis" in str(ours)
    locator = make_locator(sentinel_search("main"), insecure=True)
    for locate in both_ways(locator, {A: public}):
        assert locate() == Address("8.8.8.8", 6379)


@pytest.fixture
def demoted() -> Server:
    """A server that becomes a replica of nobody while its clients are connected."""
    return single("redis-7.0")


def demote(server: Server) -> None:
    with closing(server.client()) as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")


def promote(server: Server) -> None:
    with closing(server.client()) as client:
        client.execute_command("REPLICAOF", "NO", "ONE")


def test_a_connection_to_a_former_master_is_given_up(demoted: Server) -> None:
    """Behind one name there may be another server by now."""
    with demoted as server, connect(server.url) as client:
        client.set("k", "v")
        before = client.client_id()
        demote(server)
        for write in (lambda: client.set("k", "w"), lambda: client.eval(WRITE, 0)):
            with pytest.raises(exceptions.ConnectionError, match="not the master"):
                write()
        promote(server)
        assert retry(lambda: client.set("k", "w"), RetryPolicy(), server.url)
        assert client.client_id() != before


WRITE = "return redis.call('SET', 'k', 'w')"


async def test_a_connection_to_a_former_master_is_given_up_async(demoted: Server) -> None:
    with demoted as server:
        async with aconnect(server.url) as client:
            await client.set("k", "v")
            before = await client.client_id()
            demote(server)
            for write in (lambda: client.set("k", "w"), lambda: client.eval(WRITE, 0)):
                with pytest.raises(exceptions.ConnectionError, match="not the master"):
                    await write()
            promote(server)
            assert await client.client_id() != before


async def test_idle_connections_follow_to_the_new_master() -> None:
    """Two clients of one partition; only one of them notices that the master has changed."""
    with single("redis-7.0") as old, single("valkey-9") as new:
        url = "redis+sentinel://127.0.0.1:1/main"
        async with aconnect(url) as one, aconnect(url) as other:
            share_locator(one, other)
            locator = one.connection_pool.connection_kwargs["locator"]
            pretend(locator, old)
            assert [await client.set("where", "old") for client in (one, other)] == [True, True]
            pretend(locator, new)
            await one.connection_pool.disconnect()
            assert await one.get("where") is None
            assert await other.get("where") is None


def pretend(locator: Locator, server: Server) -> None:
    """Whoever is asked is the master, and only this server is."""
    locator.servers = (Address("127.0.0.1", server.port),)
    locator.search = Search(("PING",), lambda _reply, asked: Answer(asked), "nobody")


def test_a_sentinel_wants_a_password_of_its_own() -> None:
    with single("redis-7.0", "--requirepass", "main") as master:
        sentinel = Server(master.binary)
        config = sentinel.folder / "sentinel.conf"
        config.write_text(
            f"requirepass watch\nsentinel monitor main 127.0.0.1 {master.port} 1\n"
            "sentinel auth-pass main main\n"
        )
        sentinel.arguments = lambda port: (str(config), "--sentinel", "--port", str(port))
        with sentinel:
            url = f"redis+sentinel://:main@127.0.0.1:{sentinel.port}/main"
            with connect(f"{url}?sentinel_password=watch") as client:
                assert until(client.ping)
            options = RedisOptions(connect_timeout_s=1)
            for wrong in (url, url.replace(":main@", ":wrong@") + "?sentinel_password=watch"):
                with connect(wrong, options) as client, pytest.raises(AuthenticationFailed):
                    retry(client.ping, RetryPolicy(timeout_s=0), wrong)


@pytest.mark.parametrize(
    ("info", "is_cluster", "codes"),
    [
        ({"redis_version": "7.0.0", "cluster_enabled": 1}, True, []),
        ({"redis_version": "6.2.14", "cluster_enabled": 1}, True, ["version"]),
        ({"redis_version": "7.2.4", "cluster_enabled": 0}, True, ["topology"]),
        ({"redis_version": "7.2.4", "cluster_enabled": 1}, False, ["topology"]),
        ({"redis_version": "6.2.14", "cluster_enabled": 0}, False, []),
    ],
)
def test_the_url_must_fit_the_server(
    info: dict[str, Any], is_cluster: bool, codes: list[str]
) -> None:
    found = findings({"aof_enabled": 1, **info}, is_cluster=is_cluster)
    assert [finding.code for finding in found] == codes
    assert {finding.severity for finding in found} <= {"error"}

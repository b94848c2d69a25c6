"""URLs, passwords, timeouts and errors of the connection to Redis."""

from __future__ import annotations

import asyncio
import contextlib
import ssl

import pytest
from redis import exceptions

from tokenmill import _redis_errors
from tokenmill._redis import DEFAULT_URL, RedisOptions, aconnect, connect, redis_url
from tokenmill._redis_errors import RetryPolicy, aretry, is_retryable, retry, translate, translated
from tokenmill._server_check import acheck_server, check_server, findings
from tokenmill.embedded import EmbeddedServer
from tokenmill.errors import (
    AuthenticationFailed,
    ConfigurationError,
    ProtocolError,
    QueueUnavailable,
)

URL = "redis://user:s3cret@queue.example:6380/2"


@pytest.fixture(autouse=True)
def no_redis_variables(monkeypatch):
    for name in ("REDIS_URL", "TOKENMILL_REDIS_URL", "TOKENMILL_INSECURE_REDIS"):
        monkeypatch.delenv(name, raising=False)
    for name in ("REDIS_PASSWORD_FILE", "TOKENMILL_REDIS_PASSWORD_FILE"):
        monkeypatch.delenv(name, raising=False)


def connection_options(url, options=None):
    """The options of a connection, sync and async, which must agree."""
    sync = connect(url, options).connection_pool
    other = aconnect(url, options).connection_pool
    # Both hold objects of their own, for the retries and more.
    plain = (str, int, float, bool, dict)
    values = {n: v for n, v in sync.connection_kwargs.items() if isinstance(v, plain)}
    assert {name: other.connection_kwargs.get(name) for name in values} == values
    assert sync.connection_class.__name__ == other.connection_class.__name__
    return sync.connection_kwargs | {"class": sync.connection_class.__name__}


# Where to connect


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        (None, {}, DEFAULT_URL),
        (None, {"REDIS_URL": "redis://b"}, "redis://b"),
        (None, {"TOKENMILL_REDIS_URL": "redis://a", "REDIS_URL": "redis://b"}, "redis://a"),
        (None, {"TOKENMILL_REDIS_URL": "", "REDIS_URL": "redis://b"}, "redis://b"),
        ("redis://c", {"TOKENMILL_REDIS_URL": "redis://a"}, "redis://c"),
    ],
)
def test_the_url_comes_from_the_caller_then_from_the_environment(url, environ, expected):
    assert redis_url(url, environ) == expected


def test_user_password_host_port_and_database_are_read_from_the_url():
    options = connection_options("redis://us%40er:p%3Aw@queue.internal:6380/2")
    expected = {
        "username": "us@er", "password": "p:w", "host": "queue.internal", "port": 6380, "db": 2,
        "class": "MasterConnection",
    }  # fmt: skip
    assert expected.items() <= options.items()


def test_tls_checks_certificate_and_host_name_unless_told_otherwise():
    pool = connect("rediss://queue.example").connection_pool
    connection = pool.connection_class(**pool.connection_kwargs)
    assert connection.cert_reqs == ssl.CERT_REQUIRED
    assert connection.check_hostname
    assert connection_options("rediss://queue.example")["class"] == "MasterSSLConnection"


def test_a_unix_socket_with_a_database():
    options = connection_options("unix:///run/redis.sock?db=3")
    assert (options["path"], options["db"]) == ("/run/redis.sock", 3)


@pytest.mark.parametrize("url", ["redis://h", "rediss://h", "unix:///s"])
def test_the_traps_of_redis_py_are_closed(url):
    options = connection_options(url, RedisOptions(socket_timeout_s=7, connect_timeout_s=3))
    expected = {
        "socket_timeout": 7, "socket_connect_timeout": 3, "decode_responses": True,
        "encoding_errors": "replace", "protocol": 2, "health_check_interval": 0,
    }  # fmt: skip
    assert expected.items() <= options.items()
    for client in (connect(url), aconnect(url)):
        assert client.connection_pool.connection_kwargs["retry"].get_retries() == 0
        assert client.get_retry().get_retries() == 0


@pytest.mark.parametrize("url", ["redis://h", "rediss://h"])
def test_dead_peers_are_noticed(url):
    assert connection_options(url)["socket_keepalive"] is True


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "must start with"),
        ("redis://h?retry_on_timeout=yes", "retry_on_timeout"),
        ("redis://h?protocol=3", "protocol"),
        ("redis://h?decode_responses=no", "decode_responses"),
    ],
)
def test_a_wrong_url_is_refused_by_both(url, message):
    for build in (connect, aconnect):
        with pytest.raises(ConfigurationError, match=message):
            build(url)


def test_the_password_may_come_from_a_file(monkeypatch, tmp_path):
    secret = tmp_path / "password"
    secret.write_text("from file\n")
    monkeypatch.setenv("REDIS_PASSWORD_FILE", str(secret))
    assert connection_options("redis://user@h")["password"] == "from file"
    assert connection_options("redis://user:own@h")["password"] == "own"
    monkeypatch.setenv("TOKENMILL_REDIS_PASSWORD_FILE", str(tmp_path / "missing"))
    with pytest.raises(ConfigurationError, match="TOKENMILL_REDIS_PASSWORD_FILE"):
        connect("redis://h")


# What goes wrong


@pytest.mark.parametrize(
    ("error", "ours", "words"),
    [
        (exceptions.ConnectionError("refused"), QueueUnavailable, "cannot be reached"),
        (exceptions.TimeoutError("slow"), QueueUnavailable, "cannot be reached"),
        (ConnectionResetError(), QueueUnavailable, "if it expects TLS"),
        (exceptions.BusyLoadingError("x"), QueueUnavailable, "loading"),
        (exceptions.OutOfMemoryError("x"), QueueUnavailable, "refuses writes"),
        (exceptions.ReadOnlyError("x"), QueueUnavailable, "refuses writes"),
        (exceptions.ResponseError("call to f_1: -OOM command"), QueueUnavailable, "refuses"),
        (exceptions.AuthenticationError("x"), AuthenticationFailed, "PASSWORD_FILE"),
        (exceptions.NoPermissionError("x"), ConfigurationError, "ACL"),
        (exceptions.ResponseError("ACL failure in script: x"), ConfigurationError, "ACL"),
        (exceptions.ResponseError("DB index is out of range"), ConfigurationError, "database"),
        (ssl.SSLCertVerificationError("x"), ConfigurationError, "ssl_ca_certs"),
        (exceptions.ResponseError("WRONGTYPE prompt"), ProtocolError, "refused a command"),
    ],
)
def test_each_error_becomes_one_clear_line_of_ours(error, ours, words):
    result = translate(error, URL)
    assert type(result) is ours
    assert words in str(result)
    assert "queue.example:6380" in str(result)
    assert "s3cret" not in str(result)
    assert "prompt" not in str(result)
    assert "\n" not in str(result)
    assert is_retryable(error) == (ours is QueueUnavailable)


def test_translated_keeps_the_cause():
    error = exceptions.ConnectionError("refused")
    with pytest.raises(QueueUnavailable) as raised, translated(URL):
        raise error
    assert raised.value.__cause__ is error


@pytest.fixture
def no_pauses(monkeypatch):
    """Pauses take no time, but are written down."""
    pauses = []

    async def asleep(pause_s):
        pauses.append(pause_s)

    monkeypatch.setattr(_redis_errors.time, "sleep", pauses.append)
    monkeypatch.setattr(_redis_errors.asyncio, "sleep", asleep)
    return pauses


class Flaky:
    """Fails with `errors`, one a call, then answers."""

    def __init__(self, *errors):
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self):
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"

    async def later(self):
        return self()


def both_ways(flaky, policy):
    """Call sync or async, the caller's choice: both must do the same."""
    return {
        "sync": lambda: retry(flaky, policy, URL),
        "async": lambda: asyncio.run(aretry(flaky.later, policy, URL)),
    }


@pytest.mark.parametrize("way", ["sync", "async"])
def test_retry_repeats_what_may_pass_with_growing_pauses(no_pauses, way):
    flaky = Flaky(*[exceptions.ConnectionError()] * 5)
    policy = RetryPolicy(timeout_s=60, base_s=1, cap_s=4)
    assert both_ways(flaky, policy)[way]() == "answer"
    assert flaky.num_calls == 6
    for pause_s, longest_s in zip(no_pauses, [1, 2, 4, 4, 4], strict=True):
        assert longest_s / 2 <= pause_s <= longest_s


@pytest.mark.parametrize("way", ["sync", "async"])
@pytest.mark.parametrize("error", [exceptions.AuthenticationError(), exceptions.DataError()])
def test_retry_does_not_repeat_what_cannot_pass(no_pauses, way, error):
    flaky = Flaky(error)
    with pytest.raises((AuthenticationFailed, ProtocolError)):
        both_ways(flaky, RetryPolicy())[way]()
    assert flaky.num_calls == 1


@pytest.mark.parametrize("way", ["sync", "async"])
def test_retry_gives_up_before_its_time_is_over(no_pauses, way):
    flaky = Flaky(*[exceptions.ConnectionError()] * 5)
    with pytest.raises(QueueUnavailable):
        both_ways(flaky, RetryPolicy(timeout_s=0))[way]()
    assert (flaky.num_calls, no_pauses) == (1, [])


# Against a server


@contextlib.asynccontextmanager
async def server_that_swallows_replies():
    """Greets clients and takes commands, but never answers one. Yields its URL and what it got."""
    received = []

    async def serve(reader, writer):
        with contextlib.closing(writer):
            while data := await reader.read(4096):
                # The client's own introduction; it may come in one piece or several.
                writer.write(b"+OK\r\n" * data.count(b"SETINFO"))
                received.append(data)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"redis://127.0.0.1:{port}", received


@pytest.mark.parametrize("way", ["sync", "async"])
async def test_a_command_whose_reply_is_lost_is_not_sent_again(way):
    """redis-py's own retry would store the entry many times."""
    options = RedisOptions(socket_timeout_s=0.1)
    async with server_that_swallows_replies() as (url, received):
        if way == "sync":
            with connect(url, options) as client, pytest.raises(exceptions.TimeoutError):
                await asyncio.to_thread(client.xadd, "s", {"a": "b"})
        else:
            async with aconnect(url, options) as client:
                with pytest.raises(exceptions.TimeoutError):
                    await client.xadd("s", {"a": "b"})
        assert b"".join(received).count(b"XADD") == 1


def test_bytes_that_are_no_text_can_be_read(server, keyspace):
    with connect(server.url) as client:
        client.xadd(keyspace.ready("1"), {b"\xff": b"\xfe\x00"})
        ((_, fields),) = client.xrange(keyspace.ready("1"))
        assert fields == {"\ufffd": "\ufffd\x00"}


def test_a_wrong_password_and_a_missing_right_are_told_apart():
    with EmbeddedServer(tcp=True) as server:
        host = server.url.removeprefix("redis://")
        with connect(server.url) as admin:
            admin.acl_setuser(
                "weak", enabled=True, passwords="+pw", categories=["-@all"],
                commands=["+ping", "+select"],
            )  # fmt: skip
            admin.config_set("requirepass", "pw")
        with connect(f"redis://:wrong@{host}") as client, pytest.raises(AuthenticationFailed):
            retry(client.ping, RetryPolicy(), server.url)
        with connect(f"redis://:pw@{host}") as client:
            assert retry(client.ping, RetryPolicy(), server.url)
        with connect(f"redis://weak:pw@{host}") as client:
            with pytest.raises(ConfigurationError, match="ACL"):
                retry(lambda: client.get("k"), RetryPolicy(), server.url)
            assert [finding.code for finding in check_server(client)] == ["unknown"]


def test_a_database_that_does_not_exist(server):
    with connect(f"{server.url}?db=99") as client, pytest.raises(ConfigurationError):
        retry(client.ping, RetryPolicy(), server.url)


def test_a_server_that_is_away_is_waited_for():
    with EmbeddedServer() as server, connect(server.url) as client:
        server.kill()
        with pytest.raises(QueueUnavailable):
            retry(client.ping, RetryPolicy(timeout_s=0.1), server.url)
        server.restart()
        assert retry(client.ping, RetryPolicy(), server.url)


async def test_asyncio_waits_too_and_checks_the_server():
    with EmbeddedServer() as server:
        async with aconnect(server.url) as client:
            server.kill()
            with pytest.raises(QueueUnavailable):
                await aretry(client.ping, RetryPolicy(timeout_s=0), server.url)
            server.restart()
            found = await aretry(lambda: acheck_server(client), RetryPolicy(), server.url)
            assert [finding.code for finding in found] == ["persistence"]


# Is the server fit?


@pytest.mark.parametrize(
    ("info", "found"),
    [
        ({"redis_version": "6.2.0", "aof_enabled": 1}, []),
        ({"redis_version": "7.2.4", "aof_enabled": 0}, [("warning", "persistence")]),
        ({"redis_version": "6.0.16", "aof_enabled": 1}, [("error", "version")]),
        ({"aof_enabled": 1}, [("error", "version")]),
        (
            {"redis_version": "10.0.1", "aof_enabled": 1, "maxmemory_policy": "allkeys-lru"},
            [("error", "eviction")],
        ),
    ],
)
def test_findings(info, found):
    info = {"maxmemory_policy": "noeviction"} | info
    assert [(finding.severity, finding.code) for finding in findings(info)] == found


def test_a_server_that_evicts_is_found():
    evicting = EmbeddedServer(extra_args=("--maxmemory-policy", "allkeys-lru"))
    with evicting as server, connect(server.url) as client:
        assert "eviction" in [finding.code for finding in check_server(client)]

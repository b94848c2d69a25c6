"""rediss:// against a real server: what is verified, and what each failure says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support_redis import unique_keyspace
from support_sdk import IDS, TEXT
from support_servers import (
    NUM_SLOTS,
    Certificates,
    Server,
    free_ports,
    single,
    tls_server,
    until,
)
from tokenmill import AsyncClient, Client, ConfigurationError, QueueUnavailable
from tokenmill._redis import CA_FILE_VARIABLE, RedisOptions, aconnect, connect
from tokenmill._redis_errors import RetryPolicy, aretry, retry
from tokenmill.errors import TokenmillError
from tokenmill.testing import FakeWorker
from tokenmill_worker.settings import load_settings


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(certificates: Certificates) -> Iterator[Server]:
    with tls_server(certificates) as server:
        yield server


@pytest.fixture
def url(server: Server, certificates: Certificates) -> str:
    return f"{server.url}?ssl_ca_certs={certificates.ca}"


def ping(url: str, options: RedisOptions | None = None) -> None:
    with connect(url, options) as client:
        retry(client.ping, RetryPolicy(timeout_s=0), url)


def ping_async(url: str, options: RedisOptions | None = None) -> None:
    async def ping() -> None:
        async with aconnect(url, options) as client:
            await aretry(client.ping, RetryPolicy(timeout_s=0), url)

    asyncio.run(ping())


both = pytest.mark.parametrize("ping", [ping, ping_async])


def test_a_round_trip_over_tls(url: str) -> None:
    keys = unique_keyspace()
    with (
        connect(url) as connection,
        FakeWorker(connection, lambda _: TEXT, namespace=keys.namespace),
        Client(url, namespace=keys.namespace) as client,
        client.stream("x") as stream,
    ):
        assert "".join(stream) == TEXT


async def test_a_round_trip_over_tls_async(url: str) -> None:
    keys = unique_keyspace()
    with (
        connect(url) as connection,
        FakeWorker(connection, lambda _: TEXT, namespace=keys.namespace),
    ):
        async with AsyncClient(url, namespace=keys.namespace) as client:
            assert (await client.generate("x")).token_ids == IDS


@both
def test_the_ca_may_come_from_the_environment_or_an_option(
    server: Server,
    certificates: Certificates,
    monkeypatch: pytest.MonkeyPatch,
    ping: Callable[..., None],
) -> None:
    settings = load_settings({"redis_url": server.url, "redis_ca_file": str(certificates.ca)})
    ping(server.url, settings.redis_options("worker"))
    monkeypatch.setenv(CA_FILE_VARIABLE, str(certificates.ca))
    ping(server.url)
    with pytest.raises(ConfigurationError):  # the URL's own wins
        ping(f"{server.url}?ssl_ca_certs={certificates.other_ca}")


def refusal(ping: Callable[..., None], url: str) -> TokenmillError:
    """The one exception that `ping` ends with, after checks that hold for each."""
    with pytest.raises(TokenmillError) as refused:
        ping(url)
    message = str(refused.value)
    assert "\n" not in message
    assert "hunter2" not in message
    return refused.value


def with_password(url: str) -> str:
    return url.replace("://", "://user:hunter2@")


@both
def test_a_wrong_ca_is_refused(
    server: Server, certificates: Certificates, ping: Callable[..., None]
) -> None:
    for url in (server.url, f"{server.url}?ssl_ca_certs={certificates.other_ca}"):
        error = refusal(ping, with_password(url))
        assert isinstance(error, ConfigurationError)
        assert "not trusted" in str(error)
        assert "ssl_ca_certs" in str(error)


@both
def test_a_certificate_for_another_host_is_refused(
    server: Server, certificates: Certificates, ping: Callable[..., None]
) -> None:
    # Another name of 127.0.0.1, which the certificate does not hold.
    url = f"rediss://127.1:{server.port}?ssl_ca_certs={certificates.ca}"
    error = refusal(ping, with_password(url))
    assert isinstance(error, ConfigurationError)
    assert "another host name" in str(error)


@both
def test_plain_text_to_a_tls_port_says_so(server: Server, ping: Callable[..., None]) -> None:
    error = refusal(ping, with_password(server.url.replace("rediss:", "redis:")))
    assert isinstance(error, QueueUnavailable)
    assert "rediss://" in str(error)


@both
def test_tls_to_a_plain_port_ends_in_bounded_time(ping: Callable[..., None]) -> None:
    with single("redis-7.0") as plain:
        error = refusal(ping, with_password(plain.url.replace("redis:", "rediss:")))
    assert isinstance(error, QueueUnavailable)
    assert "redis://" in str(error)


@both
def test_a_client_certificate_that_is_missing_is_asked_for(
    certificates: Certificates, ping: Callable[..., None]
) -> None:
    ca = f"?ssl_ca_certs={certificates.ca}"
    own = f"&ssl_certfile={certificates.folder}/server.pem"
    own += f"&ssl_keyfile={certificates.folder}/server.key"
    with tls_server(certificates, "--tls-auth-clients", "yes") as strict:
        error = refusal(ping, strict.url + ca)
        assert "ssl_certfile" in str(error)
        ping(strict.url + ca + own)


@pytest.mark.parametrize("option", ["ssl_ca_certs", "ssl_certfile"])
def test_a_file_that_is_no_certificate_is_refused_at_once(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigurationError, match=option):
        connect(f"rediss://localhost?{option}={tmp_path}/none.pem")
    if option == "ssl_ca_certs":
        (tmp_path / "none.pem").write_text("no certificate")
        with pytest.raises(ConfigurationError, match=option):
            connect(f"rediss://localhost?{option}={tmp_path}/none.pem")


def test_verification_is_on_by_default_and_sync_and_async_agree(url: str) -> None:
    sync = connect(url).connection_pool
    other = aconnect(url).connection_pool
    connections = [pool.connection_class(**pool.connection_kwargs) for pool in (sync, other)]
    assert [connection.cert_reqs for connection in connections] == [ssl.CERT_REQUIRED] * 2
    assert [connection.check_hostname for connection in connections] == [True] * 2


@both
def test_a_cluster_over_tls_is_asked_and_used_with_verification(
    certificates: Certificates, ping: Callable[..., None]
) -> None:
    """One node with all slots, which answers with the address of its TLS port."""
    arguments = (
        "--cluster-enabled", "yes", "--tls-cluster", "yes", "--cluster-port", str(free_ports(1)[0])
    )  # fmt: skip
    with tls_server(certificates, *arguments) as node:
        with closing(node.client()) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, NUM_SLOTS - 1)
            until(lambda: client.set("k", "v"))
        url = f"rediss+cluster://127.0.0.1:{node.port}"
        ping(f"{url}?ssl_ca_certs={certificates.ca}")
        error = refusal(ping, f"{url}?ssl_ca_certs={certificates.other_ca}")
        assert "not trusted" in str(error)

"""Redis URLs: what they mean, what they must not show, and where plain text may travel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill import AsyncClient, Client
from tokenmill._redis import RedisOptions, connect
from tokenmill._url import Address, RedisUrl, has_password, is_private, redact_url
from tokenmill.errors import ConfigurationError

# What a URL means


@pytest.mark.parametrize(
    ("url", "topology", "servers", "service", "server_url"),
    [
        ("redis://h", "single", [("h", 6379)], "", "redis://h"),
        ("rediss://u:p@h:1/2", "single", [("h", 1)], "", "rediss://u:p@h:1/2"),
        ("redis://[::1]:7/0", "single", [("::1", 7)], "", "redis://[::1]:7/0"),
        ("unix:///run/r.sock?db=1", "single", [], "", "unix:///run/r.sock?db=1"),
        (
            "redis+sentinel://u:p@a,b:5/main/3?sentinel_password=q&client_name=n",
            "sentinel", [("a", 26379), ("b", 5)], "main", "redis://u:p@a:26379/3?client_name=n",
        ),
        ("rediss+sentinel://a/main", "sentinel", [("a", 26379)], "main", "rediss://a:26379"),
        (
            "redis+cluster://u:p@a:1,b:2,[::1]:3",
            "cluster", [("a", 1), ("b", 2), ("::1", 3)], "", "redis://u:p@a:1",
        ),
        ("rediss+cluster://a/0", "cluster", [("a", 6379)], "", "rediss://a:6379/0"),
    ],
)  # fmt: skip
def test_the_parts_of_a_url(url, topology, servers, service, server_url) -> None:
    parsed = RedisUrl.parse(url)

    assert parsed.topology == topology
    assert parsed.servers == tuple(Address(*server) for server in servers)
    assert (parsed.service, parsed.server_url) == (service, server_url)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://h", "must start with"),
        ("localhost:6379", "must start with"),
        ("unix+cluster:///h", "must start with"),
        ("redis+galera://h", "must start with"),
        ("redis://h:port", "port"),
        ("redis://h:99999", "port"),
        ("redis://[::1", "brackets"),
        ("redis://h/chat", "database number"),
        ("redis://h,i", "several hosts"),
        ("redis+sentinel://h", "master's name"),
        ("redis+sentinel://h/main/x", "database number"),
        ("redis+cluster://h/1", "database 0 only"),
        ("redis+cluster://h?db=1", "database 0 only"),
        ("unix://", "path of a socket"),
        ("redis://h?protocol=3", "'protocol'"),
        ("redis+cluster://h?sentinel_password=x", "'sentinel_password'"),
        ("redis://h?secret@h", r"\(not shown\)"),
    ],
)
def test_a_wrong_url_is_refused_without_repeating_it(url: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message) as refused:
        RedisUrl.parse(url)
    assert "//h" not in str(refused.value)
    assert "secret" not in str(refused.value)


# What a URL must not show


@pytest.mark.parametrize(
    ("url", "redacted"),
    [
        ("redis://user:s3cret@queue.example:6380/2", "redis://user:***@queue.example:6380/2"),
        ("redis://:s3cret@h", "redis://:***@h"),
        ("redis://u:a%40s3cret@h", "redis://u:***@h"),
        ("redis://u:a@s3cret@h", "redis://u:***@h"),
        ("unix:///s?password=s3cret&db=1", "unix:///s?password=***&db=1"),
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://[::1]:1/0", "redis://[::1]:1/0"),
        (
            "redis+sentinel://u:s3cret@a:1,b:2/main/0?sentinel_password=s3cret",
            "redis+sentinel://u:***@a:1,b:2/main/0?sentinel_password=***",
        ),
        ("rediss+cluster://:s3cret@a,[::1]:2", "rediss+cluster://:***@a,[::1]:2"),
        ("rediss://h?ssl_password=s3cret", "rediss://h?ssl_password=***"),
        # Malformed, as people write them.
        ("redis://:s3/cret@h", "redis://***"),
        ("redis://:s3?cret@h", "redis://***"),
        ("redis://:s3#cret@h", "redis://***"),
        ("redis://:s3cret", "redis://***"),
    ],
)
def test_a_redacted_url_holds_no_password(url: str, redacted: str) -> None:
    assert redact_url(url) == redacted


@given(st.text(min_size=1).map(lambda text: f"canary{text}canary"))
def test_no_password_shows_however_it_is_written(password: str) -> None:
    assert "canary" not in redact_url(f"redis://user:{password}@host:6379/0")


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h/0", False),
        ("redis://user@h/0", False),
        ("unix:///s?db=1", False),
        ("redis://:p@h", True),
        ("redis+cluster://u:p@a,b", True),
        ("redis://h?password=p", True),
        ("redis+sentinel://h/m?sentinel_password=p", True),
    ],
)
def test_a_password_in_a_url_is_seen(url: str, expected: bool) -> None:
    assert has_password(url) is expected


# Where plain text may travel

PRIVATE = [
    "localhost", "redis", "127.0.0.1", "::1", "10.1.2.3", "172.16.0.9", "192.168.1.1", "fd00::1",
    "fe80::1%eth0", "100.64.0.1", "redis.internal", "db.local", "svc.cluster.local.", "x.localhost",
    "::ffff:10.0.0.1",
]  # fmt: skip
PUBLIC = [
    "queue.example.com", "8.8.8.8", "2001:4860:4860::8888", "172.32.0.1", "internal.example",
    "::ffff:8.8.8.8", "134744072", "0x08080808",
]  # fmt: skip


@pytest.mark.parametrize("host", PRIVATE)
def test_private_hosts(host: str) -> None:
    assert is_private(host)


@pytest.mark.parametrize("host", PUBLIC)
def test_public_hosts(host: str) -> None:
    assert not is_private(host)


PUBLIC_URLS = [
    "redis://queue.example.com/0",
    "redis://u:s3cret@8.8.8.8",
    "redis+cluster://10.0.0.1,queue.example.com",
    "redis+sentinel://queue.example.com/main",
    "rediss://queue.example.com?ssl_cert_reqs=none",
    "rediss://queue.example.com?ssl_check_hostname=no",
]


@pytest.mark.parametrize("url", PUBLIC_URLS)
def test_nothing_unprotected_goes_to_a_public_host_unless_asked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENMILL_INSECURE_REDIS", raising=False)
    for build in (connect, Client, AsyncClient):
        with pytest.raises(ConfigurationError, match="--insecure-redis") as refused:
            build(url)
        assert "s3cret" not in str(refused.value)
    connect(url, RedisOptions(insecure=True)).close()
    Client(url, insecure=True).close()
    monkeypatch.setenv("TOKENMILL_INSECURE_REDIS", "1")
    Client(url).close()
    with pytest.raises(ConfigurationError):
        connect(url, RedisOptions(insecure=False))


@pytest.mark.parametrize(
    "url",
    ["rediss://queue.example.com", "rediss+cluster://8.8.8.8", "redis://10.0.0.1", "unix:///s"],
)
def test_what_is_safe_needs_no_asking(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKENMILL_INSECURE_REDIS", raising=False)
    connect(url).close()

"""Redis clients from a URL, sync and async, built the way the protocol needs them.

redis-py repeats a command by itself after a lost reply, which stores a plain XADD twice, so its
own retry is off and `_redis_errors.retry` repeats only what is idempotent. RESP2 is asked for
because its reply shapes are the same in every release of redis-py. Sentinel and cluster are found
by our own connections: redis-py's clients for them retry on their own account.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from . import _async_connections, _connections
from ._locator import Locator, cluster_search, sentinel_search
from ._url import RedisUrl, require_safe_way
from .errors import ConfigurationError

DEFAULT_URL: Final = "redis://localhost:6379/0"
URL_VARIABLES: Final = ("TOKENMILL_REDIS_URL", "REDIS_URL")
URL_FILE_VARIABLE: Final = "TOKENMILL_REDIS_URL_FILE"
PASSWORD_FILE_VARIABLES: Final = ("TOKENMILL_REDIS_PASSWORD_FILE", "REDIS_PASSWORD_FILE")
CA_FILE_VARIABLE: Final = "TOKENMILL_REDIS_CA_FILE"
INSECURE_VARIABLE: Final = "TOKENMILL_INSECURE_REDIS"
AnyRedis: TypeAlias = redis.Redis | redis.asyncio.Redis
_YES = frozenset({"1", "true", "yes", "on"})


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Times in seconds. `socket_timeout_s` bounds every reply, blocking reads included: a BLOCK
    must be at most half of it. `health_check_interval_s` above 0 sends a PING before a command
    on a connection that was idle for longer.

    `ca_file` holds the certificates to trust with TLS; `insecure` allows a way on which anybody
    could listen, see `require_safe_way`. None: as the environment says.
    """

    socket_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    health_check_interval_s: int = 0
    max_connections: int | None = None
    client_name: str | None = None
    ca_file: str | None = None
    insecure: bool | None = None


def redis_url(url: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """`url`, else TOKENMILL_REDIS_URL, what the file of TOKENMILL_REDIS_URL_FILE holds, REDIS_URL,
    localhost.

    Raises:
        ConfigurationError: the file cannot be read.
    """
    environ = os.environ if environ is None else environ
    ours, common = (environ.get(name) for name in URL_VARIABLES)
    if url or ours:
        return url or str(ours)
    if file := environ.get(URL_FILE_VARIABLE):
        return read_secret(URL_FILE_VARIABLE, file)
    return common or DEFAULT_URL


def read_secret(variable: str, file: str) -> str:
    """The text of a file that holds a secret, without its last line break.

    Raises:
        ConfigurationError: the file that `variable` names cannot be read.
    """
    try:
        return Path(file).read_text(encoding="utf-8").rstrip("\r\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{variable}: the file cannot be read") from error


def connect(
    url: str | None = None, options: RedisOptions | None = None, *, slot: int = 0
) -> redis.Redis:
    """A client for `url` (see `redis_url`). Connects with its first command.

    In a cluster it talks to the master of `slot` alone, and follows it when it moves.

    Raises:
        ConfigurationError: the URL, a file it names or the password file is wrong, or the way is
            not safe.
    """
    parsed, kwargs = _parsed(url, options or RedisOptions(), slot)
    client: redis.Redis = redis.Redis.from_url(
        parsed.server_url, retry=Retry(NoBackoff(), 0), **kwargs
    )
    if not parsed.is_socket:
        client.connection_pool.connection_class = (
            _connections.MasterSSLConnection if parsed.uses_tls else _connections.MasterConnection
        )
    return client


def aconnect(
    url: str | None = None, options: RedisOptions | None = None, *, slot: int = 0
) -> redis.asyncio.Redis:
    """`connect` for asyncio; makes no I/O, so it is no coroutine."""
    parsed, kwargs = _parsed(url, options or RedisOptions(), slot)
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
        parsed.server_url, retry=AsyncRetry(NoBackoff(), 0), **kwargs
    )
    if not parsed.is_socket:
        # Not by an argument: the asyncio client lets the URL's own class win.
        client.connection_pool.connection_class = (
            _async_connections.MasterSSLConnection
            if parsed.uses_tls
            else _async_connections.MasterConnection
        )
    return client


def share_locator(*clients: redis.asyncio.Redis) -> None:
    """Let clients of one partition go to a new master together; before their first command."""
    first, *others = (client.connection_pool.connection_kwargs for client in clients)
    if "locator" in first:  # a socket's connection does not know the word
        for kwargs in others:
            kwargs["locator"] = first["locator"]


def knows_master(client: AnyRedis) -> bool:
    """Whether Sentinels or nodes of a cluster have told this client where the master is."""
    locator: Locator | None = client.connection_pool.connection_kwargs.get("locator")
    return locator is not None and locator.master is not None


def is_cluster(url: str | None = None) -> bool:
    """Whether the pools behind `url` are spread over the nodes of a cluster."""
    return RedisUrl.parse(redis_url(url)).topology == "cluster"


def _parsed(url: str | None, options: RedisOptions, slot: int) -> tuple[RedisUrl, dict[str, Any]]:
    """The URL and redis-py's arguments, which an option in the URL overrides."""
    parsed = RedisUrl.parse(redis_url(url))
    insecure = _is_insecure(options)
    for server in parsed.servers:
        require_safe_way(server.host, verified=parsed.verifies_tls, insecure=insecure)
    kwargs: dict[str, Any] = {
        "decode_responses": True,
        # A plain XADD may hold any bytes: reading it must not fail.
        "encoding_errors": "replace",
        "protocol": 2,
        "socket_timeout": options.socket_timeout_s,
        "socket_connect_timeout": options.connect_timeout_s,
        "health_check_interval": options.health_check_interval_s,
        "max_connections": options.max_connections,
        "client_name": options.client_name,
    }
    if not parsed.is_socket:
        kwargs |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    if parsed.uses_tls:
        kwargs |= _tls(parsed, options)
    password = _password_from_file(os.environ)
    if password is not None:
        kwargs["password"] = password  # one in the URL wins
    if parsed.topology != "single":
        kwargs["locator"] = _locator(parsed, kwargs, slot=slot, insecure=insecure)
    return parsed, kwargs


def _is_insecure(options: RedisOptions) -> bool:
    if options.insecure is not None:
        return options.insecure
    return os.environ.get(INSECURE_VARIABLE, "").lower() in _YES


def _tls(parsed: RedisUrl, options: RedisOptions) -> dict[str, Any]:
    """Redis-py's arguments for TLS. A file that cannot be used would look like a server that
    cannot be reached, so it is tried here."""
    ca_file = options.ca_file or os.environ.get(CA_FILE_VARIABLE) or None
    ca_file = parsed.options.get("ssl_ca_certs", ca_file)
    try:
        if ca_file:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(ca_file)
        for name in ("ssl_certfile", "ssl_keyfile"):
            if name in parsed.options:
                Path(parsed.options[name]).open("rb").close()
    except OSError:  # SSLError is one: no certificates in it
        raise ConfigurationError(
            "Redis URL: the file of ssl_ca_certs, ssl_certfile or ssl_keyfile cannot be read, or "
            "holds no certificate in PEM form"
        ) from None
    return {"ssl_ca_certs": ca_file} if ca_file else {}


def _locator(parsed: RedisUrl, kwargs: Mapping[str, Any], *, slot: int, insecure: bool) -> Locator:
    """For a connection that asks with the same timeouts and trust as those it is asked for."""
    asking = {name: kwargs[name] for name in _ASKING if name in kwargs}
    asking |= {k: v for k, v in _from_url(parsed).items() if k in _ASKING or k.startswith("ssl_")}
    if parsed.topology == "sentinel":
        asking["username"] = parsed.options.get("sentinel_username")
        asking["password"] = parsed.options.get("sentinel_password")
    search = (
        sentinel_search(parsed.service) if parsed.topology == "sentinel" else cluster_search(slot)
    )
    return Locator(
        servers=parsed.servers,
        search=search,
        uses_tls=parsed.uses_tls,
        connection=asking,
        verified=parsed.verifies_tls,
        insecure=insecure,
    )


#: What the connection that asks for the master has in common with the one to the master.
_ASKING = (
    "decode_responses", "protocol", "socket_timeout", "socket_connect_timeout", "socket_keepalive",
    "socket_keepalive_options", "username", "password", "ssl_ca_certs",
)  # fmt: skip


def _from_url(parsed: RedisUrl) -> dict[str, Any]:
    """What redis-py reads out of the URL."""
    options: dict[str, Any] = redis.connection.parse_url(parsed.server_url)  # type: ignore[no-untyped-call]
    return options


def _password_from_file(environ: Mapping[str, str]) -> str | None:
    for name in PASSWORD_FILE_VARIABLES:
        path = environ.get(name)
        if path:
            return read_secret(name, path)
    return None


def _keepalive() -> dict[int, int]:
    """A dead peer is noticed within about a minute; empty where the system lacks the options."""
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): n for name, n in wanted.items() if hasattr(socket, name)}

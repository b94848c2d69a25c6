"""Redis clients from a URL, sync and async, built the way the protocol needs them.

redis-py repeats a command by itself after a lost reply, which stores a plain XADD twice, so its
own retry is off and `_redis_errors.retry` repeats only what is idempotent. RESP2 is asked for
because its reply shapes are the same in every release of redis-py.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.retry import Retry

from .errors import ConfigurationError

DEFAULT_URL: Final = "redis://localhost:6379/0"
URL_VARIABLES: Final = ("TOKENMILL_REDIS_URL", "REDIS_URL")
PASSWORD_FILE_VARIABLES: Final = ("TOKENMILL_REDIS_PASSWORD_FILE", "REDIS_PASSWORD_FILE")
#: What a URL may set after the `?`; the rest would undo what this module takes care of.
URL_OPTIONS: Final = frozenset(
    {"db", "username", "password", "client_name", "max_connections", "health_check_interval",
     "socket_timeout", "socket_connect_timeout"}
)  # fmt: skip
_SCHEMES = ("redis", "rediss", "unix")


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """Times in seconds. `socket_timeout_s` bounds every reply, blocking reads included: a BLOCK
    must be at most half of it. `health_check_interval_s` above 0 sends a PING before a command
    on a connection that was idle for longer."""

    socket_timeout_s: float = 5.0
    connect_timeout_s: float = 2.0
    health_check_interval_s: int = 0
    max_connections: int | None = None
    client_name: str | None = None


def redis_url(url: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """`url`, else the first of URL_VARIABLES that is set, else localhost."""
    if url:
        return url
    environ = os.environ if environ is None else environ
    return next((environ[name] for name in URL_VARIABLES if environ.get(name)), DEFAULT_URL)


def redact_url(url: str) -> str:
    """The URL without its password, for logs and errors."""
    parts = urlsplit(url)
    userinfo, at, host = parts.netloc.rpartition("@")
    user, colon, _ = userinfo.partition(":")
    netloc = f"{user}{colon}{'***' if colon else ''}{at}{host}"
    query = re.sub(r"(?<=password=)[^&]*", "***", parts.query)
    return f"{parts.scheme}://{netloc}{parts.path}{'?' if query else ''}{query}"


def connect(url: str | None = None, options: RedisOptions | None = None) -> redis.Redis:
    """A client for `url` (see `redis_url`). Connects with its first command.

    Raises:
        ConfigurationError: the URL or the password file is wrong.
    """
    url = redis_url(url)
    kwargs = _client_kwargs(url, options or RedisOptions())
    client: redis.Redis = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **kwargs)
    return client


def aconnect(url: str | None = None, options: RedisOptions | None = None) -> redis.asyncio.Redis:
    """`connect` for asyncio; makes no I/O, so it is no coroutine."""
    url = redis_url(url)
    kwargs = _client_kwargs(url, options or RedisOptions())
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
        url, retry=AsyncRetry(NoBackoff(), 0), **kwargs
    )
    return client


def _client_kwargs(url: str, options: RedisOptions) -> dict[str, Any]:
    _check_url(url)
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
    if urlsplit(url).scheme != "unix":
        kwargs |= {"socket_keepalive": True, "socket_keepalive_options": _keepalive()}
    password = _password_from_file(os.environ)
    if password is not None:
        kwargs["password"] = password  # one in the URL wins
    return kwargs


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        port_is_a_number = parts.port is None or parts.port > 0
    except ValueError:
        port_is_a_number = False
    if not port_is_a_number:
        raise ConfigurationError("Redis URL: the port is not a number from 1 to 65535")
    if parts.scheme not in _SCHEMES:
        raise ConfigurationError(
            "Redis URL: it must start with redis://, rediss:// (TLS) or unix:// (a socket's path)"
        )
    if parts.scheme == "unix" and not parts.path:
        raise ConfigurationError("Redis URL: unix:// needs the path of a socket")
    if parts.scheme != "unix" and not re.fullmatch(r"/?\d*", parts.path):
        raise ConfigurationError("Redis URL: the path must be a database number, as in /0")
    for name in parse_qs(parts.query, keep_blank_values=True):
        if name not in URL_OPTIONS and not name.startswith("ssl_"):
            supported = ", ".join(sorted(URL_OPTIONS))
            raise ConfigurationError(
                f"Redis URL: unknown option {name!r}; supported: {supported} and ssl_*"
            )


def _password_from_file(environ: Mapping[str, str]) -> str | None:
    for name in PASSWORD_FILE_VARIABLES:
        path = environ.get(name)
        if path:
            try:
                return Path(path).read_text(encoding="utf-8").rstrip("\r\n")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigurationError(f"{name}: the password file cannot be read") from error
    return None


def _keepalive() -> dict[int, int]:
    """A dead peer is noticed within about a minute; empty where the system lacks the options."""
    wanted = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}
    return {getattr(socket, name): n for name, n in wanted.items() if hasattr(socket, name)}

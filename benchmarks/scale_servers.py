"""The Redis of a scale run: one embedded server, or a cluster of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil

from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer

from .processes import free_port

NUM_SLOTS = 16_384
MAX_MEMORY = "4gb"
FORM_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Servers:
    """`url` is what workers and clients connect to."""

    url: str
    nodes: tuple[EmbeddedServer, ...]

    def cpu_s(self) -> list[float]:
        """Of each node, since it started."""
        times = [psutil.Process(node.pid).cpu_times() for node in self.nodes]
        return [float(each.user + each.system) for each in times]

    def peak_bytes(self) -> int:
        """Of all nodes together."""
        peak = 0
        for node in self.nodes:
            with connect(node.url) as client:
                peak += int(client.info("memory")["used_memory_peak"])
        return peak

    def keys(self, pattern: str) -> list[str]:
        """The values of all string keys that match, on all nodes."""
        values = []
        for node in self.nodes:
            with connect(node.url) as client:
                names = list(client.scan_iter(match=pattern, count=1000))
                values += [value for name in names if (value := client.get(name))]
        return values


@contextmanager
def servers(count: int) -> Iterator[Servers]:
    if count == 1:
        with EmbeddedServer(max_memory=MAX_MEMORY) as server:
            yield Servers(server.url, (server,))
        return
    with ExitStack() as stack:
        buses = [free_port() for _ in range(count)]
        nodes = tuple(stack.enter_context(_cluster_node(bus)) for bus in buses)
        hosts = [node.url.removeprefix("redis://").removesuffix("/0") for node in nodes]
        clients = [stack.enter_context(connect(node.url)) for node in nodes]
        for number, client in enumerate(clients):
            first = number * NUM_SLOTS // count
            last = (number + 1) * NUM_SLOTS // count - 1
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        for host, bus in zip(hosts[1:], buses[1:], strict=True):
            address, _, port = host.rpartition(":")
            clients[0].execute_command("CLUSTER", "MEET", address, port, bus)
        _wait_until_formed(clients)
        yield Servers(f"redis+cluster://{','.join(hosts)}", nodes)


def _cluster_node(bus_port: int) -> EmbeddedServer:
    # The usual bus port, ten thousand above the port, may be another process's or none at all.
    arguments = ("--cluster-enabled", "yes", "--cluster-port", str(bus_port))
    return EmbeddedServer(tcp=True, max_memory=MAX_MEMORY, extra_args=arguments)


def _wait_until_formed(clients: list[Any]) -> None:
    give_up_at = time.monotonic() + FORM_TIMEOUT_S
    while not all(_is_formed(client, len(clients)) for client in clients):
        if time.monotonic() > give_up_at:
            raise SystemExit("the cluster did not form")
        time.sleep(0.1)


def _is_formed(client: Any, size: int) -> bool:
    reply = client.execute_command("CLUSTER", "INFO")
    info = reply if isinstance(reply, dict) else _pairs(str(reply))
    return (info["cluster_state"], info["cluster_known_nodes"]) == ("ok", str(size))


def _pairs(text: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in text.split() if ":" in line)

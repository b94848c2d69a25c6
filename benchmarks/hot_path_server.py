"""The server's side of the hot path: leases to write under, a listener, and what Redis spends."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from tokenmill._redis import connect
from tokenmill.calls import AppendEvent, QueueCalls
from tokenmill.embedded import EmbeddedServer
from tokenmill.keys import GROUP, Keyspace
from tokenmill.ready import create_groups, read_entries
from tokenmill.replies import STORED, Lease
from tokenmill.scripts import run

from .hot_path_engine import TOKEN_ID, TOKEN_TEXT

APPENDS_AT_A_TIME = 128


def redis_us(server: EmbeddedServer, batch: int, steps: int) -> float:
    """The server's CPU time per token: one `append` per step, and one listener."""
    keys = Keyspace()
    calls = QueueCalls(keys)
    with connect(server.url) as client, listener(server, keys, batch):
        leases = leases_of(client, batch)
        began_s = cpu_s(client)
        for seq in range(1, steps + 1):
            for first in range(0, batch, APPENDS_AT_A_TIME):
                part = leases[first : first + APPENDS_AT_A_TIME]
                codes = run(client, calls.append(append_event(lease, seq) for lease in part))
                assert codes == [STORED] * len(part)
        return (cpu_s(client) - began_s) / (batch * steps) * 1e6


def cpu_s(client: Any) -> float:
    """What the server has spent so far, in its own words: psutil counts in hundredths."""
    spent = client.info("cpu")
    return float(spent["used_cpu_user"]) + float(spent["used_cpu_sys"])


def append_event(lease: Lease, seq: int) -> AppendEvent:
    """The event of one token."""
    payload = f'{{"e":{seq},"i":{seq},"k":[{TOKEN_ID}],"t":"{TOKEN_TEXT}","a":1}}'
    return AppendEvent(lease.request_id, lease.fence, seq, payload)


def leases_of(client: Any, count: int) -> list[Lease]:
    """So many requests, enqueued and leased."""
    calls = QueueCalls(Keyspace())
    create_groups(client, calls.keys)
    for number in range(count):
        # A tenant each: nobody waits for a window.
        body = json.dumps({"prompt": "x"})
        run(client, calls.enqueue(f"request-{number}", body=body, tenant=f"t{number}"))
    streams: Any = {calls.keys.ready("1"): ">"}
    entries = read_entries(calls.keys, client.xreadgroup(GROUP, "bench", streams, count=count))
    leases = [reply.lease for reply in run(client, calls.lease("bench", entries))]
    assert len(leases) == count
    return [lease for lease in leases if lease is not None]


@contextmanager
def listener(server: EmbeddedServer, keys: Keyspace, count: int) -> Iterator[None]:
    """One connection that listens to all requests and throws away what it hears."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(urlsplit(server.url).path)
        names = " ".join(keys.channel(f"request-{number}") for number in range(count))
        connection.sendall(f"SUBSCRIBE {names}\r\n".encode())
        reader = threading.Thread(target=_drain, args=(connection,), daemon=True)
        reader.start()
        yield
        connection.shutdown(socket.SHUT_RDWR)
        reader.join()


def _drain(connection: socket.socket) -> None:
    while connection.recv(1 << 20):
        pass

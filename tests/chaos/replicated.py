"""A primary and a replica, the link between them, and one address for both."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Self

from chaos.proxy import Proxy
from support_worker_process import eventually
from tokenmill._redis import connect
from tokenmill.embedded import EmbeddedServer


class ReplicatedPair:
    """`front` is the address for clients; `fail_over` promotes a replica that lags behind.

    Replication is asynchronous: what the primary acknowledged while the link was stalled is lost
    with it. The promotion is done by hand, as Sentinel would.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self.primary = stack.enter_context(EmbeddedServer(tcp=True))
            self.front = stack.enter_context(Proxy(self.primary.url))
            self._link = stack.enter_context(Proxy(self.primary.url))
            host, port = self._link.url.removeprefix("redis://").removesuffix("/0").split(":")
            follow = ("--replicaof", f"{host} {port}", "--repl-diskless-sync-delay", "0")
            self.replica = stack.enter_context(EmbeddedServer(tcp=True, extra_args=follow))
            self._stack = stack.pop_all()
        eventually(self._in_sync)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def stall(self) -> None:
        """From now on the replica learns nothing."""
        self._link.mode = "hole"

    def fail_over(self) -> None:
        """The primary dies, and half a second later the replica is the primary."""
        self.primary.kill()
        self.front.mode = "refuse"
        self.front.cut()
        # What the link holds back must not arrive after all.
        self._link.cut()
        time.sleep(0.5)
        with connect(self.replica.url) as client:
            client.execute_command("REPLICAOF", "NO", "ONE")
        self.front.upstream = self.replica.url
        self.front.mode = "pass"

    def _in_sync(self) -> bool:
        with connect(self.replica.url) as client:
            return client.info("replication").get("master_link_status") == "up"

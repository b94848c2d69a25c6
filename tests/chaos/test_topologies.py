"""The same on TLS, behind Sentinels and on a cluster whose slots move."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaos.audience import requests
from chaos.checks import View
from chaos.rig import PATIENT, Rig
from support_servers import (
    Certificates,
    Cluster,
    SentinelSetup,
    Server,
    move_slot,
    tls_server,
    until,
)  # fmt: skip
from tokenmill._redis import connect

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

PARTITIONS = 3
MakeRig = Callable[..., Rig]


@dataclass(frozen=True)
class Address:
    """What a rig needs of a server that is started elsewhere."""

    url: str


def test_tls(make_rig: MakeRig, tmp_path: Path) -> None:
    """Every connection is dropped again and again, and a worker dies."""
    certificates = Certificates.make(tmp_path)
    with tls_server(certificates, "--appendonly", "yes") as server:
        rig = make_rig(server=Address(f"{server.url}?ssl_ca_certs={certificates.ca}"))
        doomed, _ = rig.start("doomed", "survivor")
        rig.threads().read(requests())
        rig.until_streaming()

        def kill_clients() -> None:
            for _ in range(4):
                for kind in ("normal", "pubsub"):
                    rig.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
                time.sleep(0.3)

        rig.fault(kill_clients, times=8)
        rig.fault(lambda: rig.kill(doomed))

        rig.finish()


def test_sentinel(make_rig: MakeRig) -> None:
    """The master dies, the Sentinels promote its replica, and a worker dies meanwhile."""
    with SentinelSetup("valkey-9") as setup:
        rig = make_rig(server=Address(setup.url))
        doomed, _ = rig.start("doomed", "survivor")
        rig.tasks(retry_for_s=30, resubmit=True).read(requests())
        rig.until_streaming()
        old_port = setup.master_port()

        rig.fault(setup.master.kill)
        rig.fault(lambda: rig.kill(doomed))
        until(lambda: setup.master_port() != old_port)
        rig.move_to(Address(setup.url))

        # Replication is asynchronous; the engine is deterministic, so nothing has to be withdrawn.
        rig.finish(data_lost_at_s=time.monotonic())


@pytest.fixture
def cluster(make_rig: MakeRig) -> tuple[Rig, Cluster]:
    rig = make_rig(server=Address("redis://localhost"))
    cluster = rig.stack.enter_context(Cluster("valkey-9"))
    rig.move_to(Address(cluster.url))
    rig.pool.client = connect(cluster.url, PATIENT, slot=rig.pool.keys.slot)
    rig.views = lambda: [  # type: ignore[method-assign]
        View(connect(cluster.url, PATIENT, slot=keys.slot), keys)
        for keys in rig.pool.keys.partitions(PARTITIONS)
    ]
    return rig, cluster


def test_cluster(cluster: tuple[Rig, Cluster]) -> None:
    """Three masters, three partitions: a slot moves, a master restarts, a worker dies."""
    rig, nodes = cluster
    doomed, _ = rig.start("doomed", "survivor", partitions=PARTITIONS)
    rig.tasks(retry_for_s=30).read(requests(40, 300))
    rig.until_streaming()
    slot = rig.pool.keys.slot
    owner = nodes.owner_of(slot)
    assert owner is not None
    others = [node for node in nodes.nodes if node is not owner]

    rig.fault(lambda: move_slot(nodes, slot, others[0]))
    rig.fault(lambda: restart(others[1]))
    rig.fault(lambda: rig.kill(doomed))

    rig.finish()
    assert nodes.owner_of(slot) is others[0]


def restart(node: Server) -> None:
    node.kill()
    time.sleep(0.5)
    node.start()

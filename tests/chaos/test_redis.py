"""A Redis that dies, comes back, forgets, is full, or drops its clients."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from chaos.audience import requests
from chaos.faults import outage
from chaos.replicated import ReplicatedPair
from chaos.rig import SLOTS, Rig
from chaos.servers import BOTH_SERVERS

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("binary", BOTH_SERVERS)
def test_redis_aof(make_rig: MakeRig, binary: Path | None) -> None:
    rig = make_rig(binary=binary)
    rig.start("first", "second")
    rig.threads().read(requests())
    rig.until_streaming()

    rig.fault(outage(rig, 1.0))

    assert rig.finish().requeued == 0


def test_redis_long(make_rig: MakeRig) -> None:
    """Away for longer than a lease: everybody keeps what it had all the same."""
    rig = make_rig()
    rig.start("first", "second")
    rig.tasks(retry_for_s=30).read(requests())
    rig.until_streaming()

    rig.fault(outage(rig, 4.0))

    assert rig.finish().requeued == 0


def forget_everything(rig: Rig) -> float:
    """A server without persistence is killed and comes back; returns when."""
    rig.until_streaming()
    rig.fault(outage(rig, 0.5))
    return time.monotonic()


def test_noaof(make_rig: MakeRig) -> None:
    rig = make_rig(append_only=False)
    rig.start("first", "second")
    rig.tasks(resubmit=True).read(requests())

    lost_at_s = forget_everything(rig)

    rig.finish(data_lost_at_s=lost_at_s)


def test_noaofnd(make_rig: MakeRig) -> None:
    """Workers disagree, so what was shown must be withdrawn, and readers are told so."""
    rig = make_rig(append_only=False, kind="disagreeing")
    rig.start("first", "second")
    rig.threads(resubmit=True).read(requests())

    lost_at_s = forget_everything(rig)

    rig.finish(data_lost_at_s=lost_at_s, oracle=False, rewinds=True)
    assert rig.row.rewinds > 0


@pytest.mark.parametrize(
    ("kind", "kill"),
    [
        pytest.param("disagreeing", False, id="failover"),
        pytest.param("disagreeing", True, id="faillagkill"),
        pytest.param("fake", True, id="faillagkilldet"),
    ],
)
def test_replica(make_rig: MakeRig, kind: str, kill: bool) -> None:
    """The replica has missed half a second. A living worker repairs the log from its memory; of
    a dead one the tokens are made again, and withdrawn where they differ."""
    with ReplicatedPair() as pair:
        rig = make_rig(server=pair.primary, kind=kind)
        doomed, survivor = rig.start("doomed", "survivor", redis_url=pair.front.url)
        rig.tasks(pair.front.url, resubmit=True).read(requests())
        rig.until_streaming()
        pair.stall()
        time.sleep(0.5)
        if kill:
            rig.fault(lambda: rig.kill(doomed))
        rig.fault(pair.fail_over)
        rig.move_to(pair.replica)
        lost_at_s = time.monotonic()

        rig.finish(data_lost_at_s=lost_at_s, oracle=kind == "fake", rewinds=kill and kind != "fake")

        assert "log lost its end" in survivor.log
        assert (rig.row.rewinds > 0) == (kill and kind != "fake")


def test_ckill(make_rig: MakeRig) -> None:
    rig = make_rig(kind="disagreeing")
    rig.start("first", "second")
    rig.threads().read(requests())
    rig.until_streaming()

    def kill_clients() -> None:
        for _ in range(8):
            for kind in ("normal", "pubsub"):
                rig.redis.execute_command("CLIENT", "KILL", "TYPE", kind, "SKIPME", "yes")
            time.sleep(0.3)

    rig.fault(kill_clients, times=16)

    assert rig.finish(oracle=False).requeued == 0


def test_cpause(make_rig: MakeRig) -> None:
    """Redis answers nobody for longer than a lease."""
    rig = make_rig(kind="disagreeing")
    rig.start("first", "second")
    rig.tasks().read(requests())
    rig.until_streaming()

    rig.fault(lambda: rig.redis.execute_command("CLIENT", "PAUSE", "2500", "ALL"))

    assert rig.finish(oracle=False).requeued == 0


def test_oom(make_rig: MakeRig) -> None:
    """No memory for a lease's time: tokens wait, leases survive."""
    rig = make_rig(kind="disagreeing")
    rig.start("first", "second")
    rig.tasks().read(requests())
    rig.until_streaming()

    def starve() -> None:
        before = rig.redis.config_get("maxmemory")["maxmemory"]
        rig.redis.config_set("maxmemory", 1)
        time.sleep(1.5)
        rig.redis.config_set("maxmemory", before)

    rig.fault(starve)

    assert rig.finish(oracle=False).requeued == 0


def test_aof_rewrite(make_rig: MakeRig) -> None:
    """The log file is rewritten under load, and what it says is what was acknowledged."""
    rig = make_rig()
    rig.start("first", "second")
    rig.tasks().read(requests())
    rig.until_streaming()

    def rewrite() -> None:
        for _ in range(3):
            rig.redis.bgrewriteaof()
            rig.until(lambda: not rig.redis.info("persistence")["aof_rewrite_in_progress"])

    rig.fault(rewrite, times=3)
    rig.fault(outage(rig, 0.2))

    assert rig.finish().requeued == 0


def test_lostowners(make_rig: MakeRig) -> None:
    """An operator deletes what workers hold: the owners of every lease. Tick finds them again."""
    rig = make_rig()
    rig.start("first", "second")
    rig.tasks().read(requests(2 * SLOTS, 200))
    rig.until_streaming()

    rig.fault(lambda: rig.redis.delete(rig.pool.keys.owners))

    assert rig.finish().requeued > 0


def test_flapping(make_rig: MakeRig) -> None:
    """Five outages in a row, each short."""
    rig = make_rig()
    rig.start("first", "second")
    rig.threads().read(requests())
    rig.until_streaming()

    def flap() -> None:
        for _ in range(5):
            outage(rig, 0.2)()
            time.sleep(0.3)

    rig.fault(flap, times=5)

    rig.finish()

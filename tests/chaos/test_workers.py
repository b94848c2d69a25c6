"""Workers that die, freeze, drain and are replaced."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from chaos.audience import Request, requests
from chaos.faults import Supervisor, check_published_is_stored, taken_over
from chaos.observer import Observer
from chaos.rig import SLOTS, Rig
from chaos.servers import BOTH_SERVERS

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

MakeRig = Callable[..., Rig]


@pytest.mark.parametrize("binary", BOTH_SERVERS)
def test_base(make_rig: MakeRig, binary: Path | None) -> None:
    rig = make_rig(binary=binary)
    rig.start("first", "second")

    rig.threads().read(requests())

    assert rig.finish().requeued == 0


@pytest.mark.parametrize("binary", BOTH_SERVERS)
def test_kill9(make_rig: MakeRig, binary: Path | None) -> None:
    rig = make_rig(binary=binary)
    doomed, _ = rig.start("doomed", "survivor")
    rig.threads().read(requests())
    rig.until_streaming()
    held = rig.held_by(doomed)

    rig.fault(lambda: rig.kill(doomed))

    assert rig.finish().requeued >= len(held) > 0


def test_kill9nd(make_rig: MakeRig) -> None:
    rig = make_rig(kind="disagreeing")
    doomed, _ = rig.start("doomed", "survivor")
    rig.tasks().read(requests())
    rig.until_streaming()
    held = rig.held_by(doomed)

    rig.fault(lambda: rig.kill(doomed))
    rig.start("replacement")

    assert rig.finish(oracle=False).requeued >= len(held) > 0


@pytest.mark.parametrize("binary", BOTH_SERVERS)
def test_zombie(make_rig: MakeRig, binary: Path | None) -> None:
    """It wakes up when its successor has finished everything: nobody hears from it again."""
    rig = make_rig(kind="disagreeing", binary=binary)
    zombie, _ = rig.start("zombie", "successor")
    with Observer(rig.server.url, rig.pool.keys) as observer:
        rig.tasks().read(requests())
        rig.until_streaming()
        held = rig.held_by(zombie)
        rig.fault(lambda: zombie.process.send_signal(signal.SIGSTOP))
        rig.until_all_ended()
        heard = observer.count()

        zombie.process.send_signal(signal.SIGCONT)

        rig.until(lambda: zombie.log.count("request dropped") >= len(held))
        verdict = rig.finish(oracle=False)
        assert observer.count() == heard, "something was published after everything had ended"
    assert verdict.requeued >= len(held) > 0
    check_published_is_stored(rig, observer)


def test_zombie2(make_rig: MakeRig) -> None:
    """It wakes up while its successor has not yet caught up with what it may still say."""
    rig = make_rig(kind="disagreeing")
    (zombie,) = rig.start("zombie")
    wanted = requests(SLOTS, 150)
    with Observer(rig.server.url, rig.pool.keys) as observer:
        rig.tasks().read(wanted)
        rig.until_streaming()
        rig.fault(lambda: zombie.process.send_signal(signal.SIGSTOP))
        rig.start("successor", step_s=0.08, max_num_seqs=2 * SLOTS)
        rig.until(lambda: taken_over(rig, wanted) >= SLOTS - 2)

        zombie.process.send_signal(signal.SIGCONT)

        rig.until(lambda: "request dropped" in zombie.log)
        rig.start("quick", step_s=0.005)
        verdict = rig.finish(oracle=False)
    assert verdict.requeued >= SLOTS - 2
    check_published_is_stored(rig, observer)


def test_drain(make_rig: MakeRig) -> None:
    """The grace is shorter than the work: the rest is handed over, and is nobody's fault."""
    rig = make_rig()
    leaving, _ = rig.start("leaving", "staying", drain_grace_s=0.2)
    wanted = requests()
    rig.tasks().read(wanted)
    rig.until_streaming()

    rig.fault(lambda: leaving.process.send_signal(signal.SIGTERM))

    verdict = rig.finish()
    assert verdict.requeued > 0
    records = verdict.snapshots[0].records.values()
    assert {record["strikes"] for record in records} == {"0"}


def test_rolling_restart(make_rig: MakeRig) -> None:
    """Three workers are replaced one after the other, under 60 streams."""
    rig = make_rig()
    workers = rig.start("first", "second", "third", max_num_seqs=20)
    rig.threads().read(requests(60, 500))
    rig.until_streaming(streams=50)
    drains_s = []
    for worker in workers:
        began_s = time.monotonic()
        rig.fault(lambda worker=worker: worker.terminate())
        drains_s.append(time.monotonic() - began_s)
        rig.start(f"{worker.name}-again", max_num_seqs=20)

    verdict = rig.finish()

    rig.row.note = "drained in " + ", ".join(f"{seconds:.2f}" for seconds in drains_s) + " s"
    assert verdict.requeued >= 50


def test_poison(make_rig: MakeRig) -> None:
    """A request that kills whoever admits it is buried alone."""
    rig = make_rig()
    wanted = requests(20)
    guilty = Request("guilty", "poison for all", 100)
    # As by default: what is retried comes back spread over a second or two, not all together.
    start = partial(rig.pool.start, retry_backoff_ms=1000)
    workers = rig.start("first", "second", retry_backoff_ms=1000)
    audience = rig.tasks()
    with Supervisor(rig, workers, start) as supervisor:
        audience.read([*wanted[:10], guilty, *wanted[10:]])
        rig.until_all_ended()
    rig.row.faults = supervisor.num_deaths

    verdict = rig.finish(statuses={"done": 20, "dead": 1})

    (letter,) = rig.redis.xrange(rig.pool.keys.dead_letters)
    assert letter[1]["id"] == guilty.id
    assert audience.transcripts[guilty.id].ends[0].code == "worker_crash"
    assert supervisor.num_deaths >= 3
    assert verdict.requeued >= 2

"""Networks that stall, swallow, cut and delay, and readers that miss or cannot keep up."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaos.audience import Threads, requests
from chaos.checks import Verdict
from chaos.proxy import Proxy
from chaos.rig import SLOTS, Rig
from chaos.servers import BOTH_SERVERS
from tokenmill.protocol import TokenEvent

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

MakeRig = Callable[..., Rig]


def test_hole(make_rig: MakeRig) -> None:
    """One worker's packets vanish for longer than a lease; its connections stay open."""
    rig = make_rig(kind="disagreeing")
    link = rig.proxy()
    (cut_off,) = rig.start("cut-off", redis_url=link.url)
    rig.start("other")
    rig.tasks().read(requests())
    rig.until_streaming()
    held = rig.held_by(cut_off)

    def black_hole() -> None:
        link.mode = "hole"
        time.sleep(4.0)
        link.mode = "pass"

    rig.fault(black_hole)

    assert rig.finish(oracle=False).requeued >= len(held) > 0


def test_noreply(make_rig: MakeRig) -> None:
    """One worker's calls arrive, their replies do not: each is made again, and must not count."""
    rig = make_rig(kind="disagreeing")
    link = rig.proxy()
    rig.start("deaf", redis_url=link.url)
    rig.start("other")
    rig.tasks().read(requests())
    rig.until_streaming()

    def swallow_replies() -> None:
        for _ in range(3):
            link.mode = "noreply"
            time.sleep(0.6)
            link.cut()
            link.mode = "pass"
            time.sleep(0.5)

    rig.fault(swallow_replies, times=3)

    rig.finish(oracle=False)


@pytest.mark.parametrize("binary", BOTH_SERVERS)
def test_cutreply(make_rig: MakeRig, binary: Path | None) -> None:
    """One reply in twenty is lost with its connection, for workers and readers alike."""
    rig = make_rig(kind="disagreeing", binary=binary)
    link = rig.proxy()
    rig.start("first", "second", redis_url=link.url)
    rig.threads(link.url).read(requests())
    rig.until_streaming()

    link.cut_share = 0.05
    time.sleep(3.0)
    link.cut_share = 0.0

    rig.row.faults = link.num_cuts
    rig.finish(oracle=False)
    assert link.num_cuts > 10


def test_cutclient(make_rig: MakeRig) -> None:
    """Only the readers' link is cut, all connections at once, again and again."""
    rig = make_rig()
    link = rig.proxy()
    rig.start("first", "second")
    rig.tasks(link.url).read(requests())
    rig.until_streaming()

    def cut_often() -> None:
        for _ in range(10):
            link.cut()
            time.sleep(0.2)

    rig.fault(cut_often, times=10)

    assert rig.finish().requeued == 0


@contextmanager
def hindered(audience: Threads, hinder: Callable[[Any], bool]) -> Iterator[None]:
    """Each message meets `hinder` first, on the listener's thread; False drops it."""
    subscribers = audience.client._link._partitions.home_of("x").listener._subscribers
    dispatch = subscribers.dispatch

    def dispatch_or_not(message: Any) -> None:
        if hinder(message):
            dispatch(message)

    subscribers.dispatch = dispatch_or_not  # type: ignore[method-assign]
    try:
        yield
    finally:
        subscribers.dispatch = dispatch  # type: ignore[method-assign]


def total_gaps(audience: Threads) -> int:
    return sum(transcript.stats.gaps for transcript in audience.transcripts.values())


def test_lossysub(make_rig: MakeRig) -> None:
    """Three messages in ten never come."""
    rig = make_rig()
    rig.start("first", "second")
    audience = rig.threads()
    chance = random.Random(7)
    lost = 0

    def loses(message: Any) -> bool:
        nonlocal lost
        dropped = message["type"] == "message" and chance.random() < 0.3
        lost += dropped
        return not dropped

    with hindered(audience, loses):
        audience.read(requests())
        rig.until_all_ended()

    rig.row.faults = lost
    rig.finish()
    gaps = total_gaps(audience)
    rig.row.note = f"{gaps} gaps healed"
    assert lost > 0
    assert gaps > 0


def test_slowsub(make_rig: MakeRig) -> None:
    """The reader hangs until Redis throws it out, because its output buffer is over the limit."""
    rig = make_rig(extra_args=("--client-output-buffer-limit", "pubsub 64kb 32kb 1"))
    rig.start("first", "second", max_num_seqs=3 * SLOTS)
    audience = rig.threads()

    def thrown_out() -> int:
        found = rig.redis.info("stats")
        return int(found.get("client_output_buffer_limit_disconnections", 0))

    def hangs(_: Any) -> bool:
        give_up_at = time.monotonic() + 10
        while not thrown_out() and time.monotonic() < give_up_at:
            time.sleep(0.05)
        return True

    audience.read(requests(40, 400))
    rig.until_streaming(streams=20)
    with hindered(audience, hangs):
        rig.until(thrown_out)
    rig.row.faults = thrown_out()

    assert rig.finish().requeued == 0


def test_slowreader(make_rig: MakeRig) -> None:
    """A program that needs longer for an event than the worker: bounded memory, all tokens."""
    rig = make_rig()
    rig.start("first", "second")

    rig.threads(pause_s=0.03).read(requests(2 * SLOTS, 100))

    assert rig.finish().requeued == 0


def tokens_per_event(verdict: Verdict) -> float:
    events = [event for log in verdict.logs.values() for event in log]
    sizes = [len(event.token_ids) for event in events if isinstance(event, TokenEvent)]
    return sum(sizes) / len(sizes)


def test_slowredis(make_rig: MakeRig) -> None:
    """Every reply is 50 ms late: tokens travel together, and no step waits."""
    rig = make_rig()
    link: Proxy = rig.proxy(delay_s=0.05)
    rig.start("first", "second", redis_url=link.url)
    rig.tasks(link.url).read(requests())
    rig.row.faults = 1

    verdict = rig.finish()

    size = tokens_per_event(verdict)
    rig.row.note = f"{size:.1f} tokens an event"
    # A step takes 10 ms, a call 50: about five steps go out together.
    assert size > 3
    assert verdict.requeued == 0

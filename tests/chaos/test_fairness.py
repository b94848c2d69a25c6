"""A tenant that floods the queue, and one that arrives later with a few requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from chaos.audience import Audience, Request, Transcript
from chaos.rig import Rig

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

FLOOD = 500
LIGHT = 40
MOST = 1.5


def light(name: str, count: int) -> list[Request]:
    return [Request(f"{name}-{number}", f"light {number}", 20, "light") for number in range(count)]


def one_by_one(audience: Audience, wanted: Sequence[Request], every_s: float) -> list[Transcript]:
    """A request every so often, whatever became of the last one."""
    transcripts: list[Transcript] = []
    for request in wanted:
        transcripts += audience.read([request])
        time.sleep(every_s)
    return transcripts


def p95_s(transcripts: Sequence[Transcript]) -> float:
    waits_s = sorted(transcript.first_token_after_s for transcript in transcripts)
    return waits_s[int(0.95 * (len(waits_s) - 1))]


def test_fairshare(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig()
    rig.start("first", "second", max_num_seqs=32)
    audience = rig.tasks()
    alone = one_by_one(audience, light("alone", LIGHT), 0.05)
    rig.until_all_ended()

    flood = [
        Request(f"flood-{number}", f"flood {number}", 40 + (number * 7) % 80, "flooder")
        for number in range(FLOOD)
    ]
    flooding = rig.tasks()
    flooding.read(flood)
    rig.until_streaming(streams=48, tokens=2)
    beside = one_by_one(audience, light("beside", LIGHT), 0.05)
    still_flooded = not flooding.all_ended
    rig.row.faults = 1
    rig.finish()

    ratio = p95_s(beside) / p95_s(alone)
    rig.row.note = (
        f"first token p95: alone {1e3 * p95_s(alone):.0f} ms, "
        f"beside {FLOOD} {1e3 * p95_s(beside):.0f} ms, {ratio:.2f} x"
    )
    assert still_flooded
    assert ratio <= MOST, rig.row.note

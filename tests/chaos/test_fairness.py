"""A tenant that floods the queue, and one that arrives later with a few requests.

Of 64 places a tenant may hold 48. Windows alone order the queue, but no order makes a place free.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from chaos.audience import SEED, Audience, Request, Transcript
from chaos.checks import POLICY
from chaos.rig import Rig
from tokenmill.scripts import run

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

FLOOD, CAP = 500, 48
LIGHT = 80
MOST = 1.5


def light(name: str, count: int) -> list[Request]:
    return [Request(f"{name}-{number}", f"light {number}", 10, "light") for number in range(count)]


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
    rig.start("first", "second", max_num_seqs=32, max_running_per_tenant=CAP, step_s=0.04)
    audience = rig.tasks()
    alone = one_by_one(audience, light("alone", LIGHT), 0.05)
    rig.until_all_ended()

    # Nobody reads them, so that reading them costs the light tenant no time in this process.
    flood = [
        Request(f"flood-{n}", f"flood {n}", 10 + (n * 7) % 30, "flooder") for n in range(FLOOD)
    ]
    for request in flood:
        body = json.dumps(
            {"prompt": request.prompt, "max_tokens": request.max_tokens, "seed": SEED}
        )
        run(rig.redis, rig.pool.calls.enqueue(request.id, body=body, tenant=request.tenant))
    rig.until(lambda: int(rig.redis.hget(rig.pool.keys.counters, "leased") or 0) >= CAP)
    beside = one_by_one(audience, light("beside", LIGHT), 0.05)
    rig.until_all_ended()
    left = int(rig.redis.hget(rig.pool.keys.counters, "queued") or 0)
    rig.until(rig.pool.is_clean)
    for request in flood:
        rig.pool.check_transcript(request.id, request.prompt, SEED, request.max_tokens)
    rig.row.faults, rig.row.requests = 1, len(flood)
    rig.finish(policy=replace(POLICY, max_running_per_tenant=CAP))

    ratio = p95_s(beside) / p95_s(alone)
    rig.row.note = (
        f"first token p95: alone {1e3 * p95_s(alone):.0f} ms, "
        f"beside {FLOOD} {1e3 * p95_s(beside):.0f} ms, {ratio:.2f} x"
    )
    assert left > 0, "the flood was over before the light tenant was"
    assert ratio <= MOST, rig.row.note

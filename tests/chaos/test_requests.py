"""Requests that are wrong, cancelled, late, huge, or too many."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chaos.audience import Request, requests
from chaos.checks import POLICY
from chaos.rig import SLOTS, Rig
from support_worker import MAX_MODEL_LEN
from tokenmill import Client, limits
from tokenmill.calls import QueuePolicy
from tokenmill.errors import InvalidRequest, QueueFull
from tokenmill.replies import EnqueueStatus
from tokenmill.scripts import run

pytestmark = [pytest.mark.scenario, pytest.mark.slow]

MakeRig = Callable[..., Rig]

MALFORMED = (
    "{", "[]", '{"prompt":1}', '{"prompt":"x","max_tokens":-5}',
    '{"prompt":"x","max_tokens":1e99}', "null", '{"prompt":"x","max_tokens":"999999999"}',
)  # fmt: skip


def test_garbage(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.start("first", "second")
    wanted = requests()
    rig.tasks().read(wanted)
    rig.until_streaming()
    keys = rig.pool.keys

    def litter() -> None:
        with rig.redis.pipeline(transaction=False) as pipe:
            for number in range(30):
                pipe.xadd(keys.ready("1"), {"junk": "x" * 100})
                pipe.xadd(keys.ready("1"), {"id": "no-such-id"})
                pipe.xadd(keys.ready("1"), {"id": wanted[number % 10].id})
                pipe.xadd(keys.ready("0"), {"id": b"\x00\xff" * 10})
            pipe.execute()
        for number, body in enumerate(MALFORMED):
            run(rig.redis, rig.pool.calls.enqueue(f"bad-{number}", body=body))

    rig.fault(litter, times=120 + len(MALFORMED))

    ends = [rig.pool.end(f"bad-{number}") for number in range(len(MALFORMED))]
    assert [(end["st"], end["code"]) for end in ends] == [("failed", "invalid_request")] * 7
    assert rig.finish().requeued == 0


def test_cancel(make_rig: MakeRig) -> None:
    """Ten of those that stream, ten of those that wait, all final when the call returns."""
    rig = make_rig()
    rig.start("first", "second")
    wanted = requests(40, 400)
    rig.tasks().read(wanted)
    rig.until_streaming()
    held = [request_id for worker in rig.pool.workers for request_id in rig.held_by(worker)]
    waiting = [request.id for request in wanted if request.id not in held]
    doomed = held[:10] + waiting[:10]

    def cancel() -> None:
        for request_id in doomed:
            assert run(rig.redis, rig.pool.calls.cancel(request_id)).cancelled

    rig.fault(cancel, times=len(doomed))

    assert len(doomed) == 20
    rig.finish(statuses={"cancelled": 20, "done": 20})


def test_deadline(make_rig: MakeRig) -> None:
    """All of them pass in mid-stream or while waiting."""
    rig = make_rig()
    rig.start("first", "second")
    late = [
        Request(r.id, r.prompt, 2000, r.tenant, {"deadline_s": 2.5}) for r in requests(20, 2000)
    ]
    rig.tasks().read(late)
    rig.row.faults = len(late)

    rig.finish(statuses={"expired": 20})


def test_limits(make_rig: MakeRig) -> None:
    """At each limit a request streams; one beyond, it is refused by name, and nothing is sent."""
    rig = make_rig()
    rig.start("first", "second")
    at_limit, beyond = at_and_beyond()
    audience = rig.tasks()
    with Client(rig.server.url, namespace=rig.pool.keys.namespace) as client:
        for name in ("max_tokens", "messages"):  # more than this model can take
            prompt, options = at_limit.pop(name)
            assert client.cancel(client.submit(prompt, **options).id)
        for name, (prompt, options) in beyond.items():
            with pytest.raises(InvalidRequest) as refusal:
                client.submit(prompt, **options)
            assert refusal.value.field.partition(".")[0] == name.partition(" ")[0]
        assert not rig.redis.exists(rig.pool.keys.deadlines)
    rig.row.faults = len(beyond)

    audience.read(
        Request(options.pop("request_id", f"at-{number}"), prompt, 5, options=options)
        for number, (prompt, options) in enumerate(at_limit.values())
    )
    rig.until_all_ended()

    # Beyond what the model can hold, only the worker knows.
    long = [Request(f"long-{n}", "x" * (MAX_MODEL_LEN - 1 + n), 5) for n in range(2)]
    fits, too_long = audience.read(long)
    rig.until_all_ended()
    assert fits.ends[0].status == "done"
    assert (too_long.ends[0].status, too_long.ends[0].code) == ("failed", "too_long")
    rig.finish(statuses={"done": len(at_limit) + 1, "failed": 1}, oracle=False)


Case = tuple[Any, dict[str, Any]]


def at_and_beyond() -> tuple[dict[str, Case], dict[str, Case]]:
    """Field → a request at its limit, and the same one beyond."""
    message = {"role": "user", "content": "x"}
    sizes: dict[str, Callable[[int], Case]] = {
        "max_tokens": lambda n: ("x", {"max_tokens": limits.MAX_TOKENS + n}),
        "stop": lambda n: ("x", {"stop": ["~"] * (limits.MAX_STOP_STRINGS + n)}),
        "stop 0": lambda n: ("x", {"stop": ["~" * (limits.MAX_STOP_CHARS + n)]}),
        "bad_words": lambda n: ("x", {"bad_words": ["~"] * (limits.MAX_BAD_WORDS + n)}),
        "logprobs": lambda n: ("x", {"logprobs": limits.MAX_LOGPROBS + n}),
        "seed": lambda n: ("x", {"seed": limits.MAX_SEED + n}),
        "logit_bias": lambda n: (
            "x", {"logit_bias": dict.fromkeys(range(limits.MAX_LOGIT_BIAS + n), 1.0)}
        ),
        "messages": lambda n: ([message] * (limits.MAX_MESSAGES + n), {}),
        "meta": lambda n: ("x", {"meta": {"k": "x" * (limits.MAX_META_BYTES - 9 + n)}}),
        "request_id": lambda n: ("x", {"request_id": "i" * (64 + n)}),
        "tenant": lambda n: ("x", {"tenant": "t" * (64 + n)}),
        "deadline_s": lambda n: ("x", {"deadline_s": limits.MAX_DEADLINE_S + n}),
    }  # fmt: skip
    return {name: make(0) for name, make in sizes.items()}, {
        name: make(1) for name, make in sizes.items()
    }


def test_bodysize(make_rig: MakeRig) -> None:
    """The queue itself refuses a body beyond its limit, whoever sends it; up to it, it streams."""
    rig = make_rig()
    rig.start("first")
    plain = json.dumps({"prompt": "hello", "max_tokens": 20, "seed": 7})

    def enqueue(request_id: str, size: int) -> EnqueueStatus:
        # Blanks at the end are JSON, too.
        call = rig.pool.calls.enqueue(request_id, body=plain.ljust(size))
        return run(rig.redis, call).status

    assert enqueue("largest", limits.MAX_BODY_BYTES) is EnqueueStatus.OK
    assert enqueue("larger", limits.MAX_BODY_BYTES + 1) is EnqueueStatus.TOO_LARGE
    rig.row.faults, rig.row.requests = 1, 1

    rig.pool.check_transcript("largest", "hello", 7, 20)
    rig.finish()


def test_leasestorm(make_rig: MakeRig) -> None:
    """A thousand wait, and eight workers begin at the same moment."""
    rig = make_rig()
    rig.tasks().read(requests(1000, 5, spread=10))
    rig.until(lambda: int(rig.redis.hget(rig.pool.keys.counters, "queued") or 0) == 1000)
    rig.row.faults = 8

    for number in range(8):
        rig.pool.start(f"worker-{number}")

    rig.finish()


def test_enqueuestorm(make_rig: MakeRig) -> None:
    """More than the queue takes: each refusal says when to come back, and whoever does gets in."""
    rig = make_rig()
    policy = QueuePolicy(lease_ms=POLICY.lease_ms, max_queued=60, max_queued_per_tenant=20)
    rig.start("first", "second", max_queued=60)
    audience = rig.tasks(policy=policy)
    # Every other one is of the same tenant, who meets a limit of his own before all together, four
    # others and he, meet theirs.
    left = [
        replace(request, tenant="greedy" if number % 2 else f"tenant-{number % 8}")
        for number, request in enumerate(requests(200, 10))
    ]
    codes: set[str] = set()
    refused = 0
    give_up_at = time.monotonic() + 60
    while left:
        assert time.monotonic() < give_up_at, f"{len(left)} requests never got in"
        tried = audience.read(left)
        rig.until_all_ended()
        full = [t for t in tried if isinstance(t.error, QueueFull)]
        codes |= {t.error.code for t in full if isinstance(t.error, QueueFull)}
        assert all(t.error.retry_after_s > 0 for t in full if isinstance(t.error, QueueFull))
        refused += len(full)
        left = [transcript.request for transcript in full]
    rig.row.faults = refused
    rig.row.note = f"{refused} refusals"

    rig.finish(policy=policy)

    assert codes == {"queue_full", "tenant_full"}


def test_duplicates(make_rig: MakeRig) -> None:
    """The same request is submitted again and again while it runs: one answer, the same for all."""
    rig = make_rig()
    rig.start("first", "second")
    wanted = requests(SLOTS, 100)
    audiences = [rig.tasks(), rig.threads(), rig.tasks()]
    for audience in audiences:
        audience.read(wanted)
    rig.row.faults = 2 * len(wanted)

    rig.finish()

    tokens = [[t.token_ids for t in audience.transcripts.values()] for audience in audiences]
    assert tokens[0] == tokens[1] == tokens[2]

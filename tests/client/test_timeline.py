"""What `explain` tells of a request's past, its place and its prospects."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta

import pytest
import redis

from tokenmill import Client, ProtocolError
from tokenmill._timeline import read_timeline
from tokenmill.calls import QueuePolicy
from tokenmill.keys import Keyspace
from tokenmill.scripts import run
from tokenmill.testing import FakeWorker


def events(client: Client, request_id: str) -> list[str]:
    return [entry.event for entry in client.explain(request_id).timeline]


def test_the_timeline_of_a_request_that_is_handed_over(
    client: Client, redis_client: redis.Redis, keyspace: Keyspace, worker: FakeWorker
) -> None:
    request_id = client.submit("x", priority="high").id
    worker.step()
    worker.hand_over()
    other = FakeWorker(redis_client, lambda _: "ok", namespace=keyspace.namespace, worker_id="w2")
    while other.step():
        pass
    timeline = client.explain(request_id).timeline
    assert [entry.event for entry in timeline] == [
        "enqueued", "queued", "leased", "handed_over", "queued", "leased", "ended",
    ]  # fmt: skip
    assert timeline[0].text == "enqueued with priority high"
    assert timeline[2].text == "attempt 1 begins on fake-worker"
    assert timeline[3].text == "handed over: its worker ended"
    assert timeline[4].text == "ready, before all new work"
    assert timeline[5].facts == {"a": 2, "w": "w2", "e": 2}
    assert timeline[6].text == "ended: done; 1 prompt token, 1 token"
    assert timeline[0].after_s == 0
    assert [entry.at for entry in timeline] == sorted(entry.at for entry in timeline)
    assert str(timeline[0]) == "+0.000 s  enqueued with priority high"


def test_places_are_counted_without_those_who_left(client: Client, worker: FakeWorker) -> None:
    ids = [client.submit("x").id for _ in range(5)]
    assert [client.explain(request_id).place for request_id in ids] == [0, 1, 2, 3, 4]
    client.cancel(ids[1])
    assert client.explain(ids[4]).place == 3
    assert "3 before it" in client.explain(ids[4]).summary
    worker.step()
    assert client.explain(ids[4]).place is None
    assert client.explain(client.submit("x").id).place == 0
    assert "next in its line" in client.explain(client.submit("x", priority="low").id).summary


def test_a_place_among_the_requests_of_a_tenant(make_client: Callable[..., Client]) -> None:
    client = make_client(policy=QueuePolicy(window=1))
    ids = [client.submit(text, tenant="acme").id for text in "abcd"]
    assert [client.explain(request_id).place for request_id in ids] == [0, 0, 1, 2]
    client.cancel(ids[2])
    explanation = client.explain(ids[3])
    assert explanation.place == 1
    assert [entry.event for entry in explanation.timeline] == ["enqueued", "held"]


def test_an_estimate_from_the_rate_at_which_requests_end(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    worker.step()  # it has been seen
    client.submit("x", priority="high")
    request_id = [client.submit("x").id for _ in range(3)][-1]
    assert client.explain(request_id).estimate_s is None  # nobody has measured the rate
    redis_client.hset(client.keys.maintenance, "rate", "0.5000")
    explanation = client.explain(request_id)
    # One of a higher class, two in its own, and itself: four at one in two seconds.
    assert explanation.estimate_s == 8
    assert "about 8 s" in explanation.summary


def test_a_request_for_later_says_when(client: Client) -> None:
    request_id = client.submit("x", not_before=timedelta(hours=1)).id
    explanation = client.explain(request_id)
    assert explanation.place is None
    assert "as it was asked for" in explanation.summary
    due = explanation.status.created_at + timedelta(hours=1)
    assert f"at {due:%Y-%m-%d} " in explanation.summary
    assert ", to start at +3" in explanation.timeline[0].text
    assert explanation.timeline[0].facts["due"] == pytest.approx(
        explanation.timeline[0].at.timestamp() * 1000 + 3_600_000, abs=20_000
    )


def test_what_a_worker_tells_is_shown(
    client: Client, redis_client: redis.Redis, worker: FakeWorker
) -> None:
    request_id = client.submit("x").id
    worker.step()
    facts = {"prompt_tokens": 30, "cached_tokens": 16, "prefill_chunks": 1, "tokens": 9}
    (running,) = worker._running.values()
    call = worker._calls.hand_over(
        request_id,
        running.lease.fence,
        facts=json.dumps({**facts, "preemptions": 0, "first_token_ms": 1005}),
    )
    run(redis_client, call)
    entry = client.explain(request_id).timeline[-2]
    assert entry.facts["cached_tokens"] == 16
    assert entry.text == (
        "handed over: its worker ended; 30 prompt tokens, 16 of them cached, 1 prefill chunk, "
        "9 tokens, first token after 1.005 s"
    )


@pytest.mark.parametrize("line", ["{", "[]", '{"ev":"held"}', '{"t":"x","ev":"held"}'])
def test_a_strange_history_is_a_protocol_error(line: str) -> None:
    with pytest.raises(ProtocolError):
        read_timeline(['{"t":1,"ev":"unheard of"}', line])


def test_an_unknown_kind_of_entry_is_shown_by_its_name() -> None:
    (entry,) = read_timeline(['{"t":1,"ev":"teleported","to":"w9"}'])
    assert (entry.text, entry.facts) == ("teleported", {"to": "w9"})

"""The events of one attempt."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from pydantic_core import to_json

from support_worker import make_delivery, make_output
from tokenmill_engine.outputs import TokenLogprobs
from tokenmill_worker.delivery import (
    EVENT_TOKENS,
    EVENT_TOKENS_WITH_LOGPROBS,
    Deliveries,
    Ending,
)


def test_events_are_numbered_densely_behind_those_of_earlier_attempts() -> None:
    delivery = make_delivery(attempt=2, num_events=2)
    delivery.restore(['{"e":1}', '{"e":2}'], 5)

    delivery.start("worker-a")
    delivery.add_tokens((1,), "ü", None)
    delivery.add_tokens([2, 3], "", [[[2, -0.5, 1, "b"]], [[3, -1.5, 2, "c"]]])

    assert delivery.events[2:] == [
        '{"e":3,"ev":"start","i":5,"w":"worker-a","a":2}',
        '{"e":4,"i":5,"k":[1],"t":"ü","a":2}',
        '{"e":5,"i":6,"k":[2,3],"t":"","lp":[[[2,-0.5,1,"b"]],[[3,-1.5,2,"c"]]],"a":2}',
    ]
    assert (delivery.acked, delivery.num_tokens) == (2, 8)


@given(st.lists(st.integers(0, 10**6), min_size=1), st.text(st.characters(codec="utf-8")))
def test_the_json_of_tokens_is_an_encoders(token_ids: list[int], text: str) -> None:
    delivery = make_delivery(attempt=3)

    delivery.add_tokens(token_ids, text, None)

    assert delivery.events[0].encode() == to_json(
        {"e": 1, "i": 0, "k": token_ids, "t": text, "a": 3}
    )


def test_everything_pending_goes_into_one_event_up_to_its_limit() -> None:
    delivery = make_delivery()
    delivery.pending = [make_output(token) for token in range(EVENT_TOKENS + 1)]

    sizes = [len(run) for run in delivery.take_pending()]

    assert sizes == [EVENT_TOKENS, 1]
    assert delivery.pending == []


def test_events_with_logprobs_stay_small() -> None:
    delivery = make_delivery()
    position = TokenLogprobs((1,), (-1.0,), (1,))
    delivery.pending = [make_output(token, logprobs=(position,)) for token in range(20)]

    sizes = [len(run) for run in delivery.take_pending()]

    assert max(sizes) == EVENT_TOKENS_WITH_LOGPROBS
    assert sum(sizes) == 20


def test_progress_is_more_than_the_start_event() -> None:
    delivery = make_delivery(num_events=3)
    delivery.acked = 4
    assert not delivery.made_progress
    delivery.acked = 5
    assert delivery.made_progress


def test_a_failure_ends_with_its_code_and_without_usage() -> None:
    delivery = make_delivery()
    ending = Ending(status="failed", finish_reason="error", code="too_long", message="prompt: …")

    assert json.loads(delivery.end_event(ending)) == {
        "e": 1, "ev": "end", "st": "failed", "fin": "error", "n": 0, "code": "too_long",
        "msg": "prompt: …", "a": 1,
    }  # fmt: skip


async def test_attempts_of_one_request_are_told_apart() -> None:
    deliveries = Deliveries()
    first, second = make_delivery(fence="1.1000"), make_delivery(fence="1.2000")

    deliveries.add(first)
    assert first in deliveries
    assert second not in deliveries
    deliveries.add(second)
    deliveries.remove(first)

    assert list(deliveries) == [second]
    assert deliveries.changed.is_set()


def test_facts_are_the_numbers_of_this_attempt() -> None:
    delivery = make_delivery(waited_ms=5)
    assert json.loads(delivery.facts()) == {
        "cached_tokens": 0, "prefill_chunks": 0, "tokens": 0, "preemptions": 0,
    }  # fmt: skip
    delivery.prompt_tokens = 30
    delivery.latest = make_output(
        7, num_cached_tokens=16, num_prefill_chunks=2, num_output_tokens=9, num_preemptions=1
    )
    leased_s = delivery.times.leased_s
    delivery.times.submitted_s, delivery.times.first_token_s = leased_s + 0.25, leased_s + 1
    assert json.loads(delivery.facts()) == {
        "prompt_tokens": 30, "cached_tokens": 16, "prefill_chunks": 2, "prefill_ms": 750,
        "tokens": 9, "preemptions": 1, "first_token_ms": 1005,
    }  # fmt: skip


def test_only_the_first_attempt_knows_when_the_first_token_came() -> None:
    delivery = make_delivery()
    delivery.restore(['{"e":1}'], 4)
    delivery.times.submitted_s = delivery.times.first_token_s = delivery.times.leased_s
    facts = json.loads(delivery.facts())
    assert (facts["tokens"], facts["prefill_ms"]) == (4, 0)
    assert "first_token_ms" not in facts

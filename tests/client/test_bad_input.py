"""Every wrong argument is refused before anything is sent: by field and limit, never by value."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenmill import (
    Client,
    InvalidRequest,
    RequestTooLarge,
    SamplingParams,
    UnsupportedParameter,
    limits,
)
from tokenmill._requests import RequestParams, Submission, build, new_request_id
from tokenmill.protocol import GenerateRequest

SECRET = "s3cret"
HALF_A_PAIR = "x\ud800y"


def make(prompt: Any = "x", **params: Any) -> Submission:
    return build(prompt, params, {})


WRONG: list[tuple[str, dict[str, Any], str]] = [
    # field, arguments, what the message must say
    ("prompt", {"prompt": ""}, "at least 1"),
    ("prompt", {"prompt": []}, "empty"),
    ("prompt", {"prompt": None}, "text"),
    ("prompt", {"prompt": b"bytes"}, "text"),
    ("prompt", {"prompt": {"role": "user"}}, "text"),
    ("prompt", {"prompt": HALF_A_PAIR}, "Unicode"),
    ("prompt_token_ids.0", {"prompt": [True]}, "whole number"),
    ("prompt_token_ids.1", {"prompt": [1, -1]}, "at least 0"),
    ("prompt_token_ids.0", {"prompt": [2**31]}, "2147483647"),
    ("prompt_token_ids.0", {"prompt": [1.0]}, "whole number"),
    ("prompt_token_ids.1", {"prompt": [1, SECRET]}, "whole number"),
    ("messages.0.role", {"prompt": [{"role": SECRET, "content": "x"}]}, "'user'"),
    ("messages.0.content", {"prompt": [{"role": "user"}]}, "missing"),
    ("messages.0.content", {"prompt": [{"role": "user", "content": 5}]}, "text"),
    ("messages", {"prompt": [{"role": "user", "content": HALF_A_PAIR}]}, "Unicode"),
    ("messages", {"prompt": [{"role": "user", "content": "x"}] * 1025}, "1024"),
    ("temperature", {"temperature": math.nan}, "finite"),
    ("temperature", {"temperature": math.inf}, "finite"),
    ("temperature", {"temperature": -0.1}, "at least 0"),
    ("temperature", {"temperature": True}, "number"),
    ("temperature", {"temperature": "1"}, "number"),
    ("top_p", {"top_p": 0}, "greater than 0"),
    ("top_p", {"top_p": 1.01}, "at most 1"),
    ("top_k", {"top_k": 1.5}, "whole number"),
    ("max_tokens", {"max_tokens": 0}, "at least 1"),
    ("max_tokens", {"max_tokens": True}, "whole number"),
    ("max_tokens", {"max_tokens": limits.MAX_TOKENS + 1}, str(limits.MAX_TOKENS)),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}, "at most max_tokens"),
    ("seed", {"seed": -1}, "at least 0"),
    ("seed", {"seed": 2**63}, str(2**63 - 1)),
    ("logprobs", {"logprobs": 21}, "at most 20"),
    ("stop", {"stop": ["x"] * 17}, "16"),
    ("stop.0", {"stop": [""]}, "at least 1"),
    ("stop.0", {"stop": ["x" * 257]}, "256"),
    ("stop.0", {"stop": [HALF_A_PAIR]}, "Unicode"),
    ("logit_bias", {"logit_bias": {SECRET: 1.0}}, "whole number"),
    ("logit_bias", {"logit_bias": {5: 101.0}}, "at most 100"),
    ("allowed_token_ids", {"allowed_token_ids": []}, "at least 1"),
    ("model", {"model": ""}, "at least 1"),
    ("meta", {"meta": {"x": math.nan}}, "finite"),
    ("meta", {"meta": {"x": object()}}, "JSON"),
    ("meta", {"meta": {"x": b"bytes"}}, "JSON"),
    ("meta", {"meta": {5: "x"}}, "text keys"),
    ("meta", {"meta": {HALF_A_PAIR: 1}}, "Unicode"),
    ("meta", {"meta": {"x": HALF_A_PAIR}}, "Unicode"),
    ("meta", {"meta": {"x": 10**5000}}, "64 bits"),
    ("meta", {"meta": [SECRET]}, "object"),
    ("chat_template_kwargs", {"chat_template_kwargs": {"x": {1}}}, "JSON"),
    ("request_id", {"request_id": ""}, "1 to 64"),
    ("request_id", {"request_id": "a" * 65}, "1 to 64"),
    ("request_id", {"request_id": "a{b}"}, "1 to 64"),
    ("request_id", {"request_id": "abc\n"}, "1 to 64"),
    ("request_id", {"request_id": "ünique"}, "1 to 64"),
    ("request_id", {"request_id": 7}, "1 to 64"),
    ("tenant", {"tenant": "a:b"}, "1 to 64"),
    ("priority", {"priority": "urgent"}, "high, normal, low"),
    ("priority", {"priority": ["high"]}, "high, normal, low"),
    ("deadline_s", {"deadline_s": 0}, "above 0"),
    ("deadline_s", {"deadline_s": True}, "above 0"),
    ("deadline_s", {"deadline_s": math.nan}, "above 0"),
    ("deadline_s", {"deadline_s": "30"}, "above 0"),
    ("deadline_s", {"deadline_s": limits.MAX_DEADLINE_S + 1}, "86400"),
    ("sampling_params", {"sampling_params": {"top_k": 5}}, "SamplingParams"),
    (
        "sampling_params",
        {"sampling_params": SamplingParams(top_k=5), "top_p": 0.5},
        r"\(top_p\), not both",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "arguments", "says"), WRONG, ids=[f"{n}-{case[0]}" for n, case in enumerate(WRONG)]
)
def test_a_wrong_value_names_its_field_and_limit(
    field: str, arguments: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        make(**{"prompt": "x", **arguments})
    assert caught.value.field == field
    assert SECRET not in str(caught.value)
    assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize("name", ["best_of", "guided_json", "max_new_tokens", "prompt", "v"])
def test_an_unknown_parameter_is_refused_with_the_list_of_known_ones(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match="temperature") as caught:
        build("x", {name: 1}, {})
    assert caught.value.field == name
    assert caught.value.code == "unsupported"


def test_more_than_one_choice_is_not_offered() -> None:
    with pytest.raises(UnsupportedParameter, match="only 1"):
        make(n=2)
    assert "n" in make(n=1).body


def test_a_field_of_a_message_that_is_not_offered() -> None:
    with pytest.raises(UnsupportedParameter, match="content") as caught:
        make([{"role": "user", "content": "x", SECRET: []}])
    assert caught.value.field == "messages.0"
    assert SECRET not in str(caught.value)


def test_the_body_may_have_exactly_the_limit_and_not_a_byte_more() -> None:
    overhead = len(make("x", seed=1).body) - 1
    fits = limits.MAX_BODY_BYTES - overhead
    assert len(make("x" * fits, seed=1).body) == limits.MAX_BODY_BYTES
    with pytest.raises(RequestTooLarge, match=str(limits.MAX_BODY_BYTES)) as caught:
        make("x" * (fits + 1), seed=1)
    assert caught.value.field == "prompt"
    assert caught.value.code == "too_long"
    with pytest.raises(RequestTooLarge):  # bytes count, not characters
        make("é" * (fits // 2 + 1), seed=1)
    with pytest.raises(RequestTooLarge):
        make("x" * 2**20)


def test_meta_and_nesting_have_limits() -> None:
    with pytest.raises(RequestTooLarge, match=str(limits.MAX_META_BYTES)):
        make(meta={"x": "y" * limits.MAX_META_BYTES})
    nested: Any = {}
    for _ in range(limits.MAX_JSON_DEPTH):
        nested = {"x": nested}
    with pytest.raises(InvalidRequest, match=str(limits.MAX_JSON_DEPTH)):
        make(meta=nested)
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    with pytest.raises(InvalidRequest, match="nested"):
        make(chat_template_kwargs=cycle)


def test_nothing_reaches_redis(client: Client, redis_client: redis.Redis) -> None:
    calls: list[Callable[..., object]] = [client.generate, client.submit, client.stream]
    for call in calls:
        with pytest.raises(InvalidRequest):
            call("x", temperature=-1)
    with pytest.raises(InvalidRequest, match="chat"):
        client.generate([{"role": "user", "content": "Hi"}])
    for messages in ("Hi", [], [1, 2], None):
        with pytest.raises(InvalidRequest, match="messages"):
            client.chat(messages)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="concurrency"):
        client.map(["x"], concurrency=0)
    with pytest.raises(InvalidRequest, match="request_id"):
        client.map(["x"], request_id="mine")
    for after in (-1, True, 1.5, 2**53 + 1, "7"):
        with pytest.raises(InvalidRequest, match="after"):
            client.attach("some-id", after=after)  # type: ignore[arg-type]
    for bad_id in ("", "a{b}", 7):
        with pytest.raises(InvalidRequest, match="request_id"):
            client.result(bad_id)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="timeout_s"):
        client.result("some-id", timeout_s=-1)
    assert list(redis_client.scan_iter(f"{client.keys.prefix}*")) == []


def test_none_is_the_same_as_leaving_a_field_out() -> None:
    everything = dict.fromkeys(RequestParams.__annotations__)
    assert make(**{**everything, "request_id": "a"}).body == make(request_id="a").body
    with_defaults = build("x", everything, {"tenant": "acme", "deadline_s": 5})
    assert (with_defaults.tenant, with_defaults.timing.deadline_s) == ("acme", 5.0)


def test_the_keywords_are_the_fields_of_the_wire() -> None:
    """A field added to the wire must be added here, and the other way round."""
    wire = set(GenerateRequest.model_fields) - {"v", "prompt", "prompt_token_ids", "messages"}
    keywords = set(RequestParams.__annotations__)
    assert keywords - wire == {
        "request_id", "priority", "tenant", "sampling_params", "not_before", "deadline_s",
        "queue_deadline_s", "first_token_deadline_s",
    }  # fmt: skip
    assert wire <= keywords


@given(
    prompt=st.text(min_size=1, max_size=50) | st.lists(st.integers(0, 2**31 - 1), min_size=1),
    temperature=st.floats(0, 100),
    max_tokens=st.integers(1, limits.MAX_TOKENS),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=3),
    meta=st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False, allow_infinity=False)),
)
@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=50, deadline=None)
def test_what_is_right_arrives_unchanged(
    prompt: Any, temperature: float, max_tokens: int, stop: list[str], meta: dict[str, float]
) -> None:
    submission = make(
        prompt, temperature=temperature, max_tokens=max_tokens, stop=tuple(stop), meta=meta
    )
    arrived = GenerateRequest.model_validate_json(submission.body)
    assert (arrived.prompt or arrived.prompt_token_ids) == prompt
    assert arrived.temperature == temperature
    assert arrived.max_tokens == max_tokens
    assert arrived.stop == stop
    assert arrived.meta == meta
    assert arrived.seed is not None


@given(junk=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
), name=st.sampled_from(sorted(RequestParams.__annotations__)))  # fmt: skip
@settings(max_examples=200, deadline=None)
def test_junk_is_refused_by_name_or_sent_as_valid(junk: Any, name: str) -> None:
    refused: InvalidRequest | None = None
    try:
        submission = make("x", **{name: junk})
    except InvalidRequest as error:
        refused = error
    if refused is None:
        GenerateRequest.model_validate_json(submission.body)
    else:
        assert refused.field.partition(".")[0] in {name, "max_tokens", "min_tokens"}


def test_ids_are_ulids_that_sort_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for now_ns in (1, 1_600_000_000, 1_600_000_001, 2**40):
        monkeypatch.setattr("tokenmill._requests.time.time_ns", lambda now=now_ns: now * 1_000_000)
        ids.append(new_request_id())
    assert ids == sorted(ids)
    assert {len(request_id) for request_id in ids} == {26}
    monkeypatch.setattr("tokenmill._requests.secrets.randbits", lambda bits: 2**bits - 1)
    monkeypatch.setattr("tokenmill._requests.time.time_ns", lambda: 1_469_918_176_385 * 1_000_000)
    # The time part of the example in the ULID specification.
    assert new_request_id() == "01ARYZ6S41" + "Z" * 16

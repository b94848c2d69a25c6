"""Request bodies: whatever they hold, the answer is a request or a typed refusal."""

from __future__ import annotations

import json

import pytest

from tokenmill import limits
from tokenmill.errors import InvalidRequest, RequestTooLarge, UnsupportedParameter
from tokenmill.protocol import GenerateRequest
from tokenmill_worker.body import parse_body

SECRET = "canary-8c1f"


def body(**fields: object) -> str:
    return json.dumps({"prompt": "hello", **fields})


def test_what_the_sdk_writes_is_read_back() -> None:
    request = GenerateRequest(prompt="héllo", temperature=0.5, logit_bias={5: 1.0}, stop=["a"])

    parsed = parse_body(request.to_body())

    assert parsed == request
    assert parsed.model_fields_set == {"prompt", "temperature", "logit_bias", "stop"}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "null",
        "[]",
        '"prompt"',
        SECRET,
        "[" * 200_000,
        '{"a":' * 100_000,
        json.dumps({"prompt": SECRET, "meta": json.loads("[" * 40 + "]" * 40)}),
        '{"prompt":"x","temperature":NaN}',
        '{"prompt":"x","meta":{"a":Infinity}}',
        '{"prompt":"x","seed":' + "9" * 5000 + "}",
        '{"prompt":"\\ud800"}',
    ],
    ids=lambda text: text[:20],
)
def test_what_is_no_request_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(text)

    assert SECRET not in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": 1}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "body"),
        ({"prompt_token_ids": [1]}, "body"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": limits.MAX_TOKENS + 1}, "max_tokens"),
        ({"min_tokens": 10, "max_tokens": 5}, "body"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop": ["a"] * (limits.MAX_STOP_STRINGS + 1)}, "stop"),
        ({"stop": ["a" * (limits.MAX_STOP_CHARS + 1)]}, "stop.0"),
        ({"stop": ["ok", ""]}, "stop.1"),
        ({"logprobs": limits.MAX_LOGPROBS + 1}, "logprobs"),
        ({"logit_bias": {SECRET: 1.0}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"n": 2}, "n"),
        ({"v": 2}, "v"),
        ({"meta": [1]}, "meta"),
        ({"meta": {"a": "x" * limits.MAX_META_BYTES}}, "meta"),
        ({"meta": {"a": "\ud800"}}, "meta"),
        ({"meta": {"a": 2**64}}, "meta"),
        ({"chat_template_kwargs": {"a": ["\ud800"]}}, "chat_template_kwargs"),
        ({"prompt": None, "messages": [{"role": SECRET, "content": "x"}]}, "messages.0"),
        ({"prompt": None, "messages": [{"role": "user", "content": "x", SECRET: 1}]}, "messages.0"),
    ],
)
def test_a_wrong_field_is_named_without_its_value(fields: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_body(body(**fields))

    assert refused.value.field == field
    assert SECRET not in str(refused.value)
    assert refused.value.code == "invalid_request"


@pytest.mark.parametrize("field", ["meta", "chat_template_kwargs"])
def test_a_number_beyond_all_bounds_is_refused(field: str) -> None:
    """Echoed, it would be `Infinity`, which only Python takes for JSON."""
    with pytest.raises(InvalidRequest, match=f"^{field}: "):
        parse_body(f'{{"prompt":"x","{field}":{{"a":[1e999]}}}}')


def test_an_unknown_parameter_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse_body(body(guided_regex="a*"))

    assert refused.value.field == "guided_regex"
    assert "temperature" in str(refused.value)


def test_an_unknown_parameters_name_is_made_harmless() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        parse_body(body(**{"x\n" * 1000: 1}))

    assert refused.value.field == "x?" * 32


def test_the_size_limit_counts_bytes() -> None:
    room = limits.MAX_BODY_BYTES - len(body(prompt="").encode())
    assert parse_body(json.dumps({"prompt": "x" * room})).prompt == "x" * room
    with pytest.raises(RequestTooLarge):
        parse_body(json.dumps({"prompt": "é" * room}, ensure_ascii=False))

"""From the arguments of `generate`, `chat`, `stream` and `submit` to what goes into the queue."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, TypedDict

from pydantic import ValidationError
from pydantic_core import PydanticSerializationError

from . import limits
from ._timing import Timing, check_timing
from ._validation import check_json, check_number, check_text, explain
from .errors import InvalidRequest, RequestTooLarge, UnsupportedParameter
from .keys import PRIORITIES
from .protocol import GenerateRequest, Message, SamplingParams

Messages = Sequence[Message | Mapping[str, Any]]
#: Text, token ids, or the messages of a chat.
Prompt = str | Sequence[int] | Messages


class RequestOptions(TypedDict, total=False):
    """How a request travels. What is left out comes from the client."""

    request_id: str
    priority: str  # high, normal, low
    deadline_s: float  # until the end, from the enqueue or `not_before`
    queue_deadline_s: float | None  # until a worker takes it
    first_token_deadline_s: float | None
    not_before: datetime | timedelta | float | None  # with a time zone; from now; since the epoch
    tenant: str


class RequestParams(RequestOptions, total=False):
    """Every keyword of `generate`, `chat`, `stream`, `submit` and `map`.

    The sampling fields are those of `SamplingParams`; give them here, or as `sampling_params`.
    None is the same as leaving a field out.
    """

    sampling_params: SamplingParams | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: Mapping[int, float] | None
    allowed_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    seed: int | None
    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    logprobs: int | None
    model: str | None
    continue_final_message: bool | None
    chat_template_kwargs: Mapping[str, Any] | None
    cache_salt: str | None
    meta: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request, ready for the queue. `is_private`: nobody else knows its id."""

    request_id: str
    body: str
    tenant: str
    priority_class: str
    timing: Timing
    is_private: bool


_SUPPORTED = frozenset(RequestParams.__annotations__)
_OPTIONS = frozenset(RequestOptions.__annotations__)
_FIELDS = _SUPPORTED - _OPTIONS - {"sampling_params"}
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def new_request_id() -> str:
    """26 characters that sort by time: a ULID (48 bits of milliseconds, 80 random bits)."""
    number = (time.time_ns() // 1_000_000) << 80 | secrets.randbits(80)
    return "".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -5, -5))


def build(prompt: Prompt, params: Mapping[str, Any], defaults: RequestOptions) -> Submission:
    """Validate everything and encode the body.

    Raises:
        UnsupportedParameter: a keyword that is not offered; lists those that are.
        RequestTooLarge: the encoded request is over `limits.MAX_BODY_BYTES`.
        InvalidRequest: any other wrong value. All three name the field, never the value.
    """
    for name in params:
        if name not in _SUPPORTED:
            supported = ", ".join(sorted(_SUPPORTED))
            raise UnsupportedParameter(name[:64], f"not supported; supported: {supported}")
    given = {name: value for name, value in params.items() if name in _OPTIONS}
    options = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    request_id = check_id(options.get("request_id", new_request_id()))
    priority = options.get("priority", "normal")
    if not isinstance(priority, str) or priority not in PRIORITIES:
        raise InvalidRequest("priority", f"must be one of {', '.join(PRIORITIES)}")
    field, value = _prompt_field(prompt)
    body = _encode(field, {field: value, **_request_fields(params, request_id)})
    return Submission(
        request_id=request_id,
        body=body,
        tenant=check_tenant(options.get("tenant", "default")),
        priority_class=PRIORITIES[priority],
        timing=check_timing(options),
        is_private="request_id" not in options,
    )


def check_id(request_id: object) -> str:
    return _check_name("request_id", request_id, limits.REQUEST_ID_PATTERN, "'_' or '-'")


def check_tenant(tenant: object) -> str:
    return _check_name("tenant", tenant, limits.TENANT_PATTERN, "'_', '.' or '-'")


def check_after(after: object) -> int:
    if isinstance(after, bool) or not isinstance(after, int) or not 0 <= after <= 2**53:
        raise InvalidRequest("after", "must be a whole number from 0 to 2**53, an event's seq")
    return after


def check_timeout(timeout_s: object) -> float | None:
    if timeout_s is None or timeout_s == 0:
        return None if timeout_s is None else 0.0
    return check_number("timeout_s", timeout_s, low=0, high=1e9)


def _check_name(field: str, name: object, pattern: str, signs: str) -> str:
    # fullmatch: `$` alone would let a final newline through
    if not isinstance(name, str) or not re.fullmatch(pattern, name):
        raise InvalidRequest(field, f"must be 1 to 64 ASCII letters, digits, {signs}")
    return name


def _request_fields(params: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    fields = {k: _as_list(v) for k, v in params.items() if k in _FIELDS and v is not None}
    for name in ("meta", "chat_template_kwargs"):
        if name in fields:
            check_json(name, fields[name])
    if len(json.dumps(fields.get("meta"), ensure_ascii=False).encode()) > limits.MAX_META_BYTES:
        raise RequestTooLarge("meta", f"must have at most {limits.MAX_META_BYTES} bytes of JSON")
    fields = _sampling_fields(params.get("sampling_params"), fields)
    # Always given, so that every attempt draws the same numbers; from the id, so that submitting
    # the same request again is the same body.
    fields.setdefault("seed", _seed_of(request_id))
    return fields


def _sampling_fields(given: object, fields: dict[str, Any]) -> dict[str, Any]:
    if given is None:
        return fields
    if not isinstance(given, SamplingParams):
        raise InvalidRequest("sampling_params", "must be a tokenmill.SamplingParams")
    twice = sorted(fields.keys() & SamplingParams.model_fields.keys())
    if twice:
        raise InvalidRequest(
            "sampling_params", f"give either this or the keywords ({', '.join(twice)}), not both"
        )
    chosen = given.model_dump(include=set(SamplingParams.model_fields), exclude_unset=True)
    return {**fields, **{k: v for k, v in chosen.items() if v is not None}}


def _seed_of(request_id: str) -> int:
    digest = hashlib.blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) & limits.MAX_SEED


def _prompt_field(prompt: object) -> tuple[str, Any]:
    """Which field of the body the prompt belongs into, and what to put there."""
    if isinstance(prompt, str):
        check_text("prompt", prompt)
        return "prompt", prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes | bytearray):
        raise InvalidRequest("prompt", "must be text, a list of token ids or a list of messages")
    if not prompt:
        raise InvalidRequest("prompt", "must not be empty")
    if isinstance(prompt[0], Message | Mapping):
        return "messages", [dict(m) if isinstance(m, Mapping) else m for m in prompt]
    return "prompt_token_ids", list(prompt)


def _as_list(value: object) -> object:
    """Strict validation knows lists only; a tuple is as good."""
    return list(value) if isinstance(value, tuple) else value


def _encode(prompt_field: str, fields: dict[str, Any]) -> str:
    try:
        body = GenerateRequest.model_validate(fields).to_body()
    except ValidationError as error:
        raise explain(error) from None  # the cause's text would quote the input
    except PydanticSerializationError:
        raise InvalidRequest(prompt_field, "must be valid Unicode text") from None
    size = len(body.encode())
    if size > limits.MAX_BODY_BYTES:
        raise RequestTooLarge(
            prompt_field,
            f"the encoded request has {size} bytes; the limit is {limits.MAX_BODY_BYTES}",
        )
    return body

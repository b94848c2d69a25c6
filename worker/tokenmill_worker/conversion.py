"""Where the two vocabularies meet: the wire's requests and events, the engine's and its outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill import errors as wire
from tokenmill import limits
from tokenmill import protocol as wire_protocol
from tokenmill.protocol import ErrorCode, GenerateRequest, Message, SamplingParams, Usage
from tokenmill_engine import errors as engine_errors
from tokenmill_engine import sampling_params as engine_sampling
from tokenmill_engine.outputs import RequestOutput, TokenLogprobs
from tokenmill_engine.request import FinishReason

from .body import parse_body
from .delivery import Delivery, Ending
from .engine_port import Engine, Tokenizer

#: JSON knows no infinity; vLLM reports impossible tokens with the same number.
LOWEST_LOGPROB = -9999.0
#: The ways in which a request ends well.
_WIRE_REASONS: dict[FinishReason, wire_protocol.FinishReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
#: Lower is served first. Resumed work counts as high: it was admitted once already.
ENGINE_PRIORITIES = {"r": 0, "0": 0, "1": 1, "2": 2}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """The arguments of `Engine.add_request`, and what goes back to the caller unread."""

    attempt_id: str
    prompt_token_ids: Sequence[int]
    params: engine_sampling.SamplingParams
    output_token_ids: Sequence[int] = ()
    emitted_chars: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    alone: bool = False  # a worker died on it before its first token
    meta: dict[str, Any] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Published:
    """What earlier attempts put into the log: the only input of a resumption."""

    token_ids: tuple[int, ...] = ()
    num_chars: int = 0


def to_engine_request(
    delivery: Delivery, published: Published, engine: Engine, model_names: Sequence[str]
) -> EngineRequest:
    """Validate a body and make it the engine's. Tokenizes: call it off the event loop.

    Raises:
        tokenmill.errors.InvalidRequest, tokenmill_engine.errors.InvalidRequest: refused.
    """
    lease = delivery.lease
    request = parse_body(lease.body)
    if request.model is not None and request.model not in model_names:
        raise wire.InvalidRequest("model", f"this pool serves {model_names[0]}")
    resumed = lease.num_events > 0
    return EngineRequest(
        attempt_id=delivery.attempt_id,
        prompt_token_ids=_prompt_token_ids(request, engine.tokenizer),
        params=engine.defaults.apply(_explicit_parameters(request, lease.request_id)),
        output_token_ids=published.token_ids,
        emitted_chars=published.num_chars if resumed else None,
        priority=ENGINE_PRIORITIES[lease.ready_class],
        cache_salt=request.cache_salt,
        alone=lease.strikes > 0,
        meta=request.meta,
    )


def _prompt_token_ids(request: GenerateRequest, tokenizer: Tokenizer) -> list[int]:
    if request.prompt_token_ids is not None:
        return request.prompt_token_ids
    if request.prompt is not None:
        return tokenizer.encode(request.prompt)
    return tokenizer.render_chat(
        [_chat_message(message) for message in request.messages or ()],
        continue_final_message=request.continue_final_message,
        chat_template_kwargs=request.chat_template_kwargs,
    )


def _chat_message(message: Message) -> dict[str, object]:
    """Chat templates are written for text content, so parts are joined."""
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    named = {} if message.name is None else {"name": message.name}
    return {"role": message.role, "content": text, **named}


def _explicit_parameters(request: GenerateRequest, request_id: str) -> dict[str, object]:
    """Only what the caller set, so that the model's generation config can supply the rest."""
    explicit: dict[str, object] = {
        name: getattr(request, name)
        for name in SamplingParams.model_fields
        if name in request.model_fields_set
    }
    if explicit.get("seed") is None:
        explicit["seed"] = seed_of(request_id)
    return explicit


def seed_of(request_id: str) -> int:
    """The seed of a request that brings none: every attempt must draw the same numbers."""
    digest = hashlib.blake2b(request_id.encode(), digest_size=8, person=b"tokenmill-seed").digest()
    return int.from_bytes(digest) & limits.MAX_SEED


def to_event_fields(
    outputs: Sequence[RequestOutput], text_of: Callable[[int], str]
) -> tuple[Sequence[int], str, list[list[list[object]]] | None]:
    """Token ids, text and logprobs of one event for consecutive outputs of a request."""
    if len(outputs) == 1:  # as always when Redis keeps up
        token_ids: Sequence[int] = outputs[0].new_token_ids
        text, logprobs = outputs[0].text, outputs[0].logprobs
    else:
        token_ids = [token_id for output in outputs for token_id in output.new_token_ids]
        text = "".join(output.text for output in outputs)
        logprobs = tuple(position for output in outputs for position in output.logprobs)
    if not logprobs:
        return token_ids, text, None
    return token_ids, text, [_alternatives(position, text_of) for position in logprobs]


def _alternatives(position: TokenLogprobs, text_of: Callable[[int], str]) -> list[list[object]]:
    rows = zip(position.token_ids, position.logprobs, position.ranks, strict=True)
    return [
        [token_id, logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB, rank, text_of(token_id)]
        for token_id, logprob, rank in rows
    ]


def to_usage(output: RequestOutput) -> Usage:
    return Usage(
        prompt_tokens=output.num_prompt_tokens,
        completion_tokens=output.num_output_tokens,
        total_tokens=output.num_prompt_tokens + output.num_output_tokens,
        cached_tokens=output.num_cached_tokens,
    )


def to_ending(output: RequestOutput) -> Ending:
    """How a finished output ends the request. Text without a token travels in the end event."""
    reason = _WIRE_REASONS.get(output.finish_reason) if output.finish_reason else None
    if reason is None:
        why = "the engine gave the request up" if output.error is None else str(output.error)
        return failure("internal", why)
    return Ending(
        status="done",
        finish_reason=reason,
        stop_reason=output.stop_reason,
        text="" if output.new_token_ids else output.text,
    )


def failure(code: ErrorCode, message: str) -> Ending:
    return Ending(status="failed", finish_reason="error", code=code, message=message)


def refusal(error: Exception) -> Ending | None:
    """The ending of a request that was refused; None when the error is not the request's fault."""
    match error:
        case wire.InvalidRequest():
            code: ErrorCode = _WIRE_CODES[error.code]
        case engine_errors.PromptTooLong() | engine_errors.RequestTooLarge():
            code = "too_long"
        case engine_errors.UnsupportedParameter():
            code = "unsupported"
        case engine_errors.InvalidRequest():
            code = "invalid_request"
        case engine_errors.ResumeMismatch():
            return failure("resume_mismatch", "the tokens in the log do not fit this model")
        case _:
            return None
    return failure(code, str(error))


_WIRE_CODES: dict[str, ErrorCode] = {
    "invalid_request": "invalid_request",
    "unsupported": "unsupported",
    "too_long": "too_long",
}


def book(delivery: Delivery, output: RequestOutput) -> None:
    """Enter one output of the engine into a delivery."""
    delivery.latest = output
    if output.finish_reason is not None:
        delivery.ending = to_ending(output)
        delivery.usage = to_usage(output)
    if output.new_token_ids or (output.text and output.finish_reason is None):
        delivery.pending.append(output)

"""Between the wire's words and the engine's."""

from __future__ import annotations

import json

import pytest

from support_worker import FakeEngine, make_delivery, make_output
from tokenmill import errors as wire
from tokenmill.protocol import EndEvent, TokenEvent
from tokenmill_engine import errors as engine_errors
from tokenmill_engine.outputs import TokenLogprobs
from tokenmill_engine.request import FinishReason
from tokenmill_worker.conversion import (
    EngineRequest,
    Published,
    book,
    refusal,
    seed_of,
    to_ending,
    to_engine_request,
    to_event_fields,
)


def convert(published: Published | None = None, **changes: object) -> EngineRequest:
    delivery = make_delivery(**changes)
    return to_engine_request(
        delivery, published or Published(), FakeEngine(), ("small", "path/small")
    )


def body(**fields: object) -> str:
    return json.dumps({"prompt": "hello", **fields})


def test_a_text_prompt_is_tokenized() -> None:
    assert convert(body=body()).prompt_token_ids == list(b"hello")


def test_token_ids_are_taken_as_they_are() -> None:
    assert convert(body='{"prompt_token_ids":[3,1,2]}').prompt_token_ids == [3, 1, 2]


def test_messages_go_through_the_chat_template() -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]

    request = convert(body=json.dumps({"messages": messages}))

    assert bytes(request.prompt_token_ids) == b"<system>be brief<user>ab<assistant>"


def test_a_final_message_can_be_continued() -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]

    request = convert(body=json.dumps({"messages": messages, "continue_final_message": True}))

    assert bytes(request.prompt_token_ids) == b"<user>a<assistant>b"


def test_only_what_was_set_overrides_the_models_defaults() -> None:
    defaults = convert(body=body()).params
    assert (defaults.top_k, defaults.temperature, defaults.max_tokens) == (7, 1.0, 256)
    explicit = convert(body=body(top_k=3, temperature=0, stop="x", max_tokens=9)).params
    assert (explicit.top_k, explicit.temperature, explicit.stop) == (3, 0, ("x",))
    assert explicit.max_tokens == 9


def test_a_given_seed_is_kept_and_a_missing_one_depends_on_the_id_alone() -> None:
    assert convert(body=body(seed=5)).params.seed == 5
    first = convert(body=body(), fence="1.1000")
    again = convert(body=body(), fence="2.1000")
    other = convert(body=body(), request_id="request-2")
    assert first.params.seed == again.params.seed == seed_of("request-1")
    assert first.params.seed != other.params.seed
    assert first.attempt_id != again.attempt_id


@pytest.mark.parametrize("name", ["small", "path/small", None])
def test_the_models_names_are_accepted(name: str | None) -> None:
    assert convert(body=body(model=name)).prompt_token_ids


def test_another_model_is_refused() -> None:
    with pytest.raises(wire.InvalidRequest, match="model: this pool serves small"):
        convert(body=body(model="large"))


def test_what_was_published_is_replayed() -> None:
    request = convert(Published((4, 5, 6), 2), body=body(), num_events=3)

    assert request.output_token_ids == (4, 5, 6)
    assert request.emitted_chars == 2
    assert convert(body=body()).emitted_chars is None


def test_class_salt_and_meta_travel() -> None:
    request = convert(body=body(cache_salt="s", meta={"a": [1]}), ready_class="2")

    assert (request.priority, request.cache_salt, request.meta) == (2, "s", {"a": [1]})
    assert convert(body=body(), ready_class="0").priority == 0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (wire.InvalidRequest("f", "m"), "invalid_request"),
        (wire.UnsupportedParameter("f", "m"), "unsupported"),
        (wire.RequestTooLarge("f", "m"), "too_long"),
        (engine_errors.InvalidRequest("f", "m"), "invalid_request"),
        (engine_errors.UnsupportedParameter("f", "m"), "unsupported"),
        (engine_errors.PromptTooLong("f", "m"), "too_long"),
        (engine_errors.RequestTooLarge("f", "m"), "too_long"),
        (engine_errors.ResumeMismatch("m"), "resume_mismatch"),
    ],
)
def test_refusals_have_codes(error: Exception, code: str) -> None:
    ending = refusal(error)

    assert ending is not None
    assert (ending.status, ending.code, ending.finish_reason) == ("failed", code, "error")


def test_other_errors_are_no_refusals() -> None:
    assert refusal(RuntimeError("boom")) is None


def test_a_token_event_joins_outputs_and_their_logprobs() -> None:
    impossible = TokenLogprobs((4, 9, 8), (-0.25, float("-inf"), float("nan")), (1, 2, 3))
    outputs = [
        make_output(4, text="", logprobs=(impossible,)),
        make_output(5, text="ab", logprobs=(TokenLogprobs((5,), (-1.5,), (3,)),)),
    ]

    token_ids, text, logprobs = to_event_fields(outputs, lambda token_id: f"<{token_id}>")

    fields = {"e": 2, "i": 0, "a": 1, "k": token_ids, "t": text, "lp": logprobs}
    event = TokenEvent.model_validate(json.loads(json.dumps(fields)))
    assert (event.token_ids, event.text) == ([4, 5], "ab")
    assert event.logprobs == [
        [(4, -0.25, 1, "<4>"), (9, -9999.0, 2, "<9>"), (8, -9999.0, 3, "<8>")],
        [(5, -1.5, 3, "<5>")],
    ]


def test_an_event_without_logprobs_has_no_field_for_them() -> None:
    assert to_event_fields([make_output(4)], str) == ((4,), "e", None)
    assert to_event_fields([make_output(4), make_output(5)], str) == ([4, 5], "ef", None)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (make_output(4, finish_reason=FinishReason.LENGTH), ("done", "length", None, "")),
        (
            make_output(4, finish_reason=FinishReason.STOP, stop_reason="END"),
            ("done", "stop", "END", ""),
        ),
        (make_output(text="rest", finish_reason=FinishReason.STOP), ("done", "stop", None, "rest")),
        (make_output(finish_reason=FinishReason.ERROR), ("failed", "error", None, "")),
    ],
)
def test_endings(output: object, expected: tuple[object, ...]) -> None:
    ending = to_ending(output)  # type: ignore[arg-type]

    assert (ending.status, ending.finish_reason, ending.stop_reason, ending.text) == expected


def test_a_finished_output_becomes_events_that_the_client_reads() -> None:
    delivery = make_delivery(attempt=3)
    delivery.meta = {"order": 7}
    delivery.start("w-1")
    output = make_output(
        4, 5, finish_reason=FinishReason.STOP, num_prompt_tokens=6, num_output_tokens=2,
        num_cached_tokens=1,
    )  # fmt: skip

    book(delivery, output)

    assert delivery.pending == [output]
    assert delivery.ending is not None
    delivery.num_tokens = 2
    end = EndEvent.model_validate_json(delivery.end_event(delivery.ending))
    assert (end.seq, end.attempt, end.status, end.num_tokens) == (2, 3, "done", 2)
    assert end.usage is not None
    assert end.usage.model_dump() == {
        "prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8, "cached_tokens": 1,
    }  # fmt: skip
    assert end.meta == {"order": 7}


def test_text_without_a_token_is_not_lost() -> None:
    delivery = make_delivery()

    book(delivery, make_output(text="late"))

    assert [output.text for output in delivery.pending] == ["late"]


@pytest.mark.parametrize(("strikes", "alone"), [(0, False), (1, True), (2, True)])
def test_a_request_on_which_a_worker_died_is_a_suspect(strikes: int, alone: bool) -> None:
    assert convert(body=body(), strikes=strikes).alone is alone

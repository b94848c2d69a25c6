"""The joined engine on a tiny model: LLM, refusals, abort, resumption at every token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support_models import reference, tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from tokenmill_engine.errors import (
    DuplicateRequest,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    ResumeMismatch,
    SamplingFailed,
)
from tokenmill_engine.llm import LLM, SamplingParams
from tokenmill_engine.llm_engine import LLMEngine, derive_seed
from tokenmill_engine.outputs import RequestOutput
from tokenmill_engine.request import FinishReason

VOCABULARY = 420
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = "The quick brown fox"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as it comes from a hub."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**tiny_config(vocab_size=VOCABULARY)).save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(folder: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(
        str(folder),
        block_size=4,
        num_gpu_blocks_override=64,
        max_num_seqs=4,
        async_scheduling=request.param,
    )


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """One that did would be done again, and the test would not see it."""
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert not [message for message in messages if message.startswith("a step failed")]


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    assert not llm.engine.has_unfinished_requests
    return llm.engine


def run(engine: LLMEngine) -> dict[str, list[RequestOutput]]:
    """Steps until nothing is left; the outputs of each request."""
    outputs: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    return outputs


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def test_generate_equals_transformers(llm: LLM, folder: Path) -> None:
    prompts = [PROMPT, [5, 6, 7], "日本語"]
    answers = llm.generate(prompts, GREEDY)
    model = tiny_model(**tiny_config(vocab_size=VOCABULARY))
    for answer in answers:
        expected = reference(model, answer.prompt_token_ids, 12)
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reason is FinishReason.LENGTH
        assert answer.text == llm.engine.tokenizer.decode(
            answer.token_ids, skip_special_tokens=True
        )
    assert answers[1].prompt_token_ids == [5, 6, 7]


def test_logprobs_are_those_of_the_raw_logits(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=2, repetition_penalty=1.5)
    answer = llm.generate([[5, 6, 7]], params)[0]
    expected = reference(tiny_model(**tiny_config(vocab_size=VOCABULARY)), [5, 6, 7], 1)
    wanted = torch.log_softmax(expected.logits[0], -1).topk(2)
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    first = answer.logprobs[0]
    assert list(first.token_ids[1:]) == wanted.indices.tolist()
    assert list(first.logprobs[1:]) == pytest.approx(wanted.values.tolist(), abs=1e-4)


def test_one_wrong_prompt_stops_the_call_and_leaves_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt_token_ids: .*0 to 419"):
        llm.generate([PROMPT, [5, VOCABULARY]], GREEDY)
    with pytest.raises(InvalidRequest, match="one per prompt: 2, not 1"):
        llm.generate([PROMPT, PROMPT], [GREEDY])
    assert not llm.engine.has_unfinished_requests
    llm.engine.check_invariants()


@pytest.mark.parametrize(
    ("prompt", "params", "error"),
    [
        ([], {}, InvalidRequest),
        ([VOCABULARY], {}, InvalidRequest),
        ([5] * 256, {}, PromptTooLong),
        ([5] * 10, {"stop_token_ids": [VOCABULARY]}, InvalidRequest),
        ([5] * 10, {"logit_bias": {VOCABULARY: 1.0}}, InvalidRequest),
        ([5] * 10, {"allowed_token_ids": [VOCABULARY]}, InvalidRequest),
    ],
)
def test_refused_at_once(
    engine: LLMEngine, prompt: list[int], params: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        engine.add_request("r", prompt, SamplingParams(**params))
    assert not engine.has_unfinished_requests


def test_what_can_never_fit_is_refused_at_once(folder: Path) -> None:
    small = LLM(str(folder), block_size=4, num_gpu_blocks_override=8).engine
    assert small.max_model_len == 32
    with pytest.raises(PromptTooLong):
        small.add_request("r", [5] * 32, GREEDY)
    small.add_request("r", [5] * 20, SamplingParams(temperature=0, ignore_eos=True))
    assert len(tokens_of(run(small)["r"])) == 12  # the model length ends it, as in vLLM
    assert issubclass(RequestTooLarge, InvalidRequest)


def test_an_id_in_use_is_refused(engine: LLMEngine) -> None:
    engine.add_request("r", [5, 6], GREEDY)
    with pytest.raises(DuplicateRequest):
        engine.add_request("r", [5, 6], GREEDY)
    engine.abort_request("r")
    engine.abort_request("r")
    assert not engine.has_unfinished_requests


def test_abort_frees_and_spares_the_others(engine: LLMEngine) -> None:
    alone = tokens_of((engine.add_request("a", [5, 6, 7], GREEDY), run(engine))[1]["a"])
    for request_id in ("a", "b"):
        engine.add_request(request_id, [5, 6, 7], GREEDY)
    while not (first := engine.step()):
        pass
    engine.abort_request("b")
    outputs = run(engine)
    assert "b" not in outputs
    assert tokens_of([first[0], *outputs["a"]]) == alone
    assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_logits_that_are_not_finite_end_their_request_alone(engine: LLMEngine) -> None:
    engine.add_request("good", [5, 6, 7], GREEDY)
    alone = tokens_of(run(engine)["good"])
    engine.add_request("good", [5, 6, 7], GREEDY)
    engine.add_request("bad", [8, 9], GREEDY)

    def spoil(step: object, logits: torch.Tensor) -> None:
        for item, row in zip(step.sampling, logits, strict=True):
            if item.request.request_id == "bad" and item.request.next_output_index == 2:
                row.fill_(float("nan"))

    engine.runner.on_logits = spoil
    try:
        outputs = run(engine)
    finally:
        engine.runner.on_logits = None
    assert tokens_of(outputs["good"]) == alone
    last = outputs["bad"][-1]
    assert (last.finish_reason, last.new_token_ids) == (FinishReason.ERROR, ())
    assert isinstance(last.error, SamplingFailed)
    assert last.num_output_tokens == 2


SEEDED = SamplingParams(
    temperature=0.9, seed=11, max_tokens=24, repetition_penalty=1.2, ignore_eos=True, logprobs=1
)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_successor_continues_at_any_token(engine: LLMEngine, stopped: bool) -> None:
    """Byte-identical to the undisturbed run, whatever was published when its worker died."""
    prompt = engine.tokenizer.encode("👩‍👩‍👧‍👦 family, 日本語")
    params = SEEDED
    engine.add_request("whole", prompt, params)
    whole = run(engine)["whole"]
    if stopped:  # by a string that spans two tokens in the middle of the text
        text = text_of(whole)
        middle = len(text) // 2
        params = SamplingParams(
            temperature=0.9, seed=11, max_tokens=24, repetition_penalty=1.2, ignore_eos=True,
            logprobs=1, stop=[text[middle : middle + 3]],
        )  # fmt: skip
        engine.add_request("whole", prompt, params)
        whole = run(engine)["whole"]
        assert whole[-1].finish_reason is FinishReason.STOP
    tokens, text = tokens_of(whole), text_of(whole)
    for known in range(1, len(tokens) + 1):
        # The final flush travels with the last token, so it counts as published with it.
        published = text_of(whole[:known])
        engine.add_request(
            f"from-{known}", prompt, params,
            output_token_ids=tokens[:known], emitted_chars=min(len(published), len(text)),
        )  # fmt: skip
        outputs = run(engine)[f"from-{known}"]
        assert tokens_of(outputs) == tokens[known:]
        assert published + text_of(outputs) == text
        assert outputs[-1].finish_reason is whole[-1].finish_reason
        assert outputs[-1].stop_reason == whole[-1].stop_reason
        assert outputs[-1].num_output_tokens == len(tokens)


def test_text_that_was_generated_but_not_published_comes_again(engine: LLMEngine) -> None:
    engine.add_request("whole", [5, 6, 7], GREEDY)
    whole = run(engine)["whole"]
    engine.add_request(
        "again", [5, 6, 7], GREEDY, output_token_ids=tokens_of(whole)[:6], emitted_chars=0
    )
    assert text_of(run(engine)["again"]) == text_of(whole)


def test_tokens_of_another_request_are_noticed(engine: LLMEngine) -> None:
    with pytest.raises(ResumeMismatch, match="were published"):
        engine.add_request("r", [5, 6], GREEDY, output_token_ids=[7], emitted_chars=1000)
    with pytest.raises(InvalidRequest, match="output_token_ids"):
        engine.add_request("r", [5, 6], GREEDY, output_token_ids=[VOCABULARY])
    assert not engine.has_unfinished_requests


def test_a_request_without_a_seed_gets_one_from_engine_and_id(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    drawn = []
    for request_id in ("a", "b", "a"):
        engine.add_request(request_id, [5, 6, 7], params)
        drawn.append(tokens_of(run(engine)[request_id]))
    assert drawn[0] == drawn[2]
    assert drawn[0] != drawn[1]
    assert derive_seed(0, "a") != derive_seed(1, "a")


def test_a_shared_prefix_is_computed_once(engine: LLMEngine) -> None:
    prompt = list(range(10, 40))
    engine.add_request("first", prompt, GREEDY)
    first = run(engine)["first"]
    engine.add_request("second", prompt, GREEDY)
    engine.add_request("salted", prompt, GREEDY, cache_salt="tenant")
    outputs = run(engine)
    assert outputs["second"][-1].num_cached_tokens == 28  # whole blocks of 4, not the last token
    assert outputs["salted"][-1].num_cached_tokens == 0
    assert tokens_of(outputs["second"]) == tokens_of(outputs["salted"]) == tokens_of(first)


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    answer = llm.chat(messages, GREEDY)[0]
    assert answer.prompt_token_ids == llm.engine.tokenizer.render_chat(messages)
    assert len(llm.chat([messages, messages], GREEDY)) == 2

"""The engine with steps one ahead, under everything a request may ask for, on a tiny model.

What each request must give is what the synchronous engine gives it in a batch of one.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from support_models import tiny_config, tiny_model
from support_sampling import NO_RULES, make_request, make_sampler
from support_tokenizers import byte_level_bpe
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.device_sampling import choose_on_device
from tokenmill_engine.generation_defaults import GenerationRules
from tokenmill_engine.kernel_choice import choose_async_scheduling
from tokenmill_engine.last_samples import LastSamples
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.outputs import RequestOutput, ScheduledRequest
from tokenmill_engine.request import FinishReason
from tokenmill_engine.sampler import choose_by_torch
from tokenmill_engine.sampling_params import SamplingParams

VOCABULARY = 420
MAX_TOKENS = 32
#: What requests ask for, without and with the host taking part in the choice of each token.
PLAIN: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9},
    {"temperature": 1.1, "top_p": 0.9, "top_k": 40},
    {"temperature": 0.7, "min_p": 0.05},
)
BY_HOST: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0.8, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    {"temperature": 0.6, "logit_bias": {7: 4.0, 9: -3.0}},
    {"temperature": 1.0, "allowed_token_ids": list(range(20, 90))},
    {"temperature": 0.9, "logprobs": 2},
    {"temperature": 1.0, "bad_words": ["e", "the"]},
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    model = tiny_model(**tiny_config(vocab_size=VOCABULARY))
    model.generation_config.eos_token_id = list(range(2, 26))  # so that some answers end by one
    model.save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return folder


def load(folder: Path, **options: Any) -> LLMEngine:
    defaults: dict[str, Any] = {"block_size": 2, "max_num_seqs": 6, "max_num_batched_tokens": 24}
    config = EngineConfig(model=str(folder), skip_self_test=True, **defaults | options)
    return LLMEngine.load(config)


@pytest.fixture(scope="module")
def alone(folder: Path) -> LLMEngine:
    return load(folder, num_gpu_blocks_override=99)


@pytest.fixture(autouse=True)
def no_step_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """One that did would be done again, and the test would not see it."""
    yield
    messages = [record.getMessage() for record in caplog.get_records("call")]
    assert not [message for message in messages if message.startswith("a step failed")]


@dataclass
class Case:
    """One request, and all its outputs when it runs alone."""

    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    outputs: list[RequestOutput] = field(default_factory=list)

    def check(self, outputs: list[RequestOutput], *, is_whole: bool = True) -> None:
        wanted = self.outputs if is_whole else self.outputs[: len(outputs)]
        assert tokens_of(outputs) == tokens_of(wanted)
        assert text_of(outputs) == text_of(wanted)
        if is_whole:
            assert outputs[-1].finish_reason is wanted[-1].finish_reason
            assert outputs[-1].stop_reason == wanted[-1].stop_reason
        counts = [output.num_output_tokens for output in outputs]
        assert counts == [output.num_output_tokens for output in wanted]
        for output, other in zip(outputs, wanted, strict=True):
            for mine, theirs in zip(output.logprobs, other.logprobs, strict=True):
                assert mine.token_ids == theirs.token_ids
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-3)


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


def text_of(outputs: list[RequestOutput]) -> str:
    return "".join(output.text for output in outputs)


def run_alone(engine: LLMEngine, case: Case) -> list[RequestOutput]:
    engine.add_request("alone", case.prompt, case.params)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


def make_case(
    rng: random.Random, alone: LLMEngine, number: int, kinds: Sequence[dict[str, Any]]
) -> Case:
    """Ends by length, by a stop token or by a stop string, of a text that it really gives."""
    shared = [5 + number % 3] * rng.choice((0, 9, 13))
    prompt = shared + [rng.randrange(5, VOCABULARY) for _ in range(rng.choice((1, 5, 17)))]
    settings: dict[str, Any] = {
        **rng.choice(kinds),
        "seed": rng.randrange(2**40),
        "max_tokens": rng.randint(1, MAX_TOKENS),
        "ignore_eos": rng.random() < 0.5,
        "min_tokens": rng.choice((0, 0, 0, 1)),
    }
    case = Case(prompt, SamplingParams(**settings), rng.choice((0, 1)))
    case.outputs = run_alone(alone, case)
    text = text_of(case.outputs)
    ending = rng.choice(("length", "token", "string"))
    if ending == "token":
        settings |= {"stop_token_ids": [rng.choice(tokens_of(case.outputs))], "min_tokens": 0}
    elif ending == "string" and text.strip():
        start = rng.randrange(len(text))
        settings |= {"stop": [text[start : start + 3]], "min_tokens": 0}
    case.params = SamplingParams(**settings)
    case.outputs = run_alone(alone, case)
    return case


class Play:
    """Cases on an asynchronous engine, at random times; some are aborted with rows in flight and
    taken up again with what was given out by then, as after a hand-over."""

    def __init__(self, engine: LLMEngine, cases: list[Case], rng: random.Random) -> None:
        self._engine = engine
        self._cases = cases
        self._rng = rng
        self.outputs: dict[int, list[RequestOutput]] = {index: [] for index in range(len(cases))}
        self.num_handed_over = self.num_ahead = 0

    def run(self) -> None:
        engine, rng = self._engine, self._rng
        waiting = list(range(len(self._cases)))
        while waiting or engine.has_unfinished_requests:
            while waiting and rng.random() < 0.5:
                self._add(waiting.pop())
            for output in engine.step():
                self.outputs[int(output.request_id)].append(output)
            engine.check_invariants()
            self.num_ahead += len(engine._in_flight)
            if rng.random() < 0.1:
                self._hand_over()
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks

    def _add(self, index: int) -> None:
        case, given = self._cases[index], self.outputs[index]
        self._engine.add_request(
            str(index), case.prompt, case.params,
            output_token_ids=tokens_of(given), emitted_chars=len(text_of(given)),
            priority=case.priority,
        )  # fmt: skip

    def _hand_over(self) -> None:
        running = [i for i, given in self.outputs.items() if given and not given[-1].finish_reason]
        if running:
            index = self._rng.choice(running)
            self._engine.abort_request(str(index))
            self._engine.check_invariants()
            self._add(index)
            self.num_handed_over += 1


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_every_request_gives_what_it_gives_alone(
    folder: Path, alone: LLMEngine, policy: str
) -> None:
    rng = random.Random(policy)
    engine = load(
        folder, async_scheduling=True, num_gpu_blocks_override=40, scheduling_policy=policy
    )
    assert engine.is_async
    assert not alone.is_async
    num_handed_over = num_ahead = 0
    reasons = set()
    for kinds in (PLAIN, PLAIN, (*PLAIN, *PLAIN, *BY_HOST)):
        cases = [make_case(rng, alone, number, kinds) for number in range(14)]
        play = Play(engine, cases, rng)
        play.run()
        num_handed_over += play.num_handed_over
        num_ahead += play.num_ahead
        for index, case in enumerate(cases):
            case.check(play.outputs[index])
            last = case.outputs[-1]
            reasons.add((last.finish_reason, type(last.stop_reason)))
    stops = {(FinishReason.STOP, kind) for kind in (int, str, type(None))}
    assert reasons == {(FinishReason.LENGTH, type(None)), *stops}
    stats = engine.stats()
    assert stats.preemptions_total > 0
    assert stats.prefix_cache_hits_total > 0
    assert num_handed_over > 3
    assert num_ahead > stats.steps_total // 2
    assert len(engine._sampler) == 0


def test_what_was_aborted_in_flight_gives_nothing_more(folder: Path) -> None:
    engine = load(folder, async_scheduling=True, num_gpu_blocks_override=64)
    engine.add_request("a", [7, 8, 9], SamplingParams(temperature=0, max_tokens=9))
    engine.step()
    engine.abort_request("a")
    assert engine.has_unfinished_requests  # its blocks are still written to
    assert engine.step() == []
    assert not engine.has_unfinished_requests
    assert engine.stats().num_free_blocks == 64


def test_the_option_is_off_where_the_host_chooses_unless_asked_for() -> None:
    assert choose_async_scheduling(None, choose_on_device)
    assert not choose_async_scheduling(None, choose_by_torch)
    assert choose_async_scheduling(True, choose_by_torch)
    assert not choose_async_scheduling(False, choose_on_device)


def test_an_unusable_sample_leaves_a_token_that_exists() -> None:
    last = LastSamples(torch.device("cpu"))
    last.keep(torch.tensor([7, -1, 9]))
    sources = torch.tensor([-1, 2, 1, 0, -1])
    assert last.fill_in(torch.tensor([1, 2, 3, 4, 5]), sources).tolist() == [1, 9, 0, 7, 5]


@pytest.mark.parametrize("kind", [*PLAIN, *BY_HOST])
def test_an_unread_token_changes_nothing_about_the_next_one_if_the_host_is_not_needed(
    kind: dict[str, Any],
) -> None:
    """Noise, bans and limits go by the number of tokens, whether they were read or not."""
    rules = GenerationRules(begin_suppress_token_ids=(4,)) if "logprobs" not in kind else NO_RULES
    sampler = make_sampler(rules, bad_words=[[11, 12]])
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(1))
    known, unread = (make_request(name, output=out, seed=5, **kind) for name, out in NEXT)
    unread.num_unread_tokens = 1
    unread.unread_place = 0
    drawn = [
        sampler.draw(logits, (ScheduledRequest(request, start, 1),))
        for request, start in ((known, 3), (unread, 3))
    ]
    needs_host = kind in BY_HOST
    assert [one.by_host for one in drawn] == [needs_host, needs_host]
    if not needs_host:
        assert drawn[0].token_ids.tolist() == drawn[1].token_ids.tolist()


#: One whose first token is known, one whose first token is still in flight.
NEXT = (("known", (9,)), ("unread", ()))


@pytest.mark.parametrize(("num_output", "needs_host"), [(0, True), (1, True), (2, False)])
def test_min_tokens_need_the_host_only_while_they_hold(num_output: int, needs_host: bool) -> None:
    request = make_request(output=[9] * num_output, temperature=0, min_tokens=2)
    drawn = make_sampler().draw(torch.zeros(1, 97), (ScheduledRequest(request, 0, 1),))
    assert drawn.by_host is needs_host

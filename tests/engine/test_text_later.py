"""An engine that leaves the text to whoever gets its outputs gives the same text."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support_models import tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.outputs import RequestOutput
from tokenmill_engine.request import FinishReason
from tokenmill_engine.sampling_params import SamplingParams

VOCABULARY = 420
PROMPTS = {"plain": [5, 6, 7], "seeded": [9, 10], "token": [5, 6, 7], "string": [5, 6, 7]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**tiny_config(vocab_size=VOCABULARY)).save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def later(folder: Path) -> LLMEngine:
    return load(folder, text_later=True)


def load(folder: Path, *, text_later: bool) -> LLMEngine:
    config = EngineConfig(
        model=str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=4
    )
    return LLMEngine.load(config, text_later=text_later)


def run(engine: LLMEngine, stop_ids: tuple[int, ...], stop: str) -> list[RequestOutput]:
    params = {
        "plain": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True),
        "seeded": SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True),
        "token": SamplingParams(
            temperature=0, max_tokens=24, ignore_eos=True, stop_token_ids=stop_ids
        ),
        "string": SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=(stop,)),
    }
    for name, prompt in PROMPTS.items():
        engine.add_request(name, prompt, params[name])
    outputs = []
    while engine.has_unfinished_requests:
        outputs += engine.step()
    return outputs


def test_text_made_on_another_thread_after_all_steps_is_the_same(
    folder: Path, later: LLMEngine
) -> None:
    at_once = load(folder, text_later=False)
    first = run(at_once, (), "no such text")
    plain = [output for output in first if output.request_id == "plain"]
    stop_ids = plain[15].new_token_ids
    stop = "".join(output.text for output in plain)[12:15]
    expected = run(at_once, stop_ids, stop)
    assert not any(output.unread for output in expected)

    outputs = run(later, stop_ids, stop)
    unread = {output.request_id for output in outputs if output.unread}
    assert unread == {"plain", "seeded", "token"}  # a stop string needs its text at once
    with ThreadPoolExecutor(1) as pool:
        found = list(pool.map(RequestOutput.read, outputs))

    assert found == expected
    reasons = {output.request_id: output.finish_reason for output in found if output.finish_reason}
    assert reasons["token"] is reasons["string"] is FinishReason.STOP
    assert reasons["plain"] is reasons["seeded"] is FinishReason.LENGTH


def test_reading_twice_makes_no_text_twice(later: LLMEngine) -> None:
    outputs = run(later, (), "no such text")
    texts = [output.read().text for output in outputs]
    assert any(texts)
    assert [output.read().text for output in outputs] == texts

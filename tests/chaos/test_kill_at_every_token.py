"""`kill -9` after each token in turn: what the client gets is what an undisturbed worker gives.

One worker lives at a time. It finishes what its predecessor left, takes the next request, stops
after the token whose turn it is and is killed; then the next one is started. So every index costs
one crash, one expired lease and one resumption, with real processes and a real model.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from support_models import tiny_config, tiny_model
from support_redis import unique_keyspace
from support_tokenizers import TEXTS, byte_level_bpe
from support_worker_process import (
    TESTS,
    Pool,
    clean_environment,
    eventually,
    pool_of_workers,
    starts_of,
)
from tokenmill.embedded import EmbeddedServer
from tokenmill.scripts import run
from tokenmill_engine.llm import LLM, Generation, SamplingParams

pytestmark = pytest.mark.timeout(900)

NUM_TOKENS = 48
VOCABULARY = 420
EMOJI = "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 👍🏽 thumb, 🛑🛑"
#: A worker that dies is missed after so long.
LEASE_MS = 300


@dataclass
class Workers:
    """The fork server, and the one worker that lives."""

    pool: Pool
    process: subprocess.Popen[str]
    started: int = 0
    pid: int | None = None

    def start(self) -> None:
        self.started += 1
        name = f"worker{self.started}"
        settings = {
            "redis_url": self.pool.server.url,
            "namespace": self.pool.keys.namespace,
            "pool": self.pool.keys.pool,
            "name": name,
            "lease_ms": LEASE_MS,
            "max_num_seqs": 4,
        }
        line = json.dumps([settings, str(self.pool.folder / f"{name}.log")])
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        self.pid = int(self.process.stdout.readline())

    def kill(self) -> None:
        assert self.pid is not None
        os.kill(self.pid, signal.SIGKILL)
        self.pid = None

    @property
    def logs(self) -> str:
        return "".join(file.read_text() for file in sorted(self.pool.folder.glob("*.log")))


@contextmanager
def forked_workers(
    server: EmbeddedServer, folder: Path, engine_options: dict[str, Any]
) -> Iterator[Workers]:
    process = subprocess.Popen(
        [sys.executable, str(TESTS / "support_fork_server.py"), json.dumps(engine_options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment()
        | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
    )
    with process, pool_of_workers(server, unique_keyspace(), folder) as pool:
        yield Workers(pool, process)


@dataclass(frozen=True)
class Transcript:
    """All that a client may compare. Events are divided differently, so they are joined."""

    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: object
    num_tokens: int
    completion_tokens: int
    logprobs: list[list[list[Any]]]  # to the last bit

    @classmethod
    def read(cls, pool: Pool, request_id: str) -> Transcript:
        end = pool.end(request_id)
        assert end["st"] == "done", end
        return cls(
            text=pool.text(request_id),
            token_ids=pool.tokens(request_id),
            finish_reason=end["fin"],
            stop_reason=end.get("sr"),
            num_tokens=end["n"],
            completion_tokens=end["usage"]["completion_tokens"],
            logprobs=[position for e in pool.events(request_id) for position in e.get("lp", [])],
        )


@dataclass(frozen=True)
class Case:
    """A request of exactly NUM_TOKENS tokens that ends at a stop string."""

    name: str
    prompt: str
    body: dict[str, Any]

    def submit(self, pool: Pool, stop: int | None = None) -> str:
        request_id = self.name if stop is None else f"{self.name}-{stop}"
        text = json.dumps({"prompt": self.prompt, "logprobs": 1, **self.body})
        run(pool.client, pool.calls.enqueue(request_id, body=text))
        return request_id


def case_of(llm: LLM, name: str, prompt: str, body: dict[str, Any]) -> tuple[Case, Generation]:
    """Ends with its NUM_TOKENS-th token at a stop string that began in an earlier one.

    Of the repetition penalties the first is taken for which that token completes a character and
    the string does not occur before.
    """
    for penalty in (1.2, 1.25, 1.3, 1.35, 1.4, 1.15, 1.1):
        fixed = {**body, "repetition_penalty": penalty, "ignore_eos": True}
        fixed["max_tokens"] = NUM_TOKENS + 8
        stop = stop_string(llm, llm.generate(prompt, SamplingParams(**fixed))[0])
        if stop is None:
            continue
        fixed["stop"] = [stop]
        generation = llm.generate(prompt, SamplingParams(**fixed, logprobs=1))[0]
        if len(generation.token_ids) == NUM_TOKENS:
            assert generation.stop_reason == stop
            return Case(name, prompt, fixed), generation
    raise AssertionError("no stop string can be found")


def stop_string(llm: LLM, generation: Generation) -> str | None:
    """The character before the text of the last token that counts, and that text."""
    stream = llm.engine.tokenizer.text_stream(skip_special_tokens=True)
    pieces = [stream.push(token_id) for token_id in generation.token_ids[:NUM_TOKENS]]
    before = "".join(pieces[:-1])
    return before[-1:] + pieces[-1] if pieces[-1] else None


def kill_at(workers: Workers, case: Case, index: int, undisturbed: Transcript) -> None:
    pool = workers.pool
    request_id = case.submit(pool, stop=index)
    eventually(lambda: len(pool.tokens(request_id)) == index)
    workers.kill()
    workers.start()
    assert Transcript.read(pool, request_id) == undisturbed
    starts = starts_of(pool.events(request_id))
    assert [start["i"] for start in starts] == [0, index]
    assert starts[0]["w"] != starts[1]["w"]


def check_undisturbed(workers: Workers, case: Case, generation: Generation) -> Transcript:
    """The worker that nobody kills says what the engine alone says."""
    undisturbed = Transcript.read(workers.pool, case.submit(workers.pool))
    assert undisturbed.token_ids == generation.token_ids
    assert undisturbed.text == generation.text
    assert len(undisturbed.logprobs) == NUM_TOKENS
    assert (undisturbed.finish_reason, undisturbed.stop_reason) == ("stop", generation.stop_reason)
    return undisturbed


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**tiny_config(vocab_size=VOCABULARY)).save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tiny_options(tiny_folder: Path) -> dict[str, Any]:
    return {"model": str(tiny_folder), "block_size": 4, "num_gpu_blocks_override": 64}


@pytest.fixture(scope="module")
def tiny_llm(tiny_options: dict[str, Any]) -> LLM:
    return LLM(**tiny_options)


@pytest.fixture(scope="module")
def tiny_workers(
    server: EmbeddedServer,
    tiny_options: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Workers]:
    with forked_workers(server, tmp_path_factory.mktemp("workers"), tiny_options) as workers:
        workers.start()
        yield workers


@pytest.fixture(scope="module", params=["greedy", "seeded"])
def tiny_case(request: pytest.FixtureRequest, tiny_llm: LLM) -> tuple[Case, Generation]:
    """Tokens that emoji are made of, most of them parts of a character."""
    encode = tiny_llm.engine.tokenizer.encode
    allowed = sorted({token for text in (EMOJI, TEXTS[2], TEXTS[3]) for token in encode(text)})
    sampling = {"temperature": 0} if request.param == "greedy" else {"temperature": 0.9, "seed": 11}
    return case_of(tiny_llm, request.param, EMOJI, {**sampling, "allowed_token_ids": allowed})


@torch.inference_mode()
def greedy_by_transformers(case: Case, prompt: list[int]) -> list[int]:
    model = tiny_model(**tiny_config(vocab_size=VOCABULARY))
    model.set_attn_implementation("eager")
    allowed = case.body["allowed_token_ids"]
    generated = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
        repetition_penalty=case.body["repetition_penalty"],
        prefix_allowed_tokens_fn=lambda _row, _ids: allowed,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return generated[0, len(prompt) :].tolist()


def test_the_text_is_a_hard_one(tiny_llm: LLM, tiny_case: tuple[Case, Generation]) -> None:
    """Most kills must fall into the middle of a character, and the oracle is transformers."""
    case, generation = tiny_case
    decode = tiny_llm.engine.tokenizer.decode
    cuts = [decode(generation.token_ids[:n]).endswith("\ufffd") for n in range(1, NUM_TOKENS + 1)]
    assert sum(cuts) >= NUM_TOKENS // 3
    if case.name == "greedy":
        expected = greedy_by_transformers(case, generation.prompt_token_ids)
        assert generation.token_ids == expected


def test_killed_at_some_tokens(tiny_workers: Workers, tiny_case: tuple[Case, Generation]) -> None:
    case, generation = tiny_case
    undisturbed = check_undisturbed(tiny_workers, case, generation)
    for index in (1, NUM_TOKENS // 2, NUM_TOKENS):
        kill_at(tiny_workers, case, index, undisturbed)


@pytest.mark.slow
@pytest.mark.chaos
def test_killed_at_every_token(tiny_workers: Workers, tiny_case: tuple[Case, Generation]) -> None:
    case, generation = tiny_case
    case = Case(f"{case.name}-every", case.prompt, case.body)
    undisturbed = check_undisturbed(tiny_workers, case, generation)
    for index in range(1, NUM_TOKENS + 1):
        kill_at(tiny_workers, case, index, undisturbed)


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.model
def test_smollm2_killed_at_random_tokens(
    server: EmbeddedServer, smollm2_path: Path, tmp_path: Path
) -> None:
    options = {
        "model": str(smollm2_path),
        "dtype": "float32",
        "max_model_len": 512,
        "num_threads": 1,
    }
    llm = LLM(**options)
    prompt = llm.engine.tokenizer.decode(
        llm.engine.tokenizer.render_chat(
            [{"role": "user", "content": "Write a short poem about cats, with many emoji 🐱🎉."}]
        )
    )
    cases = [
        case_of(llm, name, prompt, sampling)
        for name, sampling in (
            ("greedy", {"temperature": 0}),
            ("seeded", {"temperature": 0.8, "seed": 7}),
        )
    ]
    del llm
    indexes = random.Random(3).sample(range(1, NUM_TOKENS + 1), 20)
    with forked_workers(server, tmp_path, options) as workers:
        workers.start()
        for (case, generation), part in zip(cases, (indexes[:10], indexes[10:]), strict=True):
            undisturbed = check_undisturbed(workers, case, generation)
            for index in part:
                kill_at(workers, case, index, undisturbed)


def test_killed_at_some_tokens_with_a_step_in_flight(
    server: EmbeddedServer, tiny_options: dict[str, Any], tiny_llm: LLM, tmp_path: Path
) -> None:
    """Nothing here needs the host: the tokens of the step in flight are lost, and come again."""
    sampling = {"temperature": 0.9, "seed": 11, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    generation = tiny_llm.generate(EMOJI, SamplingParams(**sampling))[0]
    case = Case("ahead", EMOJI, {**sampling, "logprobs": None})
    with forked_workers(server, tmp_path, tiny_options | {"async_scheduling": True}) as workers:
        workers.start()
        undisturbed = Transcript.read(workers.pool, case.submit(workers.pool))
        assert (undisturbed.token_ids, undisturbed.text) == (generation.token_ids, generation.text)
        for index in (1, NUM_TOKENS // 2, NUM_TOKENS - 1):
            kill_at(workers, case, index, undisturbed)

"""The real engine behind a worker: a request that fails alone, and memory that runs out."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from support_models import tiny_config, tiny_model
from support_tokenizers import byte_level_bpe
from support_worker_bench import WORKER, Bench, running, until
from tokenmill.scripts import arun
from tokenmill_engine.llm import LLM, SamplingParams
from tokenmill_worker.delivery import Delivery
from tokenmill_worker.dispatcher import Dispatcher
from tokenmill_worker.engine_thread import EngineThread
from tokenmill_worker.errors import EngineFailed
from tokenmill_worker.intake import Identity, Intake

PROMPTS = {"a": [5, 6, 7], "b": [8, 9, 10, 11], "bad": [12, 419]}
POISON = 419
PARAMS = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = tmp_path_factory.mktemp("model")
    tiny_model(**tiny_config(vocab_size=420)).save_pretrained(folder)
    byte_level_bpe()._hf.save_pretrained(folder)
    return LLM(str(folder), block_size=4, num_gpu_blocks_override=64, max_num_seqs=8)


@contextmanager
def failing(llm: LLM, failure: Callable[[list[int]], Exception | None]) -> Iterator[None]:
    def after_forward(_model: object, _args: object, kwargs: dict[str, Any], _out: object) -> None:
        error = failure(kwargs["input_ids"][0].tolist())
        if error is not None:
            raise error

    handle = llm.engine.runner.model.register_forward_hook(after_forward, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


class Served:
    """Requests leased from a queue and served by the engine on its own thread."""

    def __init__(self, bench: Bench, llm: LLM) -> None:
        self.bench = bench
        self.thread = EngineThread(lambda _on_phase: llm.engine, lambda _phase: None)
        self.dispatcher = Dispatcher(bench.deliveries, self.thread, bench.metrics)
        self.intake = Intake(
            redis=bench.redis,
            keys=bench.keys,
            deliveries=bench.deliveries,
            dispatcher=self.dispatcher,
            engine=llm.engine,
            engine_thread=self.thread,
            retrier=bench.retrier,
            identity=Identity(WORKER, ("model",), "fingerprint"),
        )

    async def deliver(self, names: list[str]) -> list[Delivery]:
        bench = self.bench
        for name in names:
            body = json.dumps({"prompt_token_ids": PROMPTS[name], **PARAMS})
            await arun(bench.redis, bench.calls.enqueue(name, body=body))
        return await bench.deliver_with("")

    async def run(self, names: list[str]) -> None:
        self.thread.pause("test")  # until all are in the engine, so that they share a step
        async with running(self.bench.publisher.run(), self.dispatcher.run()):
            for delivery in await self.deliver(names):
                await self.intake.admit(delivery)
            self.thread.pause("test", False)
            await until(lambda: len(self.bench.ended) == len(names))

    async def tokens(self, name: str) -> list[int]:
        return [token for event in await self.bench.log(name) for token in event.get("k", ())]

    async def end(self, name: str) -> dict[str, Any]:
        return (await self.bench.log(name))[-1]


@pytest.fixture
async def served(bench: Bench, llm: LLM) -> AsyncIterator[Served]:
    served = Served(bench, llm)
    await served.thread.load()
    yield served
    await served.thread.stop(5)
    assert not llm.engine.has_unfinished_requests


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> dict[str, list[int]]:
    params = SamplingParams(**PARAMS)
    return {name: llm.generate([prompt], params)[0].token_ids for name, prompt in PROMPTS.items()}


def counted(served: Served, name: str) -> float:
    registry, labels = served.bench.metrics.registry, {"model_name": "model", "engine": "0"}
    value = registry.get_sample_value(name, labels)
    assert value is not None
    return value


async def test_a_poisonous_request_ends_alone(
    served: Served, llm: LLM, wanted: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def failure(token_ids: list[int]) -> Exception | None:
        return RuntimeError(f"canary {token_ids}") if POISON in token_ids else None

    with failing(llm, failure):
        await served.run(["a", "bad", "b"])

    end = await served.end("bad")
    assert (end["st"], end["code"]) == ("failed", "internal")
    assert "RuntimeError" in end["msg"]
    for text in (end["msg"], caplog.text):
        assert "canary" not in text
        assert str(POISON) not in re.findall(r"\d+", text)  # a time within an id is another number
    for name in ("a", "b"):
        assert await served.tokens(name) == wanted[name]
        assert (await served.end(name))["st"] == "done"
    assert counted(served, "tokenmill_isolated_failures_total") == 1


async def test_memory_that_runs_out_is_no_failure(
    served: Served, llm: LLM, wanted: dict[str, list[int]]
) -> None:
    def failure(token_ids: list[int]) -> Exception | None:
        return torch.OutOfMemoryError("too much") if len(token_ids) > 2 else None

    before = llm.engine.stats().oom_retries_total
    with failing(llm, failure):
        await served.run(["a", "b"])

    for name in ("a", "b"):
        assert await served.tokens(name) == wanted[name]
    retries = counted(served, "tokenmill_oom_retries_total")
    assert retries >= llm.engine.stats().oom_retries_total - before > 0


async def test_an_engine_that_fails_on_everything_ends_the_worker(bench: Bench, llm: LLM) -> None:
    served = Served(bench, llm)
    await served.thread.load()
    served.thread.pause("test")
    for delivery in await served.deliver(["a", "b"]):
        await served.intake.admit(delivery)
    with failing(llm, lambda _: RuntimeError("canary")):
        served.thread.pause("test", False)
        with pytest.raises(EngineFailed, match="RuntimeError in after_forward") as failed:
            await served.thread.wait_for_failure()
    assert "canary" not in str(failed.value)
    await served.thread.stop(5)
    for name in list(llm.engine._texts):
        llm.engine.abort_request(name)

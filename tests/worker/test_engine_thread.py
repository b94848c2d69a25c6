"""The thread that owns the engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from support_worker import FakeEngine, expected_tokens, fake_engine_factory
from support_worker_bench import until
from tokenmill_engine.errors import ModelLoadError
from tokenmill_engine.request import FinishReason
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_worker.conversion import EngineRequest
from tokenmill_worker.engine_thread import EngineThread, Refused, Stepped
from tokenmill_worker.errors import EngineFailed


def request(attempt_id: str, prompt: str = "hello", max_tokens: int = 3) -> EngineRequest:
    return EngineRequest(attempt_id, list(prompt.encode()), SamplingParams(max_tokens=max_tokens))


@pytest.fixture
async def thread() -> AsyncIterator[EngineThread]:
    phases: list[str] = []
    thread = EngineThread(fake_engine_factory(step_s=0.001), phases.append)
    await thread.load()
    assert phases == ["pretending"]
    yield thread
    await thread.stop(5)


async def outputs_until_end(thread: EngineThread, attempt_id: str) -> list[int]:
    tokens: list[int] = []
    while True:
        match await thread.events.get():
            case Stepped(outputs, _):
                mine = [output for output in outputs if output.request_id == attempt_id]
                tokens += [token for output in mine for token in output.new_token_ids]
                if any(output.finish_reason is FinishReason.LENGTH for output in mine):
                    return tokens
            case Refused(_, error):
                raise error


async def test_requests_become_outputs(thread: EngineThread) -> None:
    thread.submit(request("a/1"))

    assert await outputs_until_end(thread, "a/1") == expected_tokens(b"hello", 0, 3)
    assert thread.busy_s < 5


async def test_a_refused_request_harms_no_neighbour(thread: EngineThread) -> None:
    thread.submit(request("a/1", "refuse this"))
    thread.submit(request("b/1"))

    refused = await thread.events.get()
    assert isinstance(refused, Refused)
    assert refused.attempt_id == "a/1"
    assert await outputs_until_end(thread, "b/1") == expected_tokens(b"hello", 0, 3)


async def test_a_suspect_is_handed_on_as_one() -> None:
    engine = FakeEngine()
    thread = EngineThread(lambda _on_phase: engine, lambda _phase: None)
    await thread.load()
    thread.submit(request("a/1"))
    thread.submit(replace(request("b/1"), alone=True))

    await outputs_until_end(thread, "b/1")

    assert engine.alone == ["b/1"]
    await thread.stop(5)


async def test_an_aborted_request_gives_no_more_outputs(thread: EngineThread) -> None:
    thread.submit(request("a/1", max_tokens=10_000))
    await thread.events.get()

    thread.abort("a/1")
    thread.submit(request("b/1"))

    await outputs_until_end(thread, "b/1")
    thread.submit(request("c/1"))
    while not thread.events.empty():
        thread.events.get_nowait()
    assert await outputs_until_end(thread, "c/1") == expected_tokens(b"hello", 0, 3)


async def test_a_pause_lasts_until_every_reason_is_gone(thread: EngineThread) -> None:
    thread.pause("lease")
    thread.pause("drain")
    thread.submit(request("a/1"))
    thread.submit(request("b/1", "refuse"))  # its answer shows that the thread has seen both
    assert isinstance(await thread.events.get(), Refused)

    thread.pause("lease", False)
    thread.submit(request("c/1", "refuse"))
    assert isinstance(await thread.events.get(), Refused)
    thread.pause("drain", False)

    assert await outputs_until_end(thread, "a/1") == expected_tokens(b"hello", 0, 3)


async def test_a_failing_step_is_reported_without_its_text(thread: EngineThread) -> None:
    thread.submit(request("a/1", "explode"))

    with pytest.raises(EngineFailed, match="RuntimeError in _advance") as failed:
        await thread.wait_for_failure()

    assert "secret" not in str(failed.value)


async def test_a_failure_to_load_is_raised_by_load() -> None:
    def factory(on_phase: Callable[[str], None]) -> FakeEngine:
        raise ModelLoadError("there is no model")

    with pytest.raises(ModelLoadError):
        await EngineThread(factory, lambda phase: None).load()


async def test_a_long_step_shows_as_busy() -> None:
    engine = FakeEngine()
    thread = EngineThread(lambda _on_phase: engine, lambda _phase: None)
    await thread.load()
    thread.submit(request("a/1", "hang"))

    await until(lambda: thread.busy_s > 0.05)

    engine.released.set()
    await thread.stop(5)
    assert thread.busy_s == 0

"""The five most telling scenarios with the real engine on a real model."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from chaos.audience import Audience, Request
from chaos.checks import Verdict
from chaos.faults import Supervisor, outage, taken_over
from chaos.rig import Rig
from support_prompts import PROMPTS
from support_worker_process import WorkerProcess
from tokenmill.calls import QueuePolicy
from tokenmill_engine.llm import LLM, SamplingParams

pytestmark = [
    pytest.mark.scenario, pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(600),
]  # fmt: skip

TOKENS = 32
LEASE_MS = 3000
#: float32: there a greedy answer does not depend on what else is in the batch.
ENGINE: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 1024, "num_threads": 1, "skip_self_test": True,
    "lease_ms": LEASE_MS,
}  # fmt: skip
WANTED = [
    Request(
        f"request-{number:02d}",
        prompt,
        TOKENS,
        options={"temperature": 0, "ignore_eos": True},
    )
    for number, prompt in enumerate(PROMPTS[:12])
]


@pytest.fixture(scope="module")
def undisturbed(smollm2_path: Path) -> dict[str, list[int]]:
    """Request id → the tokens of a run in which nothing happens."""
    llm = LLM(str(smollm2_path), dtype="float32", max_model_len=1024, num_threads=1)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    return {
        request.id: list(llm.generate(request.prompt, params)[0].token_ids) for request in WANTED
    }


@dataclass
class Stage:
    """A rig with the real engine, and what it must say."""

    rig: Rig
    model: Path
    expected: dict[str, list[int]]
    audience: Audience = field(init=False)

    def worker(self, name: str, **options: Any) -> WorkerProcess:
        return self.rig.pool.start(name, model=str(self.model), **ENGINE, **options)

    def start(self, *names: str, **options: Any) -> list[WorkerProcess]:
        return self.rig.start(*names, model=str(self.model), **ENGINE, **options)

    def read(self, url: str | None = None, *, more: tuple[Request, ...] = ()) -> None:
        self.audience = self.rig.threads(url)
        self.audience.read([*WANTED, *more])

    def finish(self, **options: Any) -> Verdict:
        transcripts = self.audience.transcripts
        policy = QueuePolicy(lease_ms=LEASE_MS)
        verdict = self.rig.finish(oracle=False, policy=policy, **options)
        for request_id, token_ids in self.expected.items():
            assert transcripts[request_id].token_ids == token_ids, request_id
        return verdict


@pytest.fixture
def stage(
    make_rig: Callable[..., Rig], smollm2_path: Path, undisturbed: dict[str, list[int]]
) -> Stage:
    rig = make_rig(kind="model")
    rig.patience_s = 240.0  # each worker loads a model, one after the other if need be
    return Stage(rig, smollm2_path, undisturbed)


def test_real_kill9(stage: Stage) -> None:
    doomed, _ = stage.start("doomed", "survivor")
    stage.read()
    stage.rig.until_streaming(streams=8, tokens=4)
    held = stage.rig.held_by(doomed)

    stage.rig.fault(lambda: stage.rig.kill(doomed))

    assert stage.finish().requeued >= len(held) > 0


def test_real_zombie2(stage: Stage) -> None:
    (zombie,) = stage.start("zombie")
    stage.read()
    stage.rig.until_streaming(streams=8, tokens=4)
    stage.rig.fault(lambda: zombie.process.send_signal(signal.SIGSTOP))
    stage.start("successor")
    stage.rig.until(lambda: taken_over(stage.rig, WANTED) >= 1)

    zombie.process.send_signal(signal.SIGCONT)

    stage.rig.until(lambda: "request dropped" in zombie.log)
    assert stage.finish().requeued >= 1


def test_real_redis_aof(stage: Stage) -> None:
    stage.start("first", "second")
    stage.read()
    stage.rig.until_streaming(streams=8, tokens=4)

    stage.rig.fault(outage(stage.rig, 1.0))

    assert stage.finish().requeued == 0


def test_real_cutreply(stage: Stage) -> None:
    link = stage.rig.proxy()
    stage.start("first", "second", redis_url=link.url)
    stage.read(link.url)
    stage.rig.until_streaming(streams=8, tokens=2)

    link.cut_share = 0.05
    time.sleep(3.0)
    link.cut_share = 0.0

    stage.rig.row.faults = link.num_cuts
    stage.finish()
    assert link.num_cuts > 0


def test_real_poison(stage: Stage) -> None:
    guilty = Request("guilty", "poison for all", TOKENS)
    workers = stage.start("first", "second")
    with Supervisor(stage.rig, workers, partial(stage.worker)) as supervisor:
        stage.read(more=(guilty,))
        stage.rig.until_all_ended()
    stage.rig.row.faults = supervisor.num_deaths

    stage.finish(statuses={"done": len(WANTED), "dead": 1})

    (letter,) = stage.rig.redis.xrange(stage.rig.pool.keys.dead_letters)
    assert letter[1]["id"] == guilty.id

"""An engine that computes nothing, and a worker process around it: `URL SLOTS READY_FILE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tokenmill_engine.outputs import EngineStats, RequestOutput
from tokenmill_engine.request import FinishReason
from tokenmill_engine.sampling_params import SamplingParams

TOKEN_ID = 15234
TOKEN_TEXT = " hello"
STEP_S = 0.02


def output_of(
    request_id: str, number: int, finish_reason: FinishReason | None = None
) -> RequestOutput:
    """The `number`-th token of a request."""
    return RequestOutput(
        request_id=request_id,
        new_token_ids=(TOKEN_ID,),
        text=TOKEN_TEXT,
        num_prompt_tokens=1,
        num_output_tokens=number,
        finish_reason=finish_reason,
    )


class _Tokenizer:
    def encode(self, text: str) -> list[int]:
        return [1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return TOKEN_TEXT * len(token_ids)

    def render_chat(self, messages: object, **options: object) -> list[int]:
        return [1]


class _Defaults:
    def apply(self, explicit: Mapping[str, object]) -> SamplingParams:
        return SamplingParams(**explicit)  # type: ignore[arg-type]  # validated by the worker


class NoEngine:
    """Gives every request the same token in every step, and sleeps for the rest of it."""

    def __init__(self, step_s: float = 0.0) -> None:
        self._step_s = step_s
        self.tokenizer = _Tokenizer()
        self.defaults = _Defaults()
        self.max_model_len = 16_384
        self.model_name = "none"
        self._missing: dict[str, int] = {}  # tokens still to come
        self._made: dict[str, int] = {}
        self._steps = 0
        self._tokens = 0

    @property
    def has_unfinished_requests(self) -> bool:
        return bool(self._missing)

    def add_request(
        self, request_id: str, prompt: object, params: SamplingParams, **options: object
    ) -> None:
        self._missing[request_id] = params.max_tokens
        self._made[request_id] = 0

    def abort_request(self, request_id: str) -> None:
        self._missing.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        if self._step_s:
            time.sleep(self._step_s)
        outputs = []
        for request_id, missing in list(self._missing.items()):
            self._made[request_id] = number = self._made[request_id] + 1
            self._missing[request_id] = missing - 1
            finish = FinishReason.LENGTH if missing == 1 else None
            if finish:
                del self._missing[request_id], self._made[request_id]
            outputs.append(output_of(request_id, number, finish))
        self._steps += 1
        self._tokens += len(outputs)
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._missing),
            num_blocks=100_000,
            num_free_blocks=100_000,
            num_batched_tokens=len(self._missing),
            steps_total=self._steps,
            generation_tokens_total=self._tokens,
        )


def engine_us(batch: int, steps: int = 500) -> float:
    """What this engine itself takes for a token."""
    engine = NoEngine()
    for number in range(batch):
        engine.add_request(f"request-{number}", (), SamplingParams(max_tokens=steps + 1))
    began_s = time.thread_time()
    for _ in range(steps):
        engine.step()
        engine.stats()
    return (time.thread_time() - began_s) / (batch * steps) * 1e6


def serve(url: str, slots: int, ready: Path, make_engine: Callable[[], NoEngine]) -> None:
    """Be a worker with that engine until a signal comes; `ready` appears when it is built."""
    from tokenmill_worker.main import leave, run_worker
    from tokenmill_worker.settings import load_settings

    settings = load_settings(
        {"redis_url": url, "max_num_seqs": slots, "log_level": "error", "model": "none"}
    )

    def build(on_phase: object) -> NoEngine:
        ready.touch()
        return make_engine()

    leave(run_worker(settings, build))  # type: ignore[arg-type]  # less typed than an Engine


def main() -> None:
    url, slots, ready = sys.argv[1:]
    serve(url, int(slots), Path(ready), lambda: NoEngine(STEP_S))


if __name__ == "__main__":
    main()

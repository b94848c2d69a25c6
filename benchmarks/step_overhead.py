"""What the engine's own Python costs in a step: everything but the model's forward.

The real engine with the real tokenizer decodes `--batches` requests at once; only the forward is
made up: its logits lie ready, one row for each request. Milliseconds of CPU time of the engine
thread per step (the 20th percentile over the steps, so that neighbours count little):

    schedule   planning the step: rows, blocks
    inputs     the tensors of the forward
    sample     choosing the tokens, the search through the logits included
    book       entering the tokens: stop conditions, prefix blocks
    text       outputs; with their text where stop strings wait for it
    hand_over  statistics, and handing the outputs to the event loop
    step       all of these together
    read       the rest of the text, on another thread while the next step is computed

The greedy search for the maximum reads every logit once: 12.6 MB for 64 requests of a vocabulary of
49,152. `--vocab` makes it smaller, to see the rest alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from tokenmill_engine.config import Kernels, SchedulerConfig
from tokenmill_engine.generation_defaults import GenerationDefaults
from tokenmill_engine.kernel_choice import choose_sampling
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.outputs import ModelRunnerOutput, SchedulerOutput
from tokenmill_engine.paged_attention_reference import TorchPagedAttention
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_inputs import build_step_inputs
from tokenmill_engine.tokenizer import Tokenizer
from tokenmill_worker.engine_thread import Stepped

from . import environments, machine
from .contestant import MODEL_VARIABLE

BATCHES = (64, 256)
BLOCK_SIZE = 32
PROMPT_TOKENS = 200
WARM_UP_STEPS = 5
PHASES = ("schedule", "inputs", "sample", "book", "text", "hand_over", "step", "read")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "stop": {"temperature": 0.0, "stop": ("\n\nUser:", "</answer>")},
}
#: Tokens of running text, so that the detokenizer has words and line feeds to deal with.
TEXT = (
    "The mill by the river was old. Its wheel turned slowly, day and night; the miller's daughter "
    "counted sacks of flour, and nobody asked what the water thought of it.\n\n"
)


class _Clock:
    """Adds up the time of wrapped calls, per step."""

    def __init__(self) -> None:
        self.spent_s = dict.fromkeys(PHASES, 0.0)

    def timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            result = function(*args, **kwargs)
            self.spent_s[phase] = self.spent_s.get(phase, 0.0) + time.thread_time() - began_s
            return result

        return call


class _Runner:
    """Builds the inputs of a forward, and has its logits already."""

    def __init__(self, logits: torch.Tensor, clock: _Clock) -> None:
        self._logits = logits
        self._build = clock.timed("inputs", build_step_inputs)
        self._clock = clock

    def execute(self, plan: SchedulerOutput, sampler: Sampler) -> ModelRunnerOutput:
        self._build(plan, block_size=BLOCK_SIZE, device=torch.device("cpu"))
        sampling = plan.sampling
        choose = self._clock.timed("sample", sampler)
        return ModelRunnerOutput(choose(self._logits[: len(sampling)], sampling))


def main() -> None:
    arguments = _parse()
    torch.set_num_threads(arguments.num_threads)
    tokenizer = Tokenizer.load(arguments.model)
    rows = []
    for kind in arguments.kinds:
        for batch in arguments.batches:
            figures = measure(
                tokenizer, kind, batch, arguments.steps, arguments.vocab, arguments.kernels
            )
            rows.append({"kind": kind, "requests": batch, **figures})
            print(_line(rows[-1]) if len(rows) > 1 else f"{_header()}\n{_line(rows[-1])}")
    if arguments.output:
        record = {"machine": machine.describe(environments.REPOSITORY), "rows": rows}
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="ms of the engine thread per step, model excluded")
    parser.add_argument(
        "--model", default=os.environ.get(MODEL_VARIABLE), help=f"or {MODEL_VARIABLE}: a folder"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--num-threads", type=int, default=1)
    parser.add_argument("--kernels", choices=get_args(Kernels), default="auto")
    parser.add_argument("--output", type=Path, help="JSON")
    arguments = parser.parse_args()
    if not arguments.model:
        parser.error(f"no --model and no {MODEL_VARIABLE}")
    return arguments


def measure(
    tokenizer: Tokenizer, kind: str, batch: int, steps: int, vocab: int, kernels: Kernels = "auto"
) -> dict[str, float]:
    """Milliseconds per phase."""
    clock = _Clock()
    engine = _engine(tokenizer, batch, steps, vocab, kernels, clock)
    for number in range(batch):
        prompt = [1 + (number * 7 + index) % (vocab - 1) for index in range(PROMPT_TOKENS)]
        engine.add_request(
            f"request-{number}", prompt, SamplingParams(max_tokens=steps + 50, **KINDS[kind])
        )
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    per_step = []
    for _ in range(steps + WARM_UP_STEPS):
        clock.spent_s = dict.fromkeys(PHASES, 0.0)
        began_s = time.thread_time()
        outputs = engine.step()
        handed_s = time.thread_time()
        loop.call_soon_threadsafe(_take, Stepped(outputs, engine.stats()))
        ended_s = time.thread_time()
        clock.spent_s["text"] = clock.spent_s.pop("report") - clock.spent_s["book"]
        clock.spent_s["hand_over"] = ended_s - handed_s
        clock.spent_s["step"] = ended_s - began_s
        for output in outputs:
            output.read()
        clock.spent_s["read"] = time.thread_time() - ended_s
        per_step.append(clock.spent_s)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    counted = per_step[WARM_UP_STEPS:]
    return {
        phase: sorted(step[phase] for step in counted)[len(counted) // 5] * 1000 for phase in PHASES
    }


def _take(_event: Stepped) -> None:
    """The event loop's side is measured by `hot_path`."""


def _engine(
    tokenizer: Tokenizer, batch: int, steps: int, vocab: int, kernels: Kernels, clock: _Clock
) -> LLMEngine:
    max_model_len = PROMPT_TOKENS + steps + 100
    kv = KVCacheManager(batch * (max_model_len // BLOCK_SIZE + 2), BLOCK_SIZE)
    config = SchedulerConfig(
        max_num_seqs=batch,
        max_num_batched_tokens=batch * PROMPT_TOKENS,
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(config, kv)
    choose = choose_sampling(kernels, torch.device("cpu"), TorchPagedAttention(), vocab_size=vocab)
    sampler = Sampler(
        rules=GenerationDefaults().rules, encode_bad_words=tokenizer.bad_word_ids, choose=choose
    )
    engine = LLMEngine(
        _Runner(_logits(tokenizer, batch, vocab), clock),  # type: ignore[arg-type]  # a stand-in
        sampler,
        scheduler,
        tokenizer=tokenizer,
        defaults=GenerationDefaults(),
        vocab_size=vocab,
        text_later=True,  # as in a worker
    )
    scheduler.schedule = clock.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.update_from_output = clock.timed(  # type: ignore[method-assign]
        "book", scheduler.update_from_output
    )
    engine._book = clock.timed("report", engine._book)  # type: ignore[method-assign]
    return engine


def _logits(tokenizer: Tokenizer, batch: int, vocab: int) -> torch.Tensor:
    """[batch, vocab] float32, each row with the peak at another token of a text."""
    token_ids = [token_id for token_id in tokenizer.encode(TEXT) if token_id < vocab]
    logits = torch.randn(batch, vocab, generator=torch.Generator().manual_seed(0))
    for row in range(batch):
        logits[row, token_ids[row % len(token_ids)]] = 20.0
    return logits


def _header() -> str:
    return f"{'ms per step':<10}{'requests':>9}" + "".join(f"{name:>11}" for name in PHASES)


def _line(row: dict[str, Any]) -> str:
    return f"{row['kind']:<10}{row['requests']:>9}" + "".join(
        f"{row[name]:11.3f}" for name in PHASES
    )


if __name__ == "__main__":
    main()

"""How evenly running streams get their tokens while long prompts arrive, with `itl_target_ms` and
without.

Two engines over the same model in this process take turns. In each run some streams decode, and a
long prompt arrives every few seconds; counted are the gaps between two tokens of a running stream,
from the first arrival until the last long prompt has its first token.

    itl_p50_ms, itl_p99_ms, itl_max_ms   gaps of the running streams
    long_ttft_p50_s                      what the long prompts pay: from arrival to first token
    stream_tok_s                         tokens per second of all running streams together
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenmill_engine.config import EngineConfig
from tokenmill_engine.llm_engine import LLMEngine
from tokenmill_engine.sampling_params import SamplingParams

from . import environments, machine
from .contestant import add_model_arguments, leave_on_sigterm, options_from, progress
from .measure import Figures, percentile
from .workload import uniform

RESULTS = environments.REPOSITORY / "benchmarks" / "results"
#: The cache of one engine; two are loaded.
KV_CACHE_BYTES = 2 * 2**30
MAX_MODEL_LEN = 4096
STREAM_PROMPT_TOKENS = 64
#: Streams are ended when the run is over, not by their length.
STREAM_MAX_TOKENS = MAX_MODEL_LEN - STREAM_PROMPT_TOKENS


@dataclass(frozen=True, slots=True)
class Load:
    """What runs and what arrives."""

    streams: int
    long_prompts: int
    long_tokens: int
    interval_s: float


def main() -> None:
    arguments = _parse()
    leave_on_sigterm()
    options = options_from(arguments)
    load = Load(
        arguments.streams, arguments.long_prompts, arguments.long_tokens, arguments.interval_s
    )
    engines = {}
    for name, target_ms in (("without", None), ("with", arguments.target_ms)):
        progress(f"loading the engine {name} a target")
        engines[name] = LLMEngine.load(
            EngineConfig(
                model=options.model,
                dtype=options.dtype,  # type: ignore[arg-type]  # the engine checks it
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=options.max_num_seqs,
                kv_cache_memory_bytes=KV_CACHE_BYTES,
                enable_prefix_caching=False,  # every run sends the same prompts
                itl_target_ms=target_ms,
            )
        )
        Run(engines[name], replace(load, long_prompts=2)).measure()  # warm; the pacer learns
    rounds = []
    for turn in range(1, arguments.rounds + 1):
        rounds.append({name: Run(engine, load).measure() for name, engine in engines.items()})
        for name, figures in rounds[-1].items():
            shown = ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items())
            progress(f"round {turn} {name}: {shown}")
    print(_table(rounds, arguments.target_ms))
    record = {
        "machine": machine.describe(environments.REPOSITORY),
        "model": Path(options.model).name,
        "dtype": options.dtype,
        "target_ms": arguments.target_ms,
        "streams": load.streams,
        "long_tokens": load.long_tokens,
        "interval_s": load.interval_s,
        "rounds": rounds,
    }
    path = arguments.output or RESULTS / "itl.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Gaps of running streams while prompts arrive")
    add_model_arguments(parser)
    parser.add_argument("--target-ms", type=float, default=300.0)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--long-prompts", type=int, default=4)
    parser.add_argument("--long-tokens", type=int, default=2000)
    parser.add_argument("--interval-s", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON; default: benchmarks/results/itl.json")
    return parser.parse_args()


@dataclass(slots=True)
class Run:
    """One engine under one load. `measure` leaves it empty again."""

    engine: LLMEngine
    load: Load
    last_token_s: dict[str, float] = field(default_factory=dict)  # of the running streams
    gaps_s: list[float] = field(default_factory=list)
    arrived_s: dict[str, float] = field(default_factory=dict)  # of long prompts
    ttft_s: list[float] = field(default_factory=list)

    def measure(self) -> Figures:
        streams = [f"stream-{number}" for number in range(self.load.streams)]
        prompts = uniform(self.load.streams, STREAM_PROMPT_TOKENS, STREAM_MAX_TOKENS)
        for name, request in zip(streams, prompts, strict=True):
            self.engine.add_request(
                name, request.prompt_token_ids, _greedy(max_tokens=request.max_tokens)
            )
        while len(self.last_token_s) < len(streams):
            self._step()
        self.gaps_s.clear()
        began_s = time.perf_counter()
        long = uniform(self.load.long_prompts, self.load.long_tokens, 1)
        while len(self.ttft_s) < len(long):
            due = 1 + int((time.perf_counter() - began_s) / self.load.interval_s)
            for number in range(len(self.arrived_s), min(due, len(long))):
                self.arrived_s[f"long-{number}"] = time.perf_counter()
                prompt = long[number].prompt_token_ids
                self.engine.add_request(f"long-{number}", prompt, _greedy(max_tokens=1))
            self._step()
        duration_s = time.perf_counter() - began_s
        for name in streams:
            self.engine.abort_request(name)
        return {
            "itl_p50_ms": percentile(self.gaps_s, 50) * 1e3,
            "itl_p99_ms": percentile(self.gaps_s, 99) * 1e3,
            "itl_max_ms": max(self.gaps_s) * 1e3,
            "long_ttft_p50_s": percentile(self.ttft_s, 50),
            "stream_tok_s": len(self.gaps_s) / duration_s,
        }

    def _step(self) -> None:
        outputs = self.engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            name = output.request_id
            if name in self.arrived_s:
                self.ttft_s.append(now_s - self.arrived_s[name])
            elif output.new_token_ids:
                if name in self.last_token_s:
                    self.gaps_s.append(now_s - self.last_token_s[name])
                self.last_token_s[name] = now_s


def _greedy(*, max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def _table(rounds: Sequence[Mapping[str, Figures]], target_ms: float) -> str:
    """Medians, and the ratio with ÷ without, taken within a round."""
    with_target = f"{target_ms:g} ms"
    lines = [f"{'':16} {'without':>10} {with_target:>10} {'ratio':>8}"]
    for figure in rounds[0]["with"]:
        without = statistics.median(each["without"][figure] for each in rounds)
        held = statistics.median(each["with"][figure] for each in rounds)
        ratio = statistics.median(each["with"][figure] / each["without"][figure] for each in rounds)
        lines.append(f"{figure:16} {without:>10.4g} {held:>10.4g} {ratio:>8.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

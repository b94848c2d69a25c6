"""What is measured, the same way for every contestant. Standard library only."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from .workload import (
    Request,
    mixed,
    renamed,
    total_output_tokens,
    total_prompt_tokens,
    uniform,
    with_shared_prefix,
)

Figures = dict[str, float]
Job = Callable[[], Figures]
#: Computes the requests to their full length in one batch and returns the output tokens of each.
Generate = Callable[[Sequence[Request]], Sequence[int]]
#: The same step by step: after each step that gave tokens, how many requests got one.
Steps = Callable[[Sequence[Request]], Iterable[int]]

#: Chunked prefill hands some requests their first tokens early: on average 210 tokens of context
#: while all 64 decode.
DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS = 192, 40
PREFILL_PROMPT_TOKENS = 200
SINGLE_OUTPUT_TOKENS = 65
SHARED_PREFIX_TOKENS = 400


class WrongLength(RuntimeError):
    """A contestant did not produce the tokens that were asked for, so its time means nothing."""


def offline_jobs(generate: Generate, steps: Steps) -> dict[str, Job]:
    """The jobs of an engine in the same process. Every run has token ids of its own, so engines
    may keep a prefix cache, as they do by default, and find nothing in it but `prefix64`'s."""
    return {
        "mixed64": throughput_job(generate),
        "decode64": _counted(lambda run: _decode(steps, run)),
        "prefill": _counted(lambda run: _prefill(generate, run)),
        "single": _counted(lambda run: _single(steps, run)),
        "prefix64": _counted(lambda run: _throughput(generate, _prefixed(run))),
    }


def throughput_job(generate: Generate) -> Job:
    """`mixed64` alone."""
    return _counted(lambda run: _throughput(generate, renamed(mixed(64), run)))


def _counted(measure: Callable[[int], Figures]) -> Job:
    """A job that hands its runs the numbers 1, 2, 3 …"""
    runs = itertools.count(1)
    return lambda: measure(next(runs))


def _throughput(generate: Generate, requests: Sequence[Request]) -> Figures:
    duration_s = _timed(generate, requests)
    return {
        "output_tok_s": total_output_tokens(requests) / duration_s,
        "duration_s": duration_s,
    }


def _prefixed(run: int) -> list[Request]:
    """Nobody has seen the shared prompt before the run."""
    return with_shared_prefix(
        64,
        shared_tokens=SHARED_PREFIX_TOKENS,
        own_tokens=(16, 64),
        output_tokens=(32, 96),
        seed=run,
    )


def _prefill(generate: Generate, run: int) -> Figures:
    requests = renamed(uniform(64, PREFILL_PROMPT_TOKENS, 1), 3_000 + run)
    return {"prefill_tok_s": total_prompt_tokens(requests) / _timed(generate, requests)}


def _decode(steps: Steps, run: int) -> Figures:
    """The median step among those in which all 64 requests do nothing but decode."""
    # The jobs' prompts begin alike, so each has its own range of runs.
    requests = renamed(uniform(64, DECODE_PROMPT_TOKENS, DECODE_OUTPUT_TOKENS), 1_000 + run)
    times = _step_times(steps, requests)
    full = [
        after_s - before_s
        for (before_s, before), (after_s, count) in itertools.pairwise(times)
        if before == count == len(requests)
    ]
    if not full:
        raise WrongLength("there was no step in which all requests decoded")
    step_s = statistics.median(full)
    return {
        "decode_step_ms": step_s * 1e3,
        "decode_tok_s": len(requests) / step_s,
        "steps": float(len(full)),
    }


def _single(steps: Steps, run: int) -> Figures:
    """One stream's rate from its first token on."""
    requests = renamed(uniform(1, PREFILL_PROMPT_TOKENS, SINGLE_OUTPUT_TOKENS), 2_000 + run)
    times = _step_times(steps, requests)
    duration_s = times[-1][0] - times[0][0]
    return {
        "single_tok_s": (SINGLE_OUTPUT_TOKENS - 1) / duration_s,
        "single_step_ms": duration_s / (SINGLE_OUTPUT_TOKENS - 1) * 1e3,
    }


def _step_times(steps: Steps, requests: Sequence[Request]) -> list[tuple[float, int]]:
    """When each step ended, and how many requests it gave a token: one each."""
    times = [(time.perf_counter(), count) for count in steps(requests)]
    check_lengths([Request([], total_output_tokens(requests))], [sum(n for _, n in times)])
    return times


def _timed(generate: Generate, requests: Sequence[Request]) -> float:
    start = time.perf_counter()
    lengths = generate(requests)
    duration_s = time.perf_counter() - start
    check_lengths(requests, lengths)
    return duration_s


def check_lengths(requests: Sequence[Request], lengths: Sequence[int]) -> None:
    wanted = [request.max_tokens for request in requests]
    if list(lengths) != wanted:
        raise WrongLength(f"asked for {sum(wanted)} output tokens, got {sum(lengths)}")


@dataclass(slots=True)
class StreamClock:
    """Arrival times of one stream at the client; `sent` is when all the streams were sent.

    A chunk may carry several tokens when the reader lags, so the gap between chunks is what a
    reader sees (`vllm bench serve` calls it ITL) and the mean per token (TPOT) does not flatter
    whoever sends few large chunks.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0

    def arrived(self) -> None:
        self.arrivals.append(time.perf_counter())

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def tpot_s(self) -> float:
        return (self.arrivals[-1] - self.arrivals[0]) / max(1, self.num_tokens - 1)


def stream_figures(
    requests: Sequence[Request], clocks: Sequence[StreamClock], duration_s: float
) -> Figures:
    """Figures over all streams. Raises `WrongLength` where a stream fell short."""
    check_lengths(requests, [clock.num_tokens for clock in clocks])
    ttft_s = [clock.ttft_s for clock in clocks]
    gaps_s = [gap for clock in clocks for gap in clock.gaps_s]
    tpot_s = [clock.tpot_s for clock in clocks]
    output_tokens = total_output_tokens(requests)
    return {
        "output_tok_s": output_tokens / duration_s,
        "duration_s": duration_s,
        "ttft_p50_s": percentile(ttft_s, 50),
        "ttft_p99_s": percentile(ttft_s, 99),
        "itl_p50_ms": percentile(gaps_s, 50) * 1e3,
        "itl_p99_ms": percentile(gaps_s, 99) * 1e3,
        "tpot_p50_ms": percentile(tpot_s, 50) * 1e3,
        "tpot_p99_ms": percentile(tpot_s, 99) * 1e3,
        "tokens_per_chunk": output_tokens / sum(len(clock.arrivals) for clock in clocks),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """The value at `share` percent, linear between neighbours (numpy's default)."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)

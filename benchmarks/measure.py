"""What is measured, the same way for every contestant. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .workload import Request, mixed, total_output_tokens, total_prompt_tokens, uniform

Figures = dict[str, float]
Job = Callable[[], Figures]
#: Computes the requests to their full length in one batch and returns the output tokens of each.
Generate = Callable[[Sequence[Request]], Sequence[int]]

SPLIT_PROMPT_TOKENS = 200
SPLIT_STEPS = 64


class WrongLength(RuntimeError):
    """A contestant did not produce the tokens that were asked for, so its time means nothing."""


def offline_jobs(generate: Generate) -> dict[str, Job]:
    """The jobs of an engine in the same process: throughput, the split, and one stream alone."""
    return {
        "mixed64": lambda: _throughput(generate, mixed(64)),
        "split64": lambda: _split(generate, 64),
        "single": lambda: _single(generate),
    }


def _throughput(generate: Generate, requests: Sequence[Request]) -> Figures:
    duration_s = _timed(generate, requests)
    return {
        "output_tok_s": total_output_tokens(requests) / duration_s,
        "duration_s": duration_s,
    }


def _split(generate: Generate, batch: int) -> Figures:
    """Prefill from requests of one output token; a decode step from what 64 more tokens cost."""
    prefill = uniform(batch, SPLIT_PROMPT_TOKENS, 1)
    prefill_s = _timed(generate, prefill)
    whole_s = _timed(generate, uniform(batch, SPLIT_PROMPT_TOKENS, 1 + SPLIT_STEPS))
    step_s = (whole_s - prefill_s) / SPLIT_STEPS
    return {
        "prefill_tok_s": total_prompt_tokens(prefill) / prefill_s,
        "decode_step_ms": step_s * 1e3,
        "decode_tok_s": batch / step_s,
    }


def _single(generate: Generate) -> Figures:
    return {"single_stream_step_ms": _split(generate, 1)["decode_step_ms"]}


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

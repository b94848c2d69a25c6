"""Counters of the scheduler; they only grow, and each computed row is counted at most once."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from .outputs import EngineStats, ScheduledRequest, SchedulerOutput
from .request import Request


@dataclass(slots=True)
class SchedulerStats:
    """Named as in `EngineStats`, which is a snapshot of these."""

    num_batched_tokens: int = 0  # rows of the last step
    steps_total: int = 0
    prompt_tokens_total: int = 0  # computed for the first time, without prefix cache hits
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0  # computed before, then lost to preemption or the RoPE switch
    prefix_cache_queries_total: int = 0  # in tokens; a request asks once, at its first admission
    prefix_cache_hits_total: int = 0
    oom_retries_total: int = 0
    isolated_failures_total: int = 0

    def book_prefix_query(self, request: Request, num_cached_tokens: int) -> None:
        self.prefix_cache_queries_total += request.num_tokens
        self.prefix_cache_hits_total += num_cached_tokens

    def book_step(self, output: SchedulerOutput) -> None:
        self.steps_total += 1
        self.num_batched_tokens = output.num_batched_tokens

    def book_computed(self, item: ScheduledRequest) -> None:
        """Sorts the rows of an item that ran into recomputed ones and new prompt tokens."""
        request, start, end = item.request, item.start, item.end
        if start < request.prefill_end:
            request.num_prefill_chunks += 1
        peak, num_prompt = request.peak_computed_tokens, request.num_prompt_tokens
        if start < peak:
            self.recomputed_tokens_total += min(end, peak) - start
        if start < num_prompt:
            self.prompt_tokens_total += max(0, min(end, num_prompt) - max(start, peak))
        if end > peak:
            request.peak_computed_tokens = end

    def snapshot(self, present: EngineStats) -> EngineStats:
        """`present`, which says how things stand, with these counters."""
        return replace(present, **{name: getattr(self, name) for name in _COUNTERS})


#: `dataclasses.asdict` copies deeply, which is slow for what happens at every step.
_COUNTERS = tuple(item.name for item in fields(SchedulerStats))

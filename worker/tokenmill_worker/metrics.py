"""What a worker measures. `vllm:*` has vLLM's names, labels and buckets: its dashboards work.

Every series exists from the start with the value 0: a rate over a series that appears with its
first event misses that event.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from tokenmill_engine.outputs import EngineStats

from .counting_histogram import CountingHistogram
from .metric_buckets import (
    CALL_BUCKETS,
    CHOICE_BUCKETS,
    ITERATION_BUCKETS,
    PHASE_BUCKETS,
    PREEMPTION_BUCKETS,
    TOKEN_LATENCY_BUCKETS,
    TTFT_BUCKETS,
    one_two_five,
)

LABELS = ("model_name", "engine")
FINISHED_REASONS = ("stop", "length", "abort", "error")
PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
CACHE_SOURCES = ("device", "host", "p2p", "disk", "external_unspecified")
WAITING_REASONS = ("capacity", "deferred")
LEASE_LOSSES = ("taken", "deadline")
RETRIED_CALLS = (
    "fetch", "admit", "lease", "log", "append", "finish", "release", "give_back", "heartbeat",
    "tick",
)  # fmt: skip
TICK_COUNTS = ("promoted", "expired", "redelivered", "requeued", "dead", "recovered")


class Metrics:
    """The metrics of one worker, in a registry of their own.

    Counters that the engine keeps itself (`*_total` of `EngineStats`) are advanced by their
    difference at every step.
    """

    def __init__(self, model_name: str, max_model_len: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last = EngineStats()
        self._make_gauges()
        self._make_counters()
        self._make_durations()
        self._make_sizes(one_two_five(max_model_len))
        self._make_own()

    def render(self) -> tuple[bytes, str]:
        """The exposition and its content type.

        Always text 0.0.4: in OpenMetrics the client library turns `vllm:x` into `vllm_x` for every
        scraper before Prometheus 3.
        """
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def on_step(self, stats: EngineStats) -> None:
        self.num_requests_running.set(stats.num_running)
        self.num_requests_waiting.set(stats.num_waiting)
        self.waiting_by_reason["capacity"].set(stats.num_waiting)
        self.kv_cache_usage.set(stats.kv_cache_usage)
        if stats.steps_total > self._last.steps_total:
            self.iteration_tokens.observe(stats.num_batched_tokens)
        for name, counters in self._engine_counters.items():
            growth = getattr(stats, name) - getattr(self._last, name)
            if growth > 0:
                for counter in counters:
                    counter.inc(growth)
        self._last = stats

    def configured(self, facts: Mapping[str, object]) -> None:
        """How the KV cache is set up, as vLLM's gauge of that name tells it: in labels."""
        labels = {name: str(value) for name, value in facts.items()}
        family = Gauge(
            "vllm:cache_config_info", "How the KV cache is set up.", (*LABELS, *labels),
            registry=self.registry,
        )  # fmt: skip
        family.labels(**self._labels, **labels).set(1)

    def started(self, phases_s: Mapping[str, float], total_s: float) -> None:
        """The worker is ready: how long each phase of its start took, and all since its process
        began."""
        for phase, seconds in (*phases_s.items(), ("total", total_s)):
            self._startup.labels(**self._labels, phase=phase).set(seconds)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, LABELS, registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, LABELS, registry=self.registry).labels(**self._labels)

    def _counters(
        self, name: str, text: str, label: str, values: Sequence[str]
    ) -> dict[str, Counter]:
        family = Counter(name, text, (*LABELS, label), registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _gauges(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Gauge]:
        family = Gauge(name, text, (*LABELS, label), registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        family = Histogram(name, text, LABELS, registry=self.registry, buckets=tuple(buckets))
        return family.labels(**self._labels)

    def _make_gauges(self) -> None:
        self.num_requests_running = self._gauge(
            "vllm:num_requests_running", "Requests in the running batch."
        )
        self.num_requests_waiting = self._gauge(
            "vllm:num_requests_waiting", "Requests that wait inside the engine."
        )
        self.waiting_by_reason = self._gauges(
            "vllm:num_requests_waiting_by_reason",
            "The same by what they wait for; deferred is always 0.",
            "reason",
            WAITING_REASONS,
        )
        self.kv_cache_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV cache blocks in use, 0 to 1."
        )

    def _make_counters(self) -> None:
        make = self._counter
        prompts = make("vllm:prompt_tokens", "Prompt tokens, computed or found in the cache.")
        by_source = self._counters(
            "vllm:prompt_tokens_by_source", "The same by where they came from.", "source",
            PROMPT_SOURCES,
        )  # fmt: skip
        cached_by_source = self._counters(
            "vllm:prompt_tokens_cached_by_source", "Cached prompt tokens by tier.", "source",
            CACHE_SOURCES,
        )  # fmt: skip
        #: Field of `EngineStats` → what grows with it.
        self._engine_counters: dict[str, tuple[Counter, ...]] = {
            "preemptions_total": (make("vllm:num_preemptions", "Preempted requests."),),
            "prompt_tokens_total": (prompts, by_source["local_compute"]),
            "generation_tokens_total": (make("vllm:generation_tokens", "Generated tokens."),),
            "prefix_cache_queries_total": (
                make("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
            ),
            "prefix_cache_hits_total": (
                make("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
                make("vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache."),
                prompts,
                by_source["local_cache_hit"],
                cached_by_source["device"],
            ),
            "recomputed_tokens_total": (
                make("tokenmill_recomputed_tokens", "Tokens computed again after a preemption."),
            ),
            "steps_total": (make("tokenmill_engine_steps", "Steps of the engine."),),
            "oom_retries_total": (
                make("tokenmill_oom_retries", "Steps done again, smaller: memory ran out."),
            ),
            "isolated_failures_total": (
                make("tokenmill_isolated_failures", "Requests that failed a step even alone."),
            ),
        }
        self.request_success = self._counters(
            "vllm:request_success", "Ended requests.", "finished_reason", FINISHED_REASONS
        )

    def _make_durations(self) -> None:
        make = self._histogram
        self.time_to_first_token = make(
            "vllm:time_to_first_token_seconds", "From enqueue to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = CountingHistogram(
            "vllm:inter_token_latency_seconds",
            "Between two tokens.",
            TOKEN_LATENCY_BUCKETS,
            labels=self._labels,
        )
        self.registry.register(self.inter_token_latency)
        self.time_per_output_token = make(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between two tokens of a request.",
            TOKEN_LATENCY_BUCKETS,
        )
        self.e2e_latency = make(
            "vllm:e2e_request_latency_seconds", "From enqueue to the end.", PHASE_BUCKETS
        )
        self.queue_time = make(
            "vllm:request_queue_time_seconds", "From enqueue to the lease.", PHASE_BUCKETS
        )
        self.inference_time = make(
            "vllm:request_inference_time_seconds", "From the lease to the end.", PHASE_BUCKETS
        )
        self.prefill_time = make(
            "vllm:request_prefill_time_seconds", "From the lease to the first token.", PHASE_BUCKETS
        )
        self.decode_time = make(
            "vllm:request_decode_time_seconds", "From the first token to the end.", PHASE_BUCKETS
        )

    def _make_sizes(self, tokens: Sequence[int]) -> None:
        make = self._histogram
        self.prompt_tokens = make("vllm:request_prompt_tokens", "Tokens of the prompt.", tokens)
        self.generation_tokens = make(
            "vllm:request_generation_tokens", "Tokens of the answer.", tokens
        )
        self.max_generation_tokens = make(
            "vllm:request_max_num_generation_tokens", "The longest answer of a request.", tokens
        )
        self.max_tokens = make("vllm:request_params_max_tokens", "max_tokens asked for.", tokens)
        self.choices = make("vllm:request_params_n", "Answers asked for; always 1.", CHOICE_BUCKETS)
        self.prefill_computed_tokens = make(
            "vllm:request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache.",
            tokens,
        )
        self.num_preemptions = make(
            "vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTION_BUCKETS
        )
        self.iteration_tokens = make(
            "vllm:iteration_tokens_total", "Tokens computed in one step.", ITERATION_BUCKETS
        )

    def _make_own(self) -> None:
        self._startup = Gauge(
            "tokenmill_startup_seconds",
            "Phases of the start of this worker; total runs from the process to ready.",
            (*LABELS, "phase"),
            registry=self.registry,
        )
        self.leases = self._counter("tokenmill_leases", "Leases taken.")
        self.leases_resumed = self._counter(
            "tokenmill_leases_resumed", "Leases of requests that another attempt had begun."
        )
        self.leases_suspected = self._counter(
            "tokenmill_leases_suspected", "Leases of requests that workers were lost on: strikes."
        )
        self.wasted_tokens = self._counter(
            "tokenmill_wasted_tokens", "Generated tokens that no client got: their lease was gone."
        )
        self.leases_lost = self._counters(
            "tokenmill_leases_lost",
            "Requests dropped unfinished: cancelled or taken over, or past their deadline.",
            "reason",
            LEASE_LOSSES,
        )
        self.released = self._counter("tokenmill_requests_released", "Requests given back.")
        self.entries_dropped = self._counter(
            "tokenmill_entries_dropped", "Ready entries that led to no lease."
        )
        self.log_repairs = self._counter(
            "tokenmill_log_repairs", "Times that Redis had lost events, which were sent again."
        )
        self.events_repeated = self._counter(
            "tokenmill_events_repeated", "Events that were stored already when they were sent."
        )
        self.maintenance = self._counters(
            "tokenmill_maintenance", "What this worker's maintenance did.", "action", TICK_COUNTS
        )
        self.call_retries = self._counters(
            "tokenmill_redis_retries",
            "Failed Redis calls that are tried again.",
            "call",
            RETRIED_CALLS,
        )
        self.append_seconds = self._histogram(
            "tokenmill_append_seconds", "Round trip of a write of events.", CALL_BUCKETS
        )

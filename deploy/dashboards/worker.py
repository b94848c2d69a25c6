"""One worker, or a few side by side: where a request's time goes, and what the engine does."""

from __future__ import annotations

from .panels import (
    Json,
    dashboard,
    graph,
    heatmap,
    quantile,
    quantiles,
    rate,
    stat,
    target,
    variable,
)

ONE = 'pool=~"$pool",instance=~"$worker"'
PHASES = (
    ("vllm:request_queue_time_seconds", "queue"),
    ("vllm:request_prefill_time_seconds", "prefill"),
    ("vllm:request_decode_time_seconds", "decode"),
)


def worker() -> Json:
    return dashboard(
        "tokenmill-worker",
        "Tokenmill: worker",
        about="Where a request's time goes in one worker, and what its engine does.",
        variables=[
            variable("pool", "Pool", "label_values(vllm:num_requests_running, pool)"),
            variable(
                "worker",
                "Worker",
                'label_values(vllm:num_requests_running{pool=~"$pool"}, instance)',
            ),
        ],
        rows=[
            ("Now", _numbers()),
            ("Where the time goes", _phases()),
            ("Engine", _engine()),
            ("Requests", _requests()),
            ("Queue side", _queue_side()),
        ],
    )


def _numbers() -> list[Json]:
    return [
        stat("Running", f"sum(vllm:num_requests_running{{{ONE}}})"),
        stat("Waiting inside", f"sum(vllm:num_requests_waiting{{{ONE}}})"),
        stat(
            "KV cache",
            f"avg(vllm:kv_cache_usage_perc{{{ONE}}})",
            unit="percentunit",
            alarm_from=0.95,
        ),
        stat("Tokens per second", rate("vllm:generation_tokens_total", ONE)),
        stat("Steps per second", rate("tokenmill_engine_steps_total", ONE)),
    ]


def _phases() -> list[Json]:
    return [
        graph(
            "Mean seconds of a request in each phase",
            [
                target(f"{rate(f'{name}_sum', ONE)} / ({rate(f'{name}_count', ONE)} > 0)", phase)
                for name, phase in PHASES
            ],
            unit="s",
            stacked=True,
        ),
        graph(
            "p99 of each phase",
            [target(quantile(0.99, name, "", ONE), phase) for name, phase in PHASES],
            unit="s",
        ),
        graph("Between two tokens", quantiles("vllm:inter_token_latency_seconds", ONE), unit="s"),
    ]


def _engine() -> list[Json]:
    return [
        graph(
            "Batch",
            [
                target(f"vllm:num_requests_running{{{ONE}}}", "running {{instance}}"),
                target(f"vllm:num_requests_waiting{{{ONE}}}", "waiting {{instance}}"),
            ],
        ),
        heatmap("Tokens in a step", "vllm:iteration_tokens_total", ONE, unit="short"),
        graph(
            "KV cache in use",
            [target(f"vllm:kv_cache_usage_perc{{{ONE}}}", "{{instance}}")],
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "Preempted, and computed again",
            [
                target(rate("vllm:num_preemptions_total", ONE), "preemptions per second"),
                target(rate("tokenmill_recomputed_tokens_total", ONE), "tokens per second"),
            ],
        ),
    ]


def _requests() -> list[Json]:
    return [
        graph("Tokens of a prompt", quantiles("vllm:request_prompt_tokens", ONE)),
        graph("Tokens of an answer", quantiles("vllm:request_generation_tokens", ONE)),
        graph(
            "Ended per second",
            [target(rate("vllm:request_success_total", ONE, "finished_reason"))],
            unit="reqps",
            stacked=True,
        ),
    ]


def _queue_side() -> list[Json]:
    return [
        graph("Write of tokens to Redis", quantiles("tokenmill_append_seconds", ONE), unit="s"),
        graph(
            "Leases per second",
            [
                target(rate("tokenmill_leases_total", ONE), "taken"),
                target(rate("tokenmill_leases_resumed_total", ONE), "of begun requests"),
                target(rate("tokenmill_leases_lost_total", ONE, "reason"), "lost: {{reason}}"),
                target(rate("tokenmill_requests_released_total", ONE), "given back"),
            ],
        ),
        graph(
            "Redis calls tried again, per second",
            [target(rate("tokenmill_redis_retries_total", ONE, "call"))],
        ),
    ]

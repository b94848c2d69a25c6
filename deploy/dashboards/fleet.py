"""All workers of a pool: is it healthy, is it fast, is it full."""

from __future__ import annotations

from .panels import Json, dashboard, graph, heatmap, quantiles, rate, stat, target, variable

WORKERS = 'pool=~"$pool"'


def fleet() -> Json:
    return dashboard(
        "tokenmill-fleet",
        "Tokenmill: fleet",
        about="All workers of a pool: is it healthy, is it fast, is it full.",
        variables=[variable("pool", "Pool", "label_values(tokenmill_exporter_up, pool)")],
        rows=[
            ("Now", _numbers()),
            ("What users feel", _latencies()),
            ("Throughput", _throughput()),
            ("Load", _load()),
            ("Trouble", _trouble()),
        ],
    )


def _numbers() -> list[Json]:
    return [
        stat("Workers ready", f'sum(tokenmill_queue_workers{{{WORKERS},state="ready"}})'),
        stat("Running", f"sum(vllm:num_requests_running{{{WORKERS}}})"),
        stat("Waiting", f"sum(tokenmill_queue_waiting{{{WORKERS}}})"),
        stat(
            "Oldest waits",
            f"max(tokenmill_queue_oldest_seconds{{{WORKERS}}})",
            unit="s",
            alarm_from=120,
        ),
        stat("Tokens per second", rate("vllm:generation_tokens_total", WORKERS)),
        stat(
            "Failed",
            rate("vllm:request_success_total", f'{WORKERS},finished_reason="error"')
            + " / ("
            + rate("vllm:request_success_total", WORKERS)
            + " > 0)",
            unit="percentunit",
            alarm_from=0.02,
            about="Share of the requests that ended.",
        ),
    ]


def _latencies() -> list[Json]:
    return [
        graph(
            "Time to first token",
            quantiles("vllm:time_to_first_token_seconds", WORKERS),
            unit="s",
            about="From the enqueue, so the wait in the queue is in it.",
        ),
        graph(
            "Between two tokens",
            quantiles("vllm:inter_token_latency_seconds", WORKERS),
            unit="s",
        ),
        graph("Whole request", quantiles("vllm:e2e_request_latency_seconds", WORKERS), unit="s"),
    ]


def _throughput() -> list[Json]:
    return [
        graph(
            "Tokens per second",
            [
                target(rate("vllm:prompt_tokens_total", WORKERS), "prompt, computed"),
                target(rate("vllm:generation_tokens_total", WORKERS), "generated"),
            ],
        ),
        graph(
            "Ended requests per second",
            [target(rate("vllm:request_success_total", WORKERS, "finished_reason"))],
            unit="reqps",
            stacked=True,
        ),
        heatmap("Time to first token", "vllm:time_to_first_token_seconds", WORKERS),
    ]


def _load() -> list[Json]:
    by_worker = "{{instance}}"
    return [
        graph(
            "Running requests by worker",
            [target(f"vllm:num_requests_running{{{WORKERS}}}", by_worker)],
            stacked=True,
        ),
        graph(
            "KV cache in use by worker",
            [target(f"vllm:kv_cache_usage_perc{{{WORKERS}}}", by_worker)],
            unit="percentunit",
            maximum=1,
        ),
        graph(
            "Prompt tokens found in the prefix cache",
            [
                target(
                    rate("vllm:prefix_cache_hits_total", WORKERS)
                    + " / ("
                    + rate("vllm:prefix_cache_queries_total", WORKERS)
                    + " > 0)",
                    "share",
                )
            ],
            unit="percentunit",
            maximum=1,
        ),
    ]


def _trouble() -> list[Json]:
    return [
        graph(
            "Requests served again, per second",
            [target(rate("tokenmill_maintenance_total", f'{WORKERS},action=~"re.*"', "action"))],
            about="Taken from workers that gave no sign of life, or whose entries were lost.",
        ),
        graph(
            "Preemptions per second", [target(rate("vllm:num_preemptions_total", WORKERS), "all")]
        ),
        graph(
            "Redis calls tried again, per second",
            [target(rate("tokenmill_redis_retries_total", WORKERS, "call"))],
        ),
    ]

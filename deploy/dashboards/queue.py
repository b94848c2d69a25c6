"""What stands in the queue: how much, for how long, and what autoscalers are told."""

from __future__ import annotations

from .panels import Json, dashboard, graph, stat, target, variable

POOL = 'pool=~"$pool"'


def queue() -> Json:
    return dashboard(
        "tokenmill-queue",
        "Tokenmill: queue",
        about="What stands in the queue: how much, for how long, and what autoscalers are told.",
        variables=[variable("pool", "Pool", "label_values(tokenmill_exporter_up, pool)")],
        rows=[
            ("Now", _numbers()),
            ("Depth", _depth()),
            ("Work", _work()),
            ("Redis and the exporter", _exporter()),
        ],
    )


def _numbers() -> list[Json]:
    return [
        stat("Waiting", f"sum(tokenmill_queue_waiting{{{POOL}}})"),
        stat("Running", f"sum(tokenmill_queue_running{{{POOL}}})"),
        stat(
            "Oldest waits",
            f"max(tokenmill_queue_oldest_seconds{{{POOL}}})",
            unit="s",
            alarm_from=120,
        ),
        stat("Ended per second", f"sum(tokenmill_queue_ends_per_second{{{POOL}}})"),
        stat(
            "Paused",
            f"max(tokenmill_queue_paused{{{POOL}}})",
            alarm_from=1,
            about="1: an operator has stopped the queue; what waits is no work for the autoscaler.",
        ),
        stat("Dead letters", f"sum(tokenmill_queue_dead_letters{{{POOL}}})", alarm_from=1),
        stat(
            "Refuses requests",
            f"max(tokenmill_queue_memory_pressure{{{POOL}}})",
            alarm_from=1,
            about="1: Redis is short of memory.",
        ),
    ]


def _depth() -> list[Json]:
    return [
        graph(
            "Waiting by class",
            [
                target(
                    f'sum by (class) (tokenmill_queue_requests{{{POOL},state=~"ready|held"}})',
                    "{{class}}",
                )
            ],
            stacked=True,
        ),
        graph(
            "Requests by state",
            [
                target(f"sum(tokenmill_queue_running{{{POOL}}})", "running"),
                target(f'sum(tokenmill_queue_requests{{{POOL},state="ready"}})', "ready"),
                target(f'sum(tokenmill_queue_requests{{{POOL},state="held"}})', "held"),
                target(f"sum(tokenmill_queue_delayed{{{POOL}}})", "delayed"),
            ],
            stacked=True,
            about="held: behind the window of its tenant. delayed: not before its time.",
        ),
        graph(
            "Age of the oldest by class",
            [target(f"max by (class) (tokenmill_queue_oldest_seconds{{{POOL}}})", "{{class}}")],
            unit="s",
        ),
    ]


def _work() -> list[Json]:
    ready = f'sum by (pool) (tokenmill_queue_workers{{{POOL},state="ready"}})'
    return [
        graph(
            "Seconds of work for one worker",
            [
                target(f"max by (pool) (tokenmill_backlog_seconds{{{POOL}}})", "all, {{pool}}"),
                target(
                    f"max by (pool) (tokenmill_backlog_seconds{{{POOL}}}) / clamp_min({ready}, 1)",
                    "each worker, {{pool}}",
                ),
            ],
            unit="s",
            about="The autoscaler's signal: waiting and running requests, by the measured speed.",
        ),
        graph(
            "Tokens to compute",
            [
                target(f"sum by (state) (tokenmill_backlog_tokens{{{POOL}}})", "{{state}}"),
                target(f"sum(tokenmill_backlog_deferred_tokens{{{POOL}}})", "deferred"),
            ],
            stacked=True,
            about="deferred: not due yet, or the queue is paused; it asks for no workers.",
        ),
        graph(
            "Workers",
            [target(f"sum by (state) (tokenmill_queue_workers{{{POOL}}})", "{{state}}")],
            stacked=True,
        ),
        graph(
            "Lag and pending entries",
            [
                target(f"sum(tokenmill_queue_lag{{{POOL}}})", "lag"),
                target(f"sum(tokenmill_queue_pending{{{POOL}}})", "pending"),
            ],
            about="Of the consumer groups, as KEDA's redis-streams scaler sees them.",
        ),
    ]


def _exporter() -> list[Json]:
    return [
        graph(
            "Memory of Redis",
            [
                target(f"max by (pool) (tokenmill_redis_memory_used_bytes{{{POOL}}})", "{{pool}}"),
                target(
                    f"0.85 * max by (pool) (tokenmill_redis_memory_max_bytes{{{POOL}}}) > 0",
                    "refuses requests from here, {{pool}}",
                ),
            ],
            unit="bytes",
            about="Of the fullest server. Without maxmemory it has no limit.",
        ),
        graph(
            "Tokens per second of one worker",
            [target(f"max by (pool) (tokenmill_queue_speed_tokens_per_second{{{POOL}}})")],
            about="Measured with enough to do: it turns tokens into seconds of work.",
        ),
        graph(
            "Time of a look at the queue",
            [target(f"max(tokenmill_exporter_read_seconds{{{POOL}}})", "exporter")],
            unit="s",
        ),
    ]

"""What /metrics shows, and in which form."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tokenmill_engine.outputs import EngineStats
from tokenmill_worker.counting_histogram import CountingHistogram
from tokenmill_worker.metric_buckets import one_two_five
from tokenmill_worker.metrics import Metrics

#: The names that vLLM's own Grafana dashboard asks for.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds", "vllm:prompt_tokens", "vllm:generation_tokens",
    "vllm:inter_token_latency_seconds", "vllm:num_requests_running", "vllm:num_requests_waiting",
    "vllm:time_to_first_token_seconds", "vllm:kv_cache_usage_perc", "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens", "vllm:request_success", "vllm:request_queue_time_seconds",
    "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds",
    "vllm:request_max_num_generation_tokens",
}  # fmt: skip


def samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """(name, value of the label that is not common) → value."""
    text, _ = metrics.render()
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            special = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name, ",".join(special.values())] = sample.value
    return found


def test_the_names_of_vllms_dashboard_exist_with_their_colon() -> None:
    text, content_type = Metrics("small", 2048).render()
    families = {f.name for f in text_string_to_metric_families(text.decode())}

    assert families >= DASHBOARD
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"


def test_every_series_exists_at_zero_with_vllms_labels() -> None:
    metrics = Metrics("small", 2048)
    text, _ = metrics.render()

    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            assert sample.labels["model_name"] == "small"
            assert sample.labels["engine"] == "0"
            assert sample.value == 0
    names = samples(metrics)
    for reason in ("stop", "length", "abort", "error"):
        assert ("vllm:request_success_total", reason) in names
    assert not any(name.endswith("_created") for name, _ in names)


def test_the_start_is_shown_by_its_phases() -> None:
    metrics = Metrics("small", 2048)
    metrics.started({"importing_torch": 1.5, "warming_up": 0.25}, 2.0)

    found = samples(metrics)
    shown = {phase: value for (name, phase), value in found.items() if "startup" in name}
    assert shown == {"importing_torch": 1.5, "warming_up": 0.25, "total": 2.0}


def test_the_engines_totals_are_followed() -> None:
    metrics = Metrics("small", 2048)
    stats = EngineStats(
        num_running=3, num_waiting=2, num_blocks=10, num_free_blocks=4, num_batched_tokens=20,
        steps_total=1, generation_tokens_total=5, prefix_cache_hits_total=32,
    )  # fmt: skip

    metrics.on_step(stats)
    metrics.on_step(stats)  # nothing new
    metrics.on_step(
        replace(
            stats, prompt_tokens_total=8, steps_total=2, generation_tokens_total=8, num_running=0
        )
    )

    values = samples(metrics)
    assert values["vllm:num_requests_running", ""] == 0
    assert values["vllm:num_requests_waiting", ""] == 2
    assert values["vllm:kv_cache_usage_perc", ""] == 0.6
    assert values["vllm:generation_tokens_total", ""] == 8
    assert values["vllm:prefix_cache_hits_total", ""] == 32
    assert values["vllm:prompt_tokens_total", ""] == 40
    assert values["vllm:prompt_tokens_by_source_total", "local_compute"] == 8
    assert values["vllm:prompt_tokens_by_source_total", "local_cache_hit"] == 32
    assert values["vllm:prompt_tokens_cached_by_source_total", "device"] == 32
    assert values["vllm:num_requests_waiting_by_reason", "capacity"] == 2
    assert values["vllm:iteration_tokens_total_count", ""] == 2
    assert values["vllm:iteration_tokens_total_sum", ""] == 40


def test_many_equal_values_count_as_if_they_came_one_by_one() -> None:
    """The oracle is prometheus_client's own histogram."""
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    buckets, labels = (0.25, 0.5, 2), {"model_name": "m", "engine": "0"}
    mine = CountingHistogram("gap_seconds", "A gap.", buckets, labels=labels)
    ours.register(mine)
    one_by_one = Histogram("gap_seconds", "A gap.", labels, registry=theirs, buckets=buckets)
    for value, count in ((0.125, 3), (0.25, 1), (0.375, 64), (2, 2), (7.5, 5)):
        mine.observe(value, count)
        for _ in range(count):
            one_by_one.labels(**labels).observe(value)

    assert generate_latest(ours) == generate_latest(theirs)


def test_two_workers_in_one_process_do_not_share_series() -> None:
    first, second = Metrics("a", 100), Metrics("b", 100)
    first.leases.inc()

    assert samples(second)["tokenmill_leases_total", ""] == 0


def test_token_buckets_end_at_the_models_length() -> None:
    assert one_two_five(200) == (1, 2, 5, 10, 20, 50, 100, 200)
    assert one_two_five(199)[-1] == 100

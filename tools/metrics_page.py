"""Writes docs/metrics.md from the registries themselves: `python tools/metrics_page.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import Metric

from tokenmill._backlog import MemoryReading, PoolReading
from tokenmill_worker.exporter import Snapshot
from tokenmill_worker.metrics import Metrics
from tokenmill_worker.queue_metrics import QueueCollector

PAGE = Path(__file__).resolve().parent.parent / "docs" / "metrics.md"

#: vLLM's names that do not apply, or are not kept; a name ending in * stands for all that begin so.
LEFT_OUT = {
    "vllm:num_requests_kv_fetch_by_stage": "no KV cache comes from elsewhere",
    "vllm:engine_sleep_state": "there is no sleep mode",
    "vllm:sleep_mode_operation_duration_seconds": "there is no sleep mode",
    "vllm:lora_requests_info": "no LoRA adapters are served",
    "vllm:admission_rejections": "Redis refuses what is too much, at the enqueue, before any "
    "worker hears of it: the producer gets QueueFull",
    "vllm:external_prefix_cache_queries": "there is no external prefix cache",
    "vllm:external_prefix_cache_hits": "there is no external prefix cache",
    "vllm:mm_cache_queries": "text only: no multi-modal inputs",
    "vllm:mm_cache_hits": "text only: no multi-modal inputs",
    "vllm:corrupted_requests": "logits are not searched for NaN; a request whose step fails even "
    "alone ends with an error and counts in tokenmill_isolated_failures",
    "vllm:watermark_requests": "no watermarks are put into answers",
    "vllm:kv_block_lifetime_seconds": "single blocks are not timed (vLLM only does on demand)",
    "vllm:kv_block_idle_before_evict_seconds": "as above",
    "vllm:kv_block_reuse_gap_seconds": "as above",
    "vllm:spec_decode_*": "there is no speculative decoding",
    "vllm:estimated_*": "arithmetic and traffic are not estimated (vLLM only does on demand)",
    "vllm:tool_call_parser_invocations_total": "tool calls are not parsed by a worker",
    "vllm:kv_offload_*": "the KV cache stays where the model is",
    "vllm:websocket_*": "workers speak to Redis only",
    "vllm:nixl_*": "no KV cache is transferred between machines",
    "vllm:mooncake_*": "as above",
    "vllm:hisparse_*": "no sparse attention of that kind",
    "vllm:gpu_cache_usage_perc": "gone from vLLM too: vllm:kv_cache_usage_perc",
    "vllm:num_requests_swapped": "gone from vLLM too",
    "vllm:time_per_output_token_seconds": "gone from vLLM too: vllm:inter_token_latency_seconds",
}

HEAD = """\
# Metrics

Written by `python tools/metrics_page.py` from the registries; a test compares.

Every worker serves `/metrics` on `--metrics-host`:`--metrics-port` (a free port of 127.0.0.1 unless
set; the log says which). `tokenmill exporter` serves those of the queue, once for the whole pool.
Both answer in Prometheus' text format 0.0.4, in which the colon of `vllm:` reaches Prometheus 2 as
it is. Counters and label values exist from the start, with 0. No label holds a request, a tenant or
any other text from outside: the number of series does not grow with the load.

A counter counts what its worker did. A request that two workers worked on (hand-over, lost lease)
counts in both; summed over workers, tokens are tokens computed. What no client got is in
`tokenmill_wasted_tokens_total`: without lost workers, `vllm:generation_tokens_total` minus that is
what clients received, token for token (`tests/integration/test_counters.py`).
"""

EXPORTER_HEAD = """
## The queue (`tokenmill exporter`)

Read from Redis alone when asked for, at most once in `--max-age-s`. While Redis cannot be read,
`tokenmill_exporter_up` is 0 and the others are absent: nobody may take that for an empty queue.
`/scaling` has the same work signal as JSON, and answers 503 meanwhile.

"""

LEFT_OUT_HEAD = """
## Names of vLLM that are left out

"""


def page() -> str:
    worker = Metrics("model", 4096)
    worker.configured(dict.fromkeys(CACHE_FACTS, ""))
    worker.started({"": 0.0}, 0.0)
    reading = Snapshot(PoolReading(memory=MemoryReading(0, 0)), "", 0.0, 0.0)
    queue = QueueCollector("default", lambda: reading, lambda _: 0.0)
    lines = [
        HEAD,
        "## A worker\n",
        "All with the labels `model_name` and `engine`.\n",
        *_table(worker.registry.collect(), hidden=("model_name", "engine")),
        EXPORTER_HEAD + "All with the label `pool`.\n",
        *_table(queue.collect(), hidden=("pool",)),
        LEFT_OUT_HEAD + "| name | why |\n| --- | --- |",
        *(f"| `{name}` | {why} |" for name, why in LEFT_OUT.items()),
    ]
    return "\n".join(lines) + "\n"


#: The labels of `vllm:cache_config_info`.
CACHE_FACTS = ("block_size", "num_gpu_blocks", "gpu_memory_utilization", "enable_prefix_caching")


def _table(families: Iterable[Metric], hidden: tuple[str, ...]) -> Iterator[str]:
    yield "| name | kind | more labels | what it is |\n| --- | --- | --- | --- |"
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        labels = {
            label: None
            for sample in family.samples
            for label in sample.labels
            if label not in (*hidden, "le")
        }
        shown = ", ".join(f"`{label}`" for label in labels)
        yield f"| `{name}` | {family.type} | {shown} | {family.documentation} |"


if __name__ == "__main__":
    PAGE.write_text(page())

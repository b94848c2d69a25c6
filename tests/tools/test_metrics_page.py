"""docs/metrics.md is what the registries say, and no name of vLLM's is forgotten in silence."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from tokenmill_worker.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
#: The names of vLLM 0.32, from its `v1/metrics/loggers.py` and the modules beside it; of groups
#: that are far from what a worker does only the beginning.
NAMES_OF_VLLM = re.findall(
    r"\S+",
    """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
num_requests_kv_fetch_by_stage engine_sleep_state lora_requests_info cache_config_info
num_preemptions prompt_tokens prompt_tokens_by_source prompt_tokens_cached
prompt_tokens_cached_by_source generation_tokens request_success admission_rejections
prefix_cache_queries prefix_cache_hits external_prefix_cache_queries external_prefix_cache_hits
mm_cache_queries mm_cache_hits corrupted_requests watermark_requests
time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds
e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds
request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens
request_generation_tokens request_max_num_generation_tokens request_params_n
request_params_max_tokens iteration_tokens_total request_num_preemptions
request_prefill_kv_computed_tokens kv_block_lifetime_seconds kv_block_idle_before_evict_seconds
kv_block_reuse_gap_seconds spec_decode_num_drafts spec_decode_num_draft_tokens
spec_decode_num_accepted_tokens spec_decode_num_accepted_tokens_per_pos
estimated_flops_per_gpu_total estimated_read_bytes_per_gpu_total estimated_write_bytes_per_gpu_total
tool_call_parser_invocations_total kv_offload_* sleep_mode_operation_duration_seconds
websocket_* nixl_* mooncake_* hisparse_*
gpu_cache_usage_perc num_requests_swapped time_per_output_token_seconds
""",
)


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("metrics_page", ROOT / "tools/metrics_page.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def served() -> set[str]:
    metrics = Metrics("m", 100)
    metrics.configured({"block_size": 16})
    return {family.name for family in metrics.registry.collect()}


def test_the_page_is_current(tool: ModuleType) -> None:
    assert tool.PAGE.read_text() == tool.page(), "run: python tools/metrics_page.py"


def test_every_name_of_vllm_is_served_or_left_out_with_a_reason(tool: ModuleType) -> None:
    def is_left_out(name: str) -> bool:
        return any(
            name == left_out or (left_out.endswith("*") and name.startswith(left_out[:-1]))
            for left_out in tool.LEFT_OUT
        )

    names = {f"vllm:{name}" for name in NAMES_OF_VLLM}
    assert {name for name in names if not is_left_out(name)} == {
        name for name in served() if name.startswith("vllm:")
    }
    assert all(any(re.match(left.replace("*", ".*"), n) for n in names) for left in tool.LEFT_OUT)


def test_labels_are_bounded() -> None:
    """No label takes text from outside."""
    metrics = Metrics("m", 100)
    labels = {
        label
        for family in metrics.registry.collect()
        for sample in family.samples
        for label in sample.labels
    }
    assert labels <= {
        "model_name", "engine", "le", "reason", "source", "finished_reason", "action", "call",
        "phase",
    }  # fmt: skip

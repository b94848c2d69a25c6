"""Sizing the KV cache: by hand-made arithmetic, without a model."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from tokenmill_engine import kv_budget
from tokenmill_engine.config import EngineConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.kv_budget import KVBudget, cpu_cache_bytes, plan_kv_budget

BLOCK_BYTES = 1000


def plan(memory_bytes: int = 10**9, *, model_len: int = 320, **options: object) -> KVBudget:
    config = EngineConfig(model="m", block_size=32, **options)
    return plan_kv_budget(
        config,
        block_bytes=BLOCK_BYTES,
        max_model_len=config.max_model_len or model_len,
        memory_bytes=lambda: memory_bytes,
    )


def test_the_override_counts_blocks() -> None:
    budget = plan(num_gpu_blocks_override=77, kv_cache_memory_bytes=5 * BLOCK_BYTES)
    assert budget == KVBudget(77, 320)


def test_bytes_given_by_the_operator_are_spent_to_the_last_whole_block() -> None:
    assert plan(kv_cache_memory_bytes=12 * BLOCK_BYTES + 999).num_blocks == 12


def test_free_memory_is_not_spent_on_blocks_that_no_request_can_use() -> None:
    assert plan(10**9, max_num_seqs=3).num_blocks == 3 * 10
    assert plan(25 * BLOCK_BYTES, max_num_seqs=3).num_blocks == 25


def test_a_length_taken_from_the_model_is_lowered_to_what_fits() -> None:
    budget = plan(num_gpu_blocks_override=4)
    assert budget.max_model_len == 4 * 32
    assert "lowered from 320 to 128" in budget.notes[0]


def test_a_length_that_was_asked_for_is_an_error_when_it_does_not_fit() -> None:
    with pytest.raises(ConfigError) as caught:
        plan(max_model_len=200, num_gpu_blocks_override=6)
    assert caught.value.field == "max_model_len"
    for part in ("200 tokens", "7 KV blocks", "6 blocks", "lower max_model_len to 192"):
        assert part in str(caught.value)
    assert plan(max_model_len=200, num_gpu_blocks_override=7) == KVBudget(7, 200)


def test_no_room_for_a_single_block() -> None:
    with pytest.raises(ConfigError, match="no room for a single KV block"):
        plan(BLOCK_BYTES - 1)


@pytest.fixture
def free_bytes(monkeypatch: pytest.MonkeyPatch) -> int:
    free = 3 * 2**30
    memory = psutil.virtual_memory()._replace(available=free)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    return free


def test_a_cpu_gives_half_of_its_free_memory(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kv_budget, "CGROUP", tmp_path)
    assert cpu_cache_bytes() == free_bytes // 2
    monkeypatch.setattr(kv_budget, "MAX_CPU_CACHE_BYTES", 2**30)
    assert cpu_cache_bytes() == 2**30


@pytest.mark.parametrize(
    ("limit", "expected"), [("1500", 500 // 2), ("900", 0), ("max", 3 * 2**29)]
)
def test_a_container_gives_half_of_what_its_limit_leaves(
    free_bytes: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("1000\n")
    monkeypatch.setattr(kv_budget, "CGROUP", tmp_path)
    assert cpu_cache_bytes() == expected

"""Huge pages behind the K/V tensors, as the kernel of Linux accounts for them."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tokenmill_engine import huge_pages
from tokenmill_engine.attention import AttentionSpec
from tokenmill_engine.huge_pages import HUGE_PAGE_BYTES, prefer_huge_pages
from tokenmill_engine.kv_cache import allocate_kv_cache
from tokenmill_engine.paged_attention_reference import TorchPagedAttention

MAPS = Path("/proc/self/smaps")


def advised() -> Iterator[range]:
    """The parts of this process's memory that were asked for in huge pages."""
    if not MAPS.exists() or not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("only Linux tells")
    if not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this Linux has no huge pages")
    part = range(0)
    for line in MAPS.read_text(encoding="ascii", errors="replace").splitlines():
        if borders := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            part = range(int(borders[1], 16), int(borders[2], 16))
        elif line.startswith("VmFlags:") and "hg" in line.split():
            yield part


def covered(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's memory that were asked for in huge pages."""
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    return sum(max(0, min(end, p.stop) - max(begin, p.start)) for p in advised())


def test_the_cache_asks_for_huge_pages_on_a_cpu() -> None:
    spec = AttentionSpec(None, None, 2, 64, 64, torch.float32)
    cache = allocate_kv_cache(
        {(0, 0): spec},
        TorchPagedAttention(),
        num_blocks=2048,
        block_size=32,
        device=torch.device("cpu"),
    )
    layer = cache.layers[0, 0]
    for tensor in (layer.key, layer.value):
        assert tensor.nbytes - covered(tensor) < 2 * HUGE_PAGE_BYTES
        tensor[0].fill_(1.0)  # and it is memory as any other
        assert tensor[0].eq(1.0).all()


def test_a_tensor_smaller_than_a_page_is_left_alone() -> None:
    tensor = torch.empty(HUGE_PAGE_BYTES // 8)
    before = covered(tensor)
    prefer_huge_pages(tensor)
    assert covered(tensor) == before


def test_other_devices_and_other_systems_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prefer_huge_pages(torch.empty(4 * HUGE_PAGE_BYTES, device="meta"))
    tensor = torch.empty(4 * HUGE_PAGE_BYTES)
    before = covered(tensor)
    monkeypatch.setattr(huge_pages, "_ADVICE", None)
    prefer_huge_pages(tensor)
    assert covered(tensor) == before

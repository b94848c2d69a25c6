"""How many KV blocks to allocate, and how long a sequence may then become."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from .config import EngineConfig
from .errors import ConfigError

#: On CPU the cache shares its memory with everything else: half of what is free, but no more than
#: this, unless `kv_cache_memory_bytes` or `num_gpu_blocks_override` says otherwise.
MAX_CPU_CACHE_BYTES = 4 * 2**30
CPU_MEMORY_SHARE = 0.5

CGROUP = Path("/sys/fs/cgroup")  # a container sees its own limits here

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class KVBudget:
    """`notes` tell the operator what had to be lowered, and why."""

    num_blocks: int
    max_model_len: int
    notes: tuple[str, ...] = ()


def plan_kv_budget(
    config: EngineConfig,
    *,
    block_bytes: int,
    max_model_len: int,
    memory_bytes: Callable[[], int],
) -> KVBudget:
    """Blocks by the first of num_gpu_blocks_override, kv_cache_memory_bytes, `memory_bytes()`.

    The pool has to hold one sequence of `max_model_len` tokens. Where it does not, a limit that the
    operator set is an error (`ConfigError` with the numbers), one taken from the model is lowered.
    """
    block_size = config.block_size
    if config.num_gpu_blocks_override is not None:
        num_blocks = config.num_gpu_blocks_override
    elif config.kv_cache_memory_bytes is not None:
        num_blocks = config.kv_cache_memory_bytes // block_bytes
    else:
        useful_blocks = config.max_num_seqs * -(-max_model_len // block_size)
        num_blocks = min(memory_bytes() // block_bytes, useful_blocks)
    if num_blocks < 1:
        raise ConfigError(
            "kv_cache_memory_bytes",
            f"there is no room for a single KV block of {block_size} tokens "
            f"({block_bytes / _MIB:.1f} MiB); give more memory or lower block_size",
        )
    if num_blocks * block_size >= max_model_len:
        return KVBudget(num_blocks, max_model_len)
    fits = f"{num_blocks} blocks ({num_blocks * block_bytes / _MIB:.0f} MiB)"
    if config.max_model_len is None:
        return KVBudget(
            num_blocks,
            num_blocks * block_size,
            (
                f"max_model_len lowered from {max_model_len} to {num_blocks * block_size}: "
                f"the KV cache holds {fits}",
            ),
        )
    needed_blocks = -(-max_model_len // block_size)
    raise ConfigError(
        "max_model_len",
        f"one sequence of {max_model_len} tokens needs {needed_blocks} KV blocks "
        f"({needed_blocks * block_bytes / _MIB:.0f} MiB), but there is room for {fits}; lower "
        f"max_model_len to {num_blocks * block_size}, or raise kv_cache_memory_bytes or "
        "num_gpu_blocks_override",
    )


def cpu_cache_bytes() -> int:
    """What the KV cache may take of this machine's, or this container's, free memory."""
    available = min([psutil.virtual_memory().available, *_cgroup_free_bytes()])
    return min(MAX_CPU_CACHE_BYTES, int(available * CPU_MEMORY_SHARE))


def _cgroup_free_bytes() -> list[int]:
    """Free memory under a container's limit; psutil sees the host's."""
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return []
    return [max(0, int(limit) - used)] if limit.isdigit() else []


def cuda_cache_bytes(device: torch.device, utilization: float, profile: Callable[[], None]) -> int:
    """`utilization` of the device, less what weights, activations and other processes take.

    `profile` runs the largest step, so that its activations are counted.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    profile()
    torch.cuda.synchronize(device)
    peak_bytes = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    outside_torch_bytes = total_bytes - free_bytes - torch.cuda.memory_reserved(device)
    return max(0, int(total_bytes * utilization) - outside_torch_bytes - peak_bytes)

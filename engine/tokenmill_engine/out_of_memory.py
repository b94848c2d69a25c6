"""Telling that memory ran out from other failures of a step."""

from __future__ import annotations

import torch

#: The CPU allocator raises a plain RuntimeError; this is how its text begins after the place.
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: Exception) -> bool:
    """Whether a smaller step may succeed: the device's, Python's or the CPU allocator's limit."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error)

"""Memory in pages of 2 MiB, where Linux has them on request."""

from __future__ import annotations

import ctypes
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20

#: Linux alone knows the advice.
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)


def prefer_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for huge pages behind a tensor that nobody has touched yet; does nothing elsewhere.

    What is read in no order misses the processor's list of pages less often. Memory is still
    taken when it is touched, 2 MiB at a time. A system that declines keeps its small pages.
    """
    if tensor.device.type != "cpu" or _ADVICE is None:
        return
    first = -(-tensor.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if first < end:
        advise = ctypes.CDLL(None).madvise
        advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        advise(first, end - first, _ADVICE)

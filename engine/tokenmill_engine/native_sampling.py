"""Choosing tokens on a CPU by the native kernel in `kernels/sample.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from .kernels.build import load_kernel
from .request import Request
from .sampler import choose_by_torch

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p

#: Less is not worth waking another thread for: reading so many takes some tens of microseconds.
_LOGITS_PER_THREAD = 1 << 18


class _Sample(ctypes.Structure):
    """`struct Sample` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "token_ids")),
        *((name, _INT) for name in ("num_rows", "logits_row", "vocab")),
        ("num_threads", ctypes.c_int32),
    )


class NativeSampling:
    """A `TokenChooser`: greedy rows natively, the others as `choose_by_torch` does.

    Raises KernelUnavailable where the kernel cannot be built.
    """

    def __init__(self) -> None:
        self._kernel = load_kernel("sample").tokenmill_sample
        self._kernel.restype, self._kernel.argtypes = None, (ctypes.POINTER(_Sample),)

    def __call__(
        self, logits: Tensor, requests: Sequence[Request], settings: Tensor | None = None
    ) -> Tensor:
        if all(request.params.is_greedy for request in requests):
            return self.most_likely(logits)
        return choose_by_torch(logits, requests, settings)

    def most_likely(self, logits: Tensor) -> Tensor:
        """Token ids [N] (int64) as `draw.argmax` chooses them in float32 `logits` [N, V]."""
        if logits.dtype != torch.float32 or logits.device.type != "cpu":
            raise ValueError(f"takes float32 on the CPU, not {logits.dtype} on {logits.device}")
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        num_threads = min(torch.get_num_threads(), logits.numel() // _LOGITS_PER_THREAD)
        call = _Sample(
            logits=logits.data_ptr(),
            token_ids=token_ids.data_ptr(),
            num_rows=len(logits),
            logits_row=logits.stride(0),
            vocab=logits.shape[1],
            num_threads=num_threads,
        )
        self._kernel(call)  # without the GIL
        return token_ids

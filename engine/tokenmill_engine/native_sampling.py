"""Choosing tokens on a CPU by the native kernel in `kernels/sample.cpp`.

The tokens are those that `draw.py` chooses for the same logits, bit for bit.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .kernels.build import load_kernel
from .packed_settings import SettingsPacker
from .request import Request

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p

#: Less is not worth waking another thread for: reading so many takes some tens of microseconds.
_LOGITS_PER_THREAD = 1 << 18


class _Sample(ctypes.Structure):
    """`struct Sample` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("logits", "settings", "token_ids")),
        *((name, _INT) for name in ("num_rows", "logits_row", "vocab")),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "num_threads")),
    )


class NativeSampling:
    """A `TokenChooser` for logits on the CPU; those in bfloat16 are read as they are.

    Raises KernelUnavailable where the kernel cannot be built.
    """

    def __init__(self) -> None:
        library = load_kernel("sample")
        self._sample, self._shares = library.tokenmill_sample, library.tokenmill_shares
        self._sample.argtypes = (ctypes.POINTER(_Sample),)
        self._shares.argtypes = (_POINTER, _INT, _POINTER)
        self._sample.restype = self._shares.restype = None
        self._pack = SettingsPacker()

    def __call__(
        self, logits: Tensor, requests: Sequence[Request], settings: Tensor | None = None
    ) -> Tensor:
        """Token ids [N] (int64) from logits [N, V]; `NO_TOKEN` for an unusable row."""
        if logits.device.type != "cpu":
            raise ValueError(f"takes logits on the CPU, not on {logits.device}")
        if logits.dtype != torch.bfloat16:
            logits = logits.float()
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        packed = self._pack(requests) if settings is None else settings.contiguous().numpy()
        token_ids = torch.empty(len(logits), dtype=torch.int64)
        call = _Sample(
            logits=logits.data_ptr(),
            settings=None if packed is None else packed.ctypes.data,
            token_ids=token_ids.data_ptr(),
            num_rows=len(logits),
            logits_row=logits.stride(0),
            vocab=logits.shape[1],
            is_bfloat16=logits.dtype == torch.bfloat16,
            num_threads=min(torch.get_num_threads(), logits.numel() // _LOGITS_PER_THREAD),
        )
        self._sample(call)  # without the GIL
        return token_ids

    def shares(self, scaled: NDArray[np.float32]) -> NDArray[np.float32]:
        """What the kernel takes for the result of `Shares`, of dense scaled logits [n]."""
        shares = np.empty_like(scaled)
        self._shares(scaled.ctypes.data, len(scaled), shares.ctypes.data)
        return shares

"""Choosing tokens on a GPU: settings go there in one copy, token ids come back in one.

The tokens are those that `draw.py` chooses for the same logits.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from .draw import argmax
from .packed_settings import NUM_SETTINGS, pack_settings
from .request import Request
from .transfers import send

_BLOCK = 2048  # logits that a program holds at once; more of them spill registers on sm_80
_NUM_WARPS = 8


def sample_on_device(logits: Tensor, settings: Tensor) -> Tensor:
    """Token ids [N] (int64) for float32 `logits` [N, V]; -1 for an unusable row (`NO_TOKEN`).

    `settings` is the result of `pack_settings` on the device of the logits. Waits for nothing.
    """
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(logits):
        # Only here, for Triton comes with torch's builds for GPUs only.
        kernels = importlib.import_module(".kernels.triton_sample", __package__)
        vocab = logits.shape[-1]
        kernels.sample[(len(logits),)](
            logits,
            logits.stride(0),
            vocab,
            settings,
            settings.stride(0),
            token_ids,
            BLOCK=min(_BLOCK, 1 << (vocab - 1).bit_length()),
            num_warps=_NUM_WARPS,
            enable_fp_fusion=False,
        )
    return token_ids


def choose_on_device(
    logits: Tensor, requests: Sequence[Request], settings: Tensor | None = None
) -> Tensor:
    """A `TokenChooser` for a GPU; `settings` are packed and sent if they are not there yet."""
    logits = logits.float()
    if settings is None:
        if all(request.params.is_greedy for request in requests):
            return argmax(logits)
        settings = send(pack_settings(requests), logits.device)
    return sample_on_device(logits, settings)


def warm_up(device: torch.device, vocab_size: int) -> None:
    """Compile the kernel before a request waits for it."""
    settings = torch.zeros(NUM_SETTINGS, 1, dtype=torch.int64, device=device)
    sample_on_device(torch.zeros(1, vocab_size, device=device), settings)

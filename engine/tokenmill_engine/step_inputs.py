"""From a scheduled step to the tensors of its forward, built with numpy in one go."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from .attention import AttentionMetadata
from .outputs import ScheduledRequest, SchedulerOutput


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One ragged batch of T rows: prompt chunks and single decode tokens back to back."""

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, absolute positions
    logits_rows: torch.Tensor  # [num_sampling] int64: the rows that predict a new token
    long_rows: torch.Tensor | None  # [1, T, 1] bool, None when no request is past the RoPE switch
    metadata: AttentionMetadata


def build_step_inputs(
    output: SchedulerOutput,
    *,
    block_size: int,
    device: torch.device,
    rope_switch_tokens: int | None = None,
) -> StepInputs:
    """Gather tokens, positions, block tables and slots of all requests of the step."""
    scheduled = output.scheduled
    starts = _integers((item.start for item in scheduled), len(scheduled))
    row_counts = _integers((item.num_tokens for item in scheduled), len(scheduled))
    kv_lens = starts + row_counts
    cu_rows = _offsets(row_counts)
    num_rows = int(cu_rows[-1])
    row_seqs = np.repeat(np.arange(len(scheduled)), row_counts)
    positions = np.arange(num_rows) + (starts - cu_rows[:-1])[row_seqs]
    tokens = (item.request.token_ids[item.start : item.end] for item in scheduled)

    block_counts = -(-kv_lens // block_size)
    cu_blocks = _offsets(block_counts)
    tables = (
        item.request.block_ids[:count]
        for item, count in zip(scheduled, block_counts.tolist(), strict=True)
    )
    block_ids = _integers(chain.from_iterable(tables), int(cu_blocks[-1]))
    slot_blocks = block_ids[cu_blocks[row_seqs] + positions // block_size]

    samples = np.fromiter((item.samples for item in scheduled), bool, len(scheduled))
    return StepInputs(
        input_ids=_tensor(_integers(chain.from_iterable(tokens), num_rows), device).unsqueeze(0),
        position_ids=_tensor(positions, device).unsqueeze(0),
        logits_rows=_tensor(cu_rows[1:][samples] - 1, device),
        long_rows=_long_rows(scheduled, row_seqs, rope_switch_tokens, device),
        metadata=AttentionMetadata(
            block_size=block_size,
            cu_rows=cu_rows,
            kv_lens=kv_lens,
            block_ids=block_ids,
            cu_blocks=cu_blocks,
            slot_blocks=_tensor(slot_blocks, device),
            slot_offsets=_tensor(positions % block_size, device),
        ),
    )


def _long_rows(
    scheduled: Sequence[ScheduledRequest],
    row_seqs: NDArray[np.int64],
    rope_switch_tokens: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    if rope_switch_tokens is None:
        return None
    lengths = _integers((item.request.num_tokens for item in scheduled), len(scheduled))
    is_long = lengths > rope_switch_tokens
    if not is_long.any():
        return None
    return _tensor(is_long[row_seqs], device)[None, :, None]


def _integers(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[0, c0, c0 + c1, …]`"""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _tensor(array: NDArray[np.int64] | NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)

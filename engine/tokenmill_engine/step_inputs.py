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
from .transfers import send

#: In `StepInputs.sources`: the host knows the token.
NO_SOURCE = -1


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """One ragged batch of T rows: prompt chunks and single decode tokens back to back."""

    input_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, absolute positions
    logits_rows: torch.Tensor  # [num_sampling] int64: the rows that predict a new token
    #: [T] int64: the sample of the step before that a row takes as its token, -1 where `input_ids`
    #: has it; None when it has all of them.
    sources: torch.Tensor | None
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
        input_ids=send(_token_ids(scheduled, num_rows), device).unsqueeze(0),
        position_ids=send(positions, device).unsqueeze(0),
        logits_rows=send(cu_rows[1:][samples] - 1, device),
        sources=_sources(scheduled, cu_rows, device),
        long_rows=_long_rows(scheduled, row_seqs, rope_switch_tokens, device),
        metadata=AttentionMetadata(
            block_size=block_size,
            cu_rows=cu_rows,
            kv_lens=kv_lens,
            block_ids=block_ids,
            cu_blocks=cu_blocks,
            slot_blocks=send(slot_blocks, device),
            slot_offsets=send(positions % block_size, device),
        ),
    )


def _token_ids(scheduled: Sequence[ScheduledRequest], num_rows: int) -> NDArray[np.int64]:
    """[T]; 0 for those that are on the device only."""
    known = (
        item.request.token_ids[item.start : item.end]
        if item.source is None
        else (*item.request.token_ids[item.start :], 0)
        for item in scheduled
    )
    return _integers(chain.from_iterable(known), num_rows)


def _sources(
    scheduled: Sequence[ScheduledRequest], cu_rows: NDArray[np.int64], device: torch.device
) -> torch.Tensor | None:
    last_rows = {
        row: item.source
        for row, item in zip((cu_rows[1:] - 1).tolist(), scheduled, strict=True)
        if item.source is not None
    }
    if not last_rows:
        return None
    sources = np.full(int(cu_rows[-1]), NO_SOURCE, np.int64)
    sources[list(last_rows)] = list(last_rows.values())
    return send(sources, device)


def _long_rows(
    scheduled: Sequence[ScheduledRequest],
    row_seqs: NDArray[np.int64],
    rope_switch_tokens: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    if rope_switch_tokens is None:
        return None
    lengths = _integers((item.request.planned_length for item in scheduled), len(scheduled))
    is_long = lengths > rope_switch_tokens
    if not is_long.any():
        return None
    return send(is_long[row_seqs], device)[None, :, None]


def _integers(values: Iterable[int], count: int) -> NDArray[np.int64]:
    return np.fromiter(values, np.int64, count)


def _offsets(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """`[0, c0, c0 + c1, …]`"""
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets

"""Which tiles of work the Triton attention kernel has in one step, planned on the host.

A decode row is one item, or several that take `split_tokens` keys each; where the stretches begin
depends on the row's own length alone, never on its neighbours, so that neither does its result. A
prompt chunk is one item for every `rows_per_item` rows. The tables are those of
`kernels/triton_paged_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .attention import AttentionMetadata, AttentionRule

Table = NDArray[np.int32]

#: Stretch of keys that one item of a decode row takes.
SPLIT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class WorkKey:
    """What a work list depends on besides the step; attention calls that agree share one."""

    window: int | None
    chunk: int | None
    rows_per_item: int
    split_tokens: int = SPLIT_TOKENS

    @property
    def rule(self) -> AttentionRule:
        """The mask of it; the scaling does not matter here."""
        return AttentionRule(1.0, window=self.window, chunk=self.chunk)


@dataclass(frozen=True, slots=True, eq=False)
class StepTables:
    """Where the sequences of a step lie; the same for all attention calls."""

    sequences: Table  # [S, 4] first row, number of rows, tokens in the cache, first block id
    block_ids: Table  # [N]


@dataclass(frozen=True, slots=True, eq=False)
class WorkList:
    """The items of a step under one `WorkKey`."""

    decode_items: Table  # [W, 4] sequence, 0, stretch, part (-1: the row has one item only)
    prompt_items: Table  # [V, 4] sequence, tile of rows, -1, -1
    merges: Table  # [M, 4] sequence, first part, number of parts, 0
    num_parts: int


def step_tables(meta: AttentionMetadata) -> StepTables:
    """Of a step; a sequence without tokens in the cache stands for rows that pad the batch."""
    columns = (meta.cu_rows[:-1], np.diff(meta.cu_rows), meta.kv_lens, meta.cu_blocks[:-1])
    return StepTables(_table(*columns), meta.block_ids.astype(np.int32))


def plan_work(meta: AttentionMetadata, key: WorkKey) -> WorkList:
    """The work list of a step. Rows that pad the batch get items too, which write zeros."""
    num_rows = np.diff(meta.cu_rows)
    decoding = np.flatnonzero(num_rows == 1)
    kv_lens = meta.kv_lens[decoding]
    first = key.rule.first_visible(kv_lens - 1) // key.split_tokens
    first = np.maximum(first, 0)  # of a row that pads
    counts = np.maximum(-(-kv_lens // key.split_tokens) - first, 1)
    which, nth = _spread(counts)
    is_split = counts > 1
    part_counts = np.where(is_split, counts, 0)
    first_parts = np.cumsum(part_counts) - part_counts
    parts = np.where(is_split[which], first_parts[which] + nth, -1)
    zero = np.zeros_like(which)

    prompts = np.flatnonzero(num_rows > 1)
    seqs, tiles = _spread(-(-num_rows[prompts] // key.rows_per_item))
    none = np.full_like(seqs, -1)
    merged = np.flatnonzero(is_split)
    return WorkList(
        decode_items=_table(decoding[which], zero, first[which] + nth, parts),
        prompt_items=_table(prompts[seqs], tiles, none, none),
        merges=_table(decoding[merged], first_parts[merged], counts[merged], np.zeros_like(merged)),
        num_parts=int(part_counts.sum()),
    )


def _spread(counts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """`[2, 3]` to `[0, 0, 1, 1, 1]` and `[0, 1, 0, 1, 2]`"""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def _table(*columns: NDArray[np.int64]) -> Table:
    return np.stack(columns, axis=1).astype(np.int32)

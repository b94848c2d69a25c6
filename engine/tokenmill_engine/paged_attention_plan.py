"""Which cached blocks each query of a step has to visit, planned on the host once per mask rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .attention import AttentionMetadata, AttentionRule

#: Blocks of decode rows that are read at once; bounds the memory for their float32 copies.
PAGES_PER_TILE = 128
#: Rows of a prompt chunk that attend at once where a mask is needed; bounds masks and scores.
ROWS_PER_TILE = 128


@dataclass(frozen=True, slots=True, eq=False)
class PageTile:
    """Some of the step's (decode row, block) pairs."""

    pages: torch.Tensor  # [P] int64 block ids
    rows: torch.Tensor  # [P] int64 index into the plan's decode rows
    hidden: torch.Tensor  # [P, block_size] bool: slots that the row must not see
    partial: torch.Tensor  # [N] int64: pairs whose block has slots that were never written
    unwritten: torch.Tensor  # [N, block_size] bool: those slots


@dataclass(frozen=True, slots=True, eq=False)
class PromptTile:
    """Some rows of one prompt chunk and the keys that they see.

    The keys are slots `first_slot:first_slot + num_keys` of `pages` laid end to end. When the
    sequence begins in this very step they are rows of the step as well, and `pages` is None: then
    `first_slot` is the first of those rows. `visible` is None when row i sees keys 0 … i.
    """

    rows: slice
    pages: torch.Tensor | None  # [N] int64 block ids
    first_slot: int
    num_keys: int
    visible: torch.Tensor | None  # [rows, num_keys] bool


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """Decode rows are taken together, page by page; prompt chunks one after another."""

    decode_rows: torch.Tensor  # [R] int64
    page_tiles: tuple[PageTile, ...]
    row_offsets: torch.Tensor  # [R] int64: where each row's pairs begin, over all page tiles
    pair_rows: torch.Tensor  # [P] int64: the rows of all page tiles
    prompt_tiles: tuple[PromptTile, ...]


def build_plan(
    meta: AttentionMetadata, rule: AttentionRule, *, whole_prompts: bool, device: torch.device
) -> AttentionPlan:
    """Plan one step under `rule`, of which only the mask matters.

    `whole_prompts` lets a prompt that starts in this step and needs no mask be one tile.
    """
    row_counts = np.diff(meta.cu_rows)
    decoding = np.flatnonzero(row_counts == 1)
    pairs = _pairs(meta, rule, decoding)
    tiles = tuple(
        pairs.tile(slice(start, start + PAGES_PER_TILE), device)
        for start in range(0, len(pairs.pages), PAGES_PER_TILE)
    )
    prompts = (
        tile
        for seq in np.flatnonzero(row_counts > 1).tolist()
        for tile in _prompt_tiles(meta, rule, seq, whole_prompts, device)
    )
    return AttentionPlan(
        decode_rows=torch.from_numpy(meta.cu_rows[decoding]).to(device),
        page_tiles=tiles,
        row_offsets=torch.from_numpy(pairs.offsets[:-1]).to(device),
        pair_rows=torch.from_numpy(pairs.rows).to(device),
        prompt_tiles=tuple(prompts),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Pairs:
    """All (decode row, block) pairs of a step, those of a row adjacent and in position order."""

    pages: NDArray[np.int64]  # [P]
    rows: NDArray[np.int64]  # [P]
    hidden: NDArray[np.bool_]  # [P, block_size]
    unwritten: NDArray[np.bool_]  # [P, block_size]
    offsets: NDArray[np.int64]  # [R + 1]

    def tile(self, part: slice, device: torch.device) -> PageTile:
        unwritten = self.unwritten[part]
        partial = np.flatnonzero(unwritten[:, -1])  # a block is written from its first slot on
        return PageTile(
            pages=torch.from_numpy(self.pages[part]).to(device),
            rows=torch.from_numpy(self.rows[part]).to(device),
            hidden=torch.from_numpy(self.hidden[part]).to(device),
            partial=torch.from_numpy(partial).to(device),
            unwritten=torch.from_numpy(unwritten[partial]).to(device),
        )


def _pairs(meta: AttentionMetadata, rule: AttentionRule, decoding: NDArray[np.int64]) -> _Pairs:
    positions = meta.kv_lens[decoding] - 1
    first_keys = rule.first_visible(positions)
    first_blocks = first_keys // meta.block_size
    counts = positions // meta.block_size - first_blocks + 1
    offsets = np.zeros(len(decoding) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    rows = np.repeat(np.arange(len(decoding)), counts)
    blocks = np.arange(offsets[-1]) + (first_blocks - offsets[:-1])[rows]  # index in the table
    slots = blocks[:, None] * meta.block_size + np.arange(meta.block_size)  # key positions
    unwritten = slots > positions[rows, None]
    return _Pairs(
        pages=meta.block_ids[meta.cu_blocks[decoding][rows] + blocks],
        rows=rows,
        hidden=unwritten | (slots < first_keys[rows, None]),
        unwritten=unwritten,
        offsets=offsets,
    )


def _prompt_tiles(
    meta: AttentionMetadata,
    rule: AttentionRule,
    seq: int,
    whole_prompts: bool,
    device: torch.device,
) -> Iterator[PromptTile]:
    first_row, end_row = int(meta.cu_rows[seq]), int(meta.cu_rows[seq + 1])
    context = int(meta.kv_lens[seq]) - (end_row - first_row)  # tokens cached by earlier steps
    masked_by_rule = rule.window is not None or rule.chunk is not None
    if whole_prompts and context == 0 and not masked_by_rule:
        yield PromptTile(slice(first_row, end_row), None, first_row, end_row - first_row, None)
        return
    table = meta.block_ids[meta.cu_blocks[seq] : meta.cu_blocks[seq + 1]]
    for row in range(first_row, end_row, ROWS_PER_TILE):
        rows = slice(row, min(row + ROWS_PER_TILE, end_row))
        queries = np.arange(rows.start, rows.stop) + (context - first_row)  # positions
        first_keys = rule.first_visible(queries)
        first_key, end_key = int(first_keys[0]), int(queries[-1]) + 1
        keys = np.arange(first_key, end_key)
        sees = (keys <= queries[:, None]) & (keys >= first_keys[:, None])
        pages, first_slot = None, first_row + first_key
        if context:
            first_block = first_key // meta.block_size
            pages = torch.from_numpy(table[first_block : -(-end_key // meta.block_size)]).to(device)
            first_slot = first_key - first_block * meta.block_size
        yield PromptTile(
            rows, pages, first_slot, end_key - first_key, torch.from_numpy(sees).to(device)
        )

"""The work list: every key that a row may see is in exactly one of its items, and in no other's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tokenmill_engine.attention import AttentionMetadata, AttentionRule
from tokenmill_engine.work_list import WorkKey, WorkList, plan_work, step_tables

NO_ROWS = torch.zeros(0, dtype=torch.int64)


def metadata(lengths: list[tuple[int, int]], block_size: int = 16) -> AttentionMetadata:
    """Of sequences given as (rows of the step, tokens in the cache)."""
    cu_blocks = np.cumsum([0, *(-(-length // block_size) for _, length in lengths)])
    return AttentionMetadata(
        block_size=block_size,
        cu_rows=np.cumsum([0, *(rows for rows, _ in lengths)]),
        kv_lens=np.array([length for _, length in lengths]),
        block_ids=np.arange(cu_blocks[-1]),
        cu_blocks=cu_blocks,
        slot_blocks=NO_ROWS,
        slot_offsets=NO_ROWS,
    )


def keys_of_decode_rows(work: WorkList, meta: AttentionMetadata, key: WorkKey) -> dict[int, list]:
    """Sequence to the keys of its items, in their order, as the kernel bounds them."""
    keys: dict[int, list[int]] = {}
    for sequence, _, stretch, _ in work.decode_items.tolist():
        length = int(meta.kv_lens[sequence])
        first = int(key.rule.first_visible(np.array([length - 1]))[0])
        low = max(first, stretch * key.split_tokens)
        high = min(length, (stretch + 1) * key.split_tokens)
        keys.setdefault(sequence, []).extend(range(low, high))
    return keys


@pytest.mark.parametrize("mask", [{}, {"window": 70}, {"window": 3}, {"chunk": 48}])
def test_a_decode_row_gets_each_visible_key_once(mask: dict[str, int]) -> None:
    lengths = [(1, n) for n in (1, 31, 32, 33, 64, 65, 200, 1000)]
    meta = metadata([(5, 300), *lengths])
    key = WorkKey(mask.get("window"), mask.get("chunk"), rows_per_item=4, split_tokens=32)

    keys = keys_of_decode_rows(plan_work(meta, key), meta, key)

    rule = AttentionRule(1.0, **mask)
    for sequence, (_, length) in enumerate(lengths, 1):
        first = int(rule.first_visible(np.array([length - 1]))[0])
        assert keys[sequence] == list(range(first, length))
    assert 0 not in keys


def test_parts_are_numbered_without_gaps_and_merged_in_order() -> None:
    meta = metadata([(1, 100), (3, 90), (1, 20), (1, 65)])
    work = plan_work(meta, WorkKey(None, None, rows_per_item=2, split_tokens=32))

    assert work.decode_items.tolist() == [
        *([0, 0, stretch, stretch] for stretch in range(4)),
        [2, 0, 0, -1],
        *([3, 0, stretch, 4 + stretch] for stretch in range(3)),
    ]
    assert work.merges.tolist() == [[0, 0, 4, 0], [3, 4, 3, 0]]
    assert work.num_parts == 7
    assert work.prompt_items.tolist() == [[1, 0, -1, -1], [1, 1, -1, -1]]


def test_the_items_of_a_row_do_not_depend_on_its_neighbours() -> None:
    key = WorkKey(400, None, rows_per_item=8, split_tokens=64)
    lengths = [(1, 777), (9, 50), (1, 64), (1, 300)]

    def stretches(work: WorkList, sequence: int) -> list[int]:
        items = work.decode_items
        return items[items[:, 0] == sequence, 2].tolist()

    together = plan_work(metadata(lengths), key)
    for i in (0, 2, 3):
        assert stretches(together, i) == stretches(plan_work(metadata([lengths[i]]), key), 0)


@pytest.mark.parametrize("mask", [{}, {"window": 7}, {"chunk": 5}])
def test_rows_that_pad_get_one_item_and_no_merge(mask: dict[str, int]) -> None:
    meta = metadata([(1, 40), (1, 0), (1, 0), (6, 0)])
    work = plan_work(meta, WorkKey(mask.get("window"), mask.get("chunk"), 4, 512))

    assert work.decode_items[:, 0].tolist() == [0, 1, 2]
    assert work.decode_items[1:, 2:].tolist() == [[0, -1], [0, -1]]
    assert work.prompt_items[:, :2].tolist() == [[3, 0], [3, 1]]
    assert len(work.merges) == 0


def test_the_tables_say_where_a_sequence_lies() -> None:
    tables = step_tables(metadata([(2, 33), (1, 16), (1, 0)]))

    assert tables.sequences.tolist() == [[0, 2, 33, 0], [2, 1, 16, 3], [3, 1, 0, 4]]
    assert tables.block_ids.tolist() == [0, 1, 2, 3]
    assert tables.sequences.dtype == tables.block_ids.dtype == np.int32

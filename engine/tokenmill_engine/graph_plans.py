"""Attention plans for steps in a CUDA graph: work lists of fixed size in fixed places."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from .attention import AttentionMetadata
from .graph_buckets import Bucket, Buckets
from .static_arrays import HostArrays, Layout
from .triton_attention import DevicePlan, PlanSource
from .work_list import Table, WorkKey, plan_work, step_tables

_NO_ITEM = -1


class NotedPlans:
    """Another source's plans; remembers which work lists a model asks for."""

    def __init__(self, source: PlanSource) -> None:
        self._source = source
        self._keys: dict[WorkKey, None] = {}

    @property
    def keys(self) -> tuple[WorkKey, ...]:
        return tuple(self._keys)

    def plan(self, meta: AttentionMetadata, key: WorkKey) -> DevicePlan:
        """See `PlanSource.plan`."""
        self._keys[key] = None
        return self._source.plan(meta, key)


class StaticPlans:
    """Of one bucket: the same tensors in each step, filled anew by `fill`."""

    def __init__(self, bucket: Bucket, buckets: Buckets, keys: Iterable[WorkKey]) -> None:
        self._keys = tuple(keys)
        self._rooms = [
            buckets.work_room(
                bucket, rows_per_item=key.rows_per_item, split_tokens=key.split_tokens
            )
            for key in self._keys
        ]
        self._num_seqs = buckets.num_seqs(bucket)
        self._num_block_ids = buckets.num_block_ids(bucket)
        self._plans: dict[WorkKey, DevicePlan] = {}

    def layouts(self) -> dict[str, Layout]:
        """Of the arrays that `fill` writes."""
        found = {
            "sequences": Layout((self._num_seqs, 4), np.int32),
            "block_ids": Layout((self._num_block_ids,), np.int32),
        }
        for number, room in enumerate(self._rooms):
            found[f"decode_items {number}"] = Layout((room.decode_items, 4), np.int32)
            found[f"prompt_items {number}"] = Layout((room.prompt_items, 4), np.int32)
            found[f"merges {number}"] = Layout((room.merges, 4), np.int32)
        return found

    def attach(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Where the arrays lie on the device."""
        for number, (key, room) in enumerate(zip(self._keys, self._rooms, strict=True)):
            self._plans[key] = DevicePlan(
                num_parts=room.parts,
                sequences=tensors["sequences"],
                block_ids=tensors["block_ids"],
                decode_items=tensors[f"decode_items {number}"],
                prompt_items=tensors[f"prompt_items {number}"],
                merges=tensors[f"merges {number}"],
            )

    def fill(self, meta: AttentionMetadata, host: HostArrays) -> bool:
        """Write the plan of a padded step; False if there is no room for it."""
        tables = step_tables(meta)
        fits = _put(host["sequences"], tables.sequences, 0)
        fits = fits and _put(host["block_ids"], tables.block_ids, 0)
        for number, key in enumerate(self._keys):
            work = plan_work(meta, key)
            fits = (
                fits
                and work.num_parts <= self._rooms[number].parts
                and _put(host[f"decode_items {number}"], work.decode_items, _NO_ITEM)
                and _put(host[f"prompt_items {number}"], work.prompt_items, _NO_ITEM)
                and _put(host[f"merges {number}"], work.merges, _NO_ITEM)
            )
        return fits

    def plan(self, meta: AttentionMetadata, key: WorkKey) -> DevicePlan:
        """See `PlanSource.plan`."""
        return self._plans[key]


def pad_metadata(meta: AttentionMetadata, bucket: Bucket) -> AttentionMetadata:
    """The step with as many rows as the bucket. The new ones have no tokens in the cache.

    They are sequences of a row each where all others are, and else one sequence.
    """
    num_padding = bucket.num_rows - int(meta.cu_rows[-1])
    if not num_padding:
        return meta
    row_counts = [1] * num_padding if bucket.is_decode else [num_padding]
    ends = meta.cu_rows[-1] + np.cumsum(row_counts)
    nothing = np.zeros(len(row_counts), np.int64)
    return replace(
        meta,
        cu_rows=np.concatenate([meta.cu_rows, ends]),
        kv_lens=np.concatenate([meta.kv_lens, nothing]),
        cu_blocks=np.concatenate([meta.cu_blocks, nothing + meta.cu_blocks[-1]]),
    )


def _put(room: NDArray[np.generic], table: Table, rest: int) -> bool:
    if len(table) > len(room):
        return False
    room[: len(table)] = table
    room[len(table) :] = rest
    return True

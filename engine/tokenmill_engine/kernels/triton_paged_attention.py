"""Paged attention in Triton: store K and V, attend by a work list, merge what was split.

One program of `attend` serves one work item and one KV head: the query heads of that KV head, for
one row (decode) or several rows (prompts) of one sequence. A running softmax (flash attention, Dao
et al., 2022) goes over the item's keys. Items of a long decode row take a stretch of its keys each
(flash-decoding, 2023), and `merge` joins them in order. Which items there are is decided on the
host, so grids do not depend on lengths and a CUDA graph can hold the launches.

Parameters in capitals are constants of the compilation. The tables are int32:

- `sequences` `[S, 4]`: first row, number of rows, tokens in the cache, first entry of `block_ids`
- `items` `[W, 4]`: sequence (-1: no item), tile of rows, stretch of keys (-1: all), part (-1: all)
- `merges` `[M, 4]`: sequence (-1: no merge), first part, number of parts, unused

The last dimension of every tensor is dense; other strides are free. Accumulation is in float32.
Slots that were never written are not read: they may hold NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)  # exponents are of base 2, as the hardware has them
MINUS_INFINITY = tl.constexpr(float("-inf"))


@triton.jit
def write_kv(
    key, value, key_cache, value_cache,
    slot_blocks, slot_offsets,
    key_row, key_head, value_row, value_head,
    key_block, key_kv_head, key_slot,
    value_block, value_kv_head, value_slot,
    NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
):  # fmt: skip
    """Grid (rows, groups of `HEADS` KV heads). Rows that pad a batch name a block nobody reads."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    real = head < NUM_KV_HEADS
    block = tl.load(slot_blocks + row).to(tl.int64)
    offset = tl.load(slot_offsets + row).to(tl.int64)
    numbers = _gather(key, row * key_row + head * key_head, real, KEY_DIM, KEY_PADDED)
    place = block * key_block + offset * key_slot + head * key_kv_head
    _scatter(key_cache, place, numbers, real, KEY_DIM, KEY_PADDED)
    numbers = _gather(value, row * value_row + head * value_head, real, VALUE_DIM, VALUE_PADDED)
    place = block * value_block + offset * value_slot + head * value_kv_head
    _scatter(value_cache, place, numbers, real, VALUE_DIM, VALUE_PADDED)


@triton.jit
def attend(
    output, part_values, part_stats,
    query, key_cache, value_cache, sinks,
    sequences, block_ids, items,
    scaling, softcap,
    query_row, query_head,
    key_block, key_kv_head, key_slot,
    value_block, value_kv_head, value_slot,
    NUM_HEADS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (items, KV heads). A tile has `ROWS` lanes: `ROWS // GROUPS` rows times their heads."""
    item = items + tl.program_id(0) * 4
    sequence = tl.load(item)
    if sequence < 0:
        return
    row, position, real, low, high = _lanes(
        sequences + sequence * 4, item, GROUPS, ROWS, SPLIT, WINDOW, CHUNK
    )
    kv_head = tl.program_id(1).to(tl.int64)
    head = kv_head * GROUPS + tl.arange(0, ROWS) % GROUPS
    queries = _gather(query, row * query_row + head * query_head, real, KEY_DIM, KEY_PADDED)
    maximum, total, weighted = _walk_keys(
        queries, position, real, low, high,
        block_ids + tl.load(sequences + sequence * 4 + 3),
        key_cache + kv_head * key_kv_head, value_cache + kv_head * value_kv_head,
        key_block, key_slot, value_block, value_slot, scaling, softcap,
        BLOCK_SIZE, KEY_DIM, KEY_PADDED, VALUE_DIM, VALUE_PADDED, ROWS, KEYS,
        WINDOW, CHUNK, HAS_SOFTCAP, PRECISION, UPCAST,
    )  # fmt: skip
    part = tl.load(item + 3)
    if part >= 0:
        place = part.to(tl.int64) * NUM_HEADS + head
        _store_stats(part_stats, place, maximum, total, real)
        _scatter(part_values, place * VALUE_PADDED, weighted, real, VALUE_PADDED, VALUE_PADDED)
    else:
        if HAS_SINKS:
            # Loaded again: beside sinks ptxas 13 spills, for sm_90, the row kept over the loop.
            row, _, _, _, _ = _lanes(
                sequences + sequence * 4, item, GROUPS, ROWS, SPLIT, WINDOW, CHUNK
            )
            total, weighted = _with_sinks(sinks + head, real, maximum, total, weighted)
        place = (row * NUM_HEADS + head) * VALUE_DIM
        _scatter(output, place, _mean(total, weighted), real, VALUE_DIM, VALUE_PADDED)


@triton.jit
def _walk_keys(
    queries, position, real, low, high,
    block_ids, key_cache, value_cache,
    key_block, key_slot, value_block, value_slot, scaling, softcap,
    BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Of one KV head -> maximum and sum `[ROWS]`, weighted values `[ROWS, VALUE_PADDED]`."""
    maximum = tl.full([ROWS], MINUS_INFINITY, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, VALUE_PADDED], tl.float32)
    for start in range(low // KEYS * KEYS, high, KEYS):
        slot = start + tl.arange(0, KEYS)
        present = (slot >= low) & (slot < high)
        block = tl.load(block_ids + slot // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
        offset = slot % BLOCK_SIZE
        place = block * key_block + offset * key_slot
        keys = _gather(key_cache, place, present, KEY_DIM, KEY_PADDED).to(queries.dtype)
        scores = _product(queries, keys.T, None, PRECISION, UPCAST) * scaling
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(scores * (2.0 / softcap)) + 1.0))  # tanh
        seen = _sees(position, slot, WINDOW, CHUNK) & real[:, None] & present[None, :]
        scores = tl.where(seen, scores * LOG2_E, MINUS_INFINITY)
        maximum, scale, base = _raise(maximum, tl.max(scores, 1))
        weights = tl.exp2(scores - base[:, None])
        total = total * scale + tl.sum(weights, 1)
        place = block * value_block + offset * value_slot
        values = _gather(value_cache, place, present, VALUE_DIM, VALUE_PADDED).to(queries.dtype)
        weighted = weighted * scale[:, None]
        weighted = _product(weights.to(queries.dtype), values, weighted, PRECISION, UPCAST)
    return maximum, total, weighted


@triton.jit
def merge(
    output, part_values, part_stats, sinks,
    sequences, merges,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (merges, groups of `HEADS` query heads). Parts are added in the order of their keys."""
    entry = merges + tl.program_id(0) * 4
    sequence = tl.load(entry)
    if sequence < 0:
        return
    first = tl.load(entry + 1).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
    real = head < NUM_HEADS
    maximum = tl.full([HEADS], MINUS_INFINITY, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    weighted = tl.zeros([HEADS, VALUE_PADDED], tl.float32)
    for part in range(tl.load(entry + 2)):
        place = (first + part) * NUM_HEADS + head
        part_maximum, part_total = _load_stats(part_stats, place, real)
        values = _gather(part_values, place * VALUE_PADDED, real, VALUE_PADDED, VALUE_PADDED)
        maximum, scale, base = _raise(maximum, part_maximum)
        part_scale = tl.exp2(part_maximum - base)
        total = total * scale + part_total * part_scale
        weighted = weighted * scale[:, None] + values * part_scale[:, None]
    if HAS_SINKS:
        total, weighted = _with_sinks(sinks + head, real, maximum, total, weighted)
    place = (tl.load(sequences + sequence * 4).to(tl.int64) * NUM_HEADS + head) * VALUE_DIM
    _scatter(output, place, _mean(total, weighted), real, VALUE_DIM, VALUE_PADDED)


@triton.jit
def _lanes(
    sequence, item,
    GROUPS: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """-> row, position and reality of each lane; keys `low … high - 1` are what the item needs."""
    first_row = tl.load(sequence)
    num_rows = tl.load(sequence + 1)
    kv_len = tl.load(sequence + 2)
    lane = tl.arange(0, ROWS)
    first = tl.load(item + 1) * (ROWS // GROUPS)  # row of the sequence that the tile begins with
    row = first + lane // GROUPS
    real = (lane < ROWS // GROUPS * GROUPS) & (row < num_rows)
    context = kv_len - num_rows
    low = _first_seen(context + first, WINDOW, CHUNK)
    high = tl.minimum(kv_len, context + first + ROWS // GROUPS)
    if SPLIT > 0:
        stretch = tl.load(item + 2)
        if stretch >= 0:
            low = tl.maximum(low, stretch * SPLIT)
            high = tl.minimum(high, (stretch + 1) * SPLIT)
    return (first_row + row).to(tl.int64), context + row, real, low, high


@triton.jit
def _first_seen(position, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    first = position * 0
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position // CHUNK * CHUNK)
    return first


@triton.jit
def _sees(position, slot, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """-> `[lanes, slots]`"""
    first = _first_seen(position, WINDOW, CHUNK)
    return (slot[None, :] <= position[:, None]) & (slot[None, :] >= first[:, None])


@triton.jit
def _raise(maximum, other):
    """-> the new maximum, what to scale older sums by, and a finite base for exponents."""
    higher = tl.maximum(maximum, other)
    base = tl.where(higher == MINUS_INFINITY, 0.0, higher)  # a lane that saw nothing yet
    return higher, tl.exp2(maximum - base), base


@triton.jit
def _with_sinks(sinks, real, maximum, total, weighted):
    """A sink is one more logit that has no value."""
    sink = tl.load(sinks, mask=real, other=MINUS_INFINITY).to(tl.float32) * LOG2_E
    _, scale, base = _raise(maximum, sink)
    return total * scale + tl.exp2(sink - base), weighted * scale[:, None]


@triton.jit
def _mean(total, weighted):
    """Zero where nothing was seen: rows that pad a batch."""
    return weighted / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _store_stats(stats, places, maximum, total, real):
    tl.store(stats + places * 2, maximum, mask=real)
    tl.store(stats + places * 2 + 1, total, mask=real)


@triton.jit
def _load_stats(stats, places, real):
    maximum = tl.load(stats + places * 2, mask=real, other=MINUS_INFINITY)
    return maximum, tl.load(stats + places * 2 + 1, mask=real, other=0.0)


@triton.jit
def _product(left, right, accumulator, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    """In float32. `UPCAST`: the interpreter would multiply the bit patterns of bfloat16."""
    if UPCAST:
        left = left.to(tl.float32)
        right = right.to(tl.float32)
    return tl.dot(left, right, accumulator, input_precision=PRECISION)


@triton.jit
def _gather(source, places, real, DIM: tl.constexpr, PADDED: tl.constexpr):
    """-> `[places, PADDED]`, zero where there is nothing."""
    dims = tl.arange(0, PADDED)
    mask = real[:, None] & (dims < DIM)[None, :]
    return tl.load(source + places[:, None] + dims[None, :], mask=mask, other=0.0)


@triton.jit
def _scatter(
    target, places, numbers, real,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    dims = tl.arange(0, PADDED)
    mask = real[:, None] & (dims < DIM)[None, :]
    pointers = target + places[:, None] + dims[None, :]
    tl.store(pointers, numbers.to(target.dtype.element_ty), mask=mask)

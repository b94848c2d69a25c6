"""What surrounds the products of a transformer layer, in Triton: norms, gates, heads on their way.

Each kernel does in one launch what takes torch two to ten. Numbers are computed in float32 and
rounded where the models' own code rounds: a sum before it is normalised, a normalised number before
it is scaled (`ROUNDS_FIRST`) or rotated, an activation before it is multiplied. A row's result does
not depend on the other rows. The last dimension of every tensor is dense; parameters in capitals
are constants of the compilation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenmill_engine.kernels.triton_paged_attention import _gather, _scatter

# What a kernel reads of its module must be marked as constant; as in `fused_operations.py`.
SILU, GELU_TANH = tl.constexpr(1), tl.constexpr(2)
SQRT_HALF = tl.constexpr(0.7071067811865476)
SQRT_TWO_OVER_PI = tl.constexpr(0.7978845608028654)


@triton.jit
def rms_norm(
    normed, total,
    rows, residual, weight,
    epsilon, row_stride, residual_stride,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Grid (rows,). With a residual, `total` gets the sum and `normed` the sum normalised."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED)
    real = columns < SIZE
    numbers = tl.load(rows + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        place = residual + row * residual_stride + columns
        numbers += tl.load(place, mask=real, other=0.0).to(tl.float32)
        rounded = numbers.to(total.dtype.element_ty)
        tl.store(total + row * SIZE + columns, rounded, mask=real)
        numbers = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + epsilon)
    weights = tl.load(weight + columns, mask=real, other=0.0)
    numbers = _scaled(numbers, scale, weights, normed.dtype.element_ty, ROUNDS_FIRST)
    tl.store(normed + row * SIZE + columns, numbers.to(normed.dtype.element_ty), mask=real)


@triton.jit
def gated(
    output, pairs,
    row_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Grid (rows, blocks of `BLOCK` columns). A row of `pairs` holds all gates, then all ups."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = columns < SIZE
    gates = tl.load(pairs + row * row_stride + columns, mask=real, other=0.0).to(tl.float32)
    ups = tl.load(pairs + row * row_stride + SIZE + columns, mask=real, other=0.0).to(tl.float32)
    opened = _activated(gates, GATE).to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + row * SIZE + columns, (opened * ups).to(output.dtype.element_ty), mask=real)


@triton.jit
def prepare_and_write(
    prepared,
    query, key, value, key_cache, value_cache,
    query_norm, key_norm, cos, sin, slot_blocks, slot_offsets, epsilon,
    query_row, query_head, key_row, key_head, value_row, value_head, cos_row, sin_row,
    key_block, key_kv_head, key_slot, value_block, value_kv_head, value_slot,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr, KEY_PADDED: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr,
    ROTARY: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr, HAS_KEY_NORM: tl.constexpr,
):  # fmt: skip
    """Grid (rows, groups of `HEADS` query heads, then of `HEADS` KV heads).

    Queries go to `prepared` `[T, H, D]`, keys and values into the cache. `ROTARY`: the first so
    many numbers of a head are rotated, each with the one half as many further on.
    """
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    query_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    cos += row * cos_row
    sin += row * sin_row
    if group < query_groups:
        head = (group * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        queries = _prepared(
            query + row * query_row, head * query_head, head < NUM_HEADS,
            query_norm, cos, sin, epsilon,
            HAS_QUERY_NORM, ROUNDS_FIRST, ROTARY, KEY_DIM, KEY_PADDED,
        )  # fmt: skip
        place = (row * NUM_HEADS + head) * KEY_DIM
        _scatter(prepared, place, queries, head < NUM_HEADS, KEY_DIM, KEY_PADDED)
    else:
        head = ((group - query_groups) * HEADS + tl.arange(0, HEADS)).to(tl.int64)
        keys = _prepared(
            key + row * key_row, head * key_head, head < NUM_KV_HEADS,
            key_norm, cos, sin, epsilon,
            HAS_KEY_NORM, ROUNDS_FIRST, ROTARY, KEY_DIM, KEY_PADDED,
        )  # fmt: skip
        # The cache may have another type than the model, to which numbers are rounded first.
        _store(
            key_cache, keys.to(key.dtype.element_ty), slot_blocks + row, slot_offsets + row,
            head, key_block, key_kv_head, key_slot, NUM_KV_HEADS, KEY_DIM, KEY_PADDED,
        )  # fmt: skip
        place = row * value_row + head * value_head
        values = _gather(value, place, head < NUM_KV_HEADS, VALUE_DIM, VALUE_PADDED)
        _store(
            value_cache, values, slot_blocks + row, slot_offsets + row,
            head, value_block, value_kv_head, value_slot, NUM_KV_HEADS, VALUE_DIM, VALUE_PADDED,
        )  # fmt: skip


@triton.jit
def _store(
    cache, numbers, slot_block, slot_offset,
    head, block_stride, head_stride, slot_stride,
    NUM_KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """KV heads of one row to its place in the cache."""
    place = tl.load(slot_block).to(tl.int64) * block_stride
    place += tl.load(slot_offset).to(tl.int64) * slot_stride
    _scatter(cache, place + head * head_stride, numbers, head < NUM_KV_HEADS, DIM, PADDED)


@triton.jit
def _prepared(
    source, places, real, norm, cos, sin, epsilon,
    HAS_NORM: tl.constexpr, ROUNDS_FIRST: tl.constexpr, ROTARY: tl.constexpr,
    DIM: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """-> `[places, PADDED]` float32: heads of one row, normalised and then rotated."""
    dims = tl.arange(0, PADDED)
    kind: tl.constexpr = source.dtype.element_ty
    numbers = _gather(source, places, real, DIM, PADDED).to(tl.float32)
    scale = tl.full([1], 1.0, tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(numbers * numbers, 1) / DIM + epsilon)[:, None]
        numbers = _normed(numbers, scale, norm, dims, kind, ROUNDS_FIRST, DIM)
    if ROTARY > 0:
        half: tl.constexpr = ROTARY // 2
        turned = dims < ROTARY
        # A second load, from the nearest cache, instead of an exchange between threads.
        others = tl.where(dims < half, dims + half, dims - half)
        partners = tl.load(
            source + places[:, None] + others[None, :],
            mask=real[:, None] & turned[None, :],
            other=0.0,
        ).to(tl.float32)
        if HAS_NORM:
            partners = _normed(partners, scale, norm, others, kind, ROUNDS_FIRST, ROTARY)
        cosines = tl.load(cos + dims, mask=turned, other=1.0).to(tl.float32)
        sines = tl.load(sin + dims, mask=turned, other=0.0).to(tl.float32)
        sines = tl.where(dims < half, -sines, sines)
        numbers = numbers * cosines[None, :] + partners * sines[None, :]
    return numbers


@triton.jit
def _normed(
    numbers, scale, norm, columns, kind: tl.constexpr,
    ROUNDS_FIRST: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    weights = tl.load(norm + columns, mask=(columns >= 0) & (columns < DIM), other=0.0)
    numbers = _scaled(numbers, scale, weights[None, :], kind, ROUNDS_FIRST)
    return numbers.to(kind).to(tl.float32)


@triton.jit
def _scaled(numbers, scale, weights, kind: tl.constexpr, ROUNDS_FIRST: tl.constexpr):
    numbers *= scale
    if ROUNDS_FIRST:
        numbers = numbers.to(kind).to(tl.float32)
    return numbers * weights


@triton.jit
def _activated(x, GATE: tl.constexpr):
    # Exponentials of nothing above 0: none overflows.
    if GATE == SILU:
        small = tl.exp(-tl.abs(x))
        result = x * tl.where(x < 0, small, 1.0) / (1 + small)
    elif GATE == GELU_TANH:
        inner = SQRT_TWO_OVER_PI * (x + 0.044715 * x * x * x)
        small = tl.exp(-2 * tl.abs(inner))
        tanh = (1 - small) / (1 + small)
        result = 0.5 * x * (1 + tl.where(inner < 0, -tanh, tanh))
    else:
        result = 0.5 * x * (1 + tl.erf(x * SQRT_HALF))
    return result

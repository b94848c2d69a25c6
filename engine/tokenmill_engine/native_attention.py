"""Paged attention on a CPU by the native kernel in `kernels/paged_attention.cpp`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from .attention import AttentionMetadata, AttentionRule, AttentionSpec, LayerCache
from .fused_operations import HeadPreparation, Norm
from .kernels.build import KernelUnavailable, load_kernel

#: What the kernel computes in float32 from.
DTYPES = (torch.float32, torch.bfloat16)

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class NativeStep(ctypes.Structure):
    """`struct Step` of the source."""

    _fields_ = (
        *((name, _INT) for name in ("num_rows", "num_seqs", "block_size")),
        *((name, _POINTER) for name in ("cu_rows", "kv_lens", "block_ids", "cu_blocks")),
        *((name, _POINTER) for name in ("slot_blocks", "slot_offsets")),
    )


class NativeCall(ctypes.Structure):
    """`struct Call` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("query", "key", "value", "output")),
        *((name, _POINTER) for name in ("key_cache", "value_cache", "sinks")),
        *((name, _POINTER) for name in ("query_norm", "key_norm", "cos", "sin")),
        *((name, _INT) for name in ("query_row", "query_head", "key_row", "key_head")),
        *((name, _INT) for name in ("value_row", "value_head", "num_heads", "num_kv_heads")),
        *((name, _INT) for name in ("key_dim", "value_dim", "window", "chunk")),
        ("rotary_dim", _INT),
        *((name, ctypes.c_float) for name in ("scaling", "softcap", "epsilon")),
        *((name, ctypes.c_int32) for name in ("norm_rounds_first", "is_bfloat16", "num_threads")),
    )


class NativePagedAttention:
    """`AttentionBackend` with K as `[block, Hkv, D, slot]` and V as `[block, Hkv, slot, Dv]`.

    In bfloat16, where the processor multiplies tiles, the numbers of a page are in another order
    (`kernels/tiled_pages.h`).

    Raises KernelUnavailable where the kernel cannot be built or does not know a type of `specs`.
    """

    prepares_heads = True

    def __init__(self, specs: Iterable[AttentionSpec]) -> None:
        for spec in specs:
            if spec.dtype not in DTYPES:
                raise KernelUnavailable(f"the kernel does not compute in {spec.dtype}")
        self.function = load_kernel("paged_attention").tokenmill_write_and_attend
        self.function.restype = None
        self.function.argtypes = (ctypes.POINTER(NativeStep), ctypes.POINTER(NativeCall))
        self._meta: AttentionMetadata | None = None  # the step that `_step` describes
        self._step = NativeStep()

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        head = (num_blocks, spec.num_kv_heads)
        return (*head, spec.key_dim, block_size), (*head, block_size, spec.value_dim)

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
        *,
        heads: HeadPreparation | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.write_and_attend`; `heads` is done to Q and K on the way."""
        query, key, value = map(_dense_last, (query, key, value))
        output = query.new_empty(len(query), query.shape[1], value.shape[-1])
        sinks = plain_sinks(rule)
        call = native_call(layer, rule, sinks, query.dtype)
        call.query, call.query_row, call.query_head = query.data_ptr(), *query.stride()[:2]
        call.key, call.key_row, call.key_head = key.data_ptr(), *key.stride()[:2]
        call.value, call.value_row, call.value_head = value.data_ptr(), *value.stride()[:2]
        call.output, call.num_heads = output.data_ptr(), query.shape[1]
        (_, call.num_kv_heads, call.key_dim), call.value_dim = key.shape, value.shape[2]
        call.num_threads = torch.get_num_threads()
        if heads is not None:
            call.cos, call.sin = heads.cos.data_ptr(), heads.sin.data_ptr()
            call.rotary_dim = heads.cos.shape[-1]
            add_head_norms(call, heads.query_norm, heads.key_norm)
        self.function(self.step(meta, len(query)), call)  # without the GIL: others may publish
        return output

    def step(self, meta: AttentionMetadata, num_rows: int) -> NativeStep:
        """Valid while this object is not asked for another step."""
        if meta is not self._meta:
            self._meta, self._step = meta, _describe(meta, num_rows)
        return self._step


def plain_sinks(rule: AttentionRule) -> torch.Tensor | None:
    """`[H]` float32, dense"""
    return None if rule.sinks is None else rule.sinks.detach().float().contiguous()


def native_call(
    layer: LayerCache, rule: AttentionRule, sinks: torch.Tensor | None, dtype: torch.dtype
) -> NativeCall:
    """What does not depend on Q, K and V; points into the cache and `plain_sinks(rule)`."""
    return NativeCall(
        key_cache=layer.key.data_ptr(),
        value_cache=layer.value.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        window=rule.window or 0,
        chunk=rule.chunk or 0,
        scaling=rule.scaling,
        softcap=rule.softcap or 0.0,
        is_bfloat16=dtype == torch.bfloat16,
    )


def add_head_norms(call: NativeCall, query_norm: Norm | None, key_norm: Norm | None) -> None:
    norm = query_norm or key_norm
    if norm is not None:
        call.epsilon, call.norm_rounds_first = norm.epsilon, norm.rounds_first
    if query_norm is not None:
        call.query_norm = query_norm.weight.data_ptr()
    if key_norm is not None:
        call.key_norm = key_norm.weight.data_ptr()


def _describe(meta: AttentionMetadata, num_rows: int) -> NativeStep:
    """Pointers into arrays that live as long as `meta`, which the backend holds."""
    return NativeStep(
        num_rows=num_rows,
        num_seqs=len(meta.kv_lens),
        block_size=meta.block_size,
        cu_rows=_address(meta.cu_rows),
        kv_lens=_address(meta.kv_lens),
        block_ids=_address(meta.block_ids),
        cu_blocks=_address(meta.cu_blocks),
        slot_blocks=meta.slot_blocks.data_ptr(),
        slot_offsets=meta.slot_offsets.data_ptr(),
    )


def _address(array: NDArray[np.int64]) -> int:
    return int(array.ctypes.data)


def _dense_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

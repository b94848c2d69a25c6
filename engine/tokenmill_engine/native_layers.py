"""Fused layers that follow each other, run by one call of `kernels/layers.cpp`.

The kernels are those that the layers call one by one, with the same arguments, so the results are
the same bit by bit. What is saved is the interpreter's share: five calls a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .attention import CallKey, ForwardContext, LayerCache
from .fused_modules import FusedLayer
from .kernels.build import load_kernel
from .linear_kernel import LinearCall, PackedWeight, linear_function
from .native_attention import (
    NativeCall,
    NativePagedAttention,
    NativeStep,
    add_head_norms,
    native_call,
    plain_sinks,
)

#: Rows whose numbers go from product to product, as long as these are in a cache.
CHUNK_ROWS = 512

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Layer(ctypes.Structure):
    """`struct Layer` of the source."""

    _fields_ = (
        *((name, LinearCall) for name in ("query_key_value", "attention_out", "gate_up", "down")),
        ("attention", NativeCall),
    )


class _Layers(ctypes.Structure):
    """`struct Layers` of the source."""

    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        *((name, _POINTER) for name in ("multiply", "attend")),
        ("step", ctypes.POINTER(NativeStep)),
        *((name, _POINTER) for name in ("x", "y", "heads", "attended", "between", "gated")),
        *((name, _POINTER) for name in ("cos", "sin")),
        *((name, _INT) for name in ("num_layers", "num_rows", "chunk_rows")),
        ("num_threads", ctypes.c_int32),
    )


class NativeLayers:
    """`Stack` on the CPU, of layers whose products are `PackedWeight`.

    Raises KernelUnavailable where the kernel cannot be built.
    """

    def __init__(self, layers: Sequence[FusedLayer]) -> None:
        self._layers = layers
        self._run: Any = load_kernel("layers").tokenmill_run_layers
        self._run.argtypes, self._run.restype = (ctypes.POINTER(_Layers),), None
        self._sinks = [plain_sinks(layer.attention.call.rule) for layer in layers]
        self._caches: Mapping[CallKey, LayerCache] | None = None  # that `_calls` point into
        self._calls = (_Layer * len(layers))()
        self._memory = torch.empty(0, dtype=layers[0].attention.out.dtype)

    @classmethod
    def fits(cls, layers: Sequence[FusedLayer]) -> bool:
        """Whether all are in one type and as wide as each other."""
        dtype, width = layers[0].attention.out.dtype, layers[0].attention.out.outputs
        return all(
            product.dtype == dtype and product.outputs == width
            for layer in layers
            for product in (layer.attention.out, layer.mlp.down)
        )

    def run(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
    ) -> torch.Tensor:
        """See `Stack.run`."""
        backend = context.backend
        assert isinstance(backend, NativePagedAttention)
        cos, sin = (part[0].contiguous() for part in rotary)
        x = x.contiguous()
        if context.layers is not self._caches:
            self._prepare(context.layers, cos.shape[-1])
        y = torch.empty_like(x)
        places = self._places(len(x))
        step = backend.step(context.metadata, len(x))
        all_layers = _Layers(
            layers=self._calls,
            multiply=ctypes.cast(linear_function(), _POINTER),
            attend=ctypes.cast(backend.function, _POINTER),
            step=ctypes.pointer(step),
            x=x.data_ptr(),
            y=y.data_ptr(),
            **places,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            num_layers=len(self._layers),
            num_rows=len(x),
            chunk_rows=CHUNK_ROWS,
            num_threads=torch.get_num_threads(),
        )
        self._run(all_layers)  # without the GIL
        return y

    def _prepare(self, caches: Mapping[CallKey, LayerCache], rotary_dim: int) -> None:
        for number, (layer, sinks) in enumerate(zip(self._layers, self._sinks, strict=True)):
            attention, mlp = layer.attention, layer.mlp
            into, between = layer.norms
            rule, spec = attention.call.rule, attention.call.spec
            call = native_call(caches[attention.call.key], rule, sinks, attention.out.dtype)
            call.num_heads, call.num_kv_heads = attention.num_heads, spec.num_kv_heads
            call.key_dim, call.value_dim = spec.key_dim, spec.value_dim
            call.rotary_dim = rotary_dim if attention.rotates else 0
            add_head_norms(call, *attention.norms)
            self._calls[number] = _Layer(
                query_key_value=_packed(attention.query_key_value).call(into),
                attention_out=_packed(attention.out).call(),
                gate_up=_packed(mlp.gate_up).call(between),
                down=_packed(mlp.down).call(),
                attention=call,
            )
        self._caches = caches

    def _places(self, num_rows: int) -> dict[str, int]:
        """Addresses of the memory for results on the way, kept from step to step."""
        calls = self._calls
        widths = {
            "heads": max(call.query_key_value.outputs for call in calls),
            "attended": max(call.attention_out.inputs for call in calls),
            "between": max(call.attention_out.outputs for call in calls),
            "gated": max(call.gate_up.outputs for call in calls),
        }
        # Rows of 64 bytes: what begins in a line of a cache ends there.
        chunk = min(num_rows, CHUNK_ROWS)
        rows = {"heads": num_rows, "attended": num_rows, "between": chunk, "gated": chunk}
        sizes = {name: -(-rows[name] * width // 64) * 64 for name, width in widths.items()}
        if self._memory.numel() < sum(sizes.values()):
            self._memory = self._memory.new_empty(sum(sizes.values()))
        address, places = self._memory.data_ptr(), {}
        for name, size in sizes.items():
            places[name] = address
            address += size * self._memory.itemsize
        return places


def _packed(product: object) -> PackedWeight:
    assert isinstance(product, PackedWeight)
    return product

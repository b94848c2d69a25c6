"""The kernel in `kernels/linear.cpp`, typed, and weights in its packed form."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from .fused_operations import Norm
from .kernels.build import KernelUnavailable, load_kernel

DTYPES = (torch.float32, torch.bfloat16)

#: How the kernel multiplies bfloat16 by bfloat16, by the number that its source gives.
BFLOAT16_PRODUCTS = (
    "in float32",
    "in float32, faster than AVX512-BF16 on this processor",
    "in pairs (AVX512-BF16)",
    "in tiles (AMX)",
)

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class LinearCall(ctypes.Structure):
    """`struct Linear` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "residual", "bias", "norm", "y")),
        *((name, _INT) for name in ("num_rows", "x_row", "inputs", "outputs")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("norm_rounds_first", "gate", "is_bfloat16")),
        *((name, ctypes.c_int32) for name in ("packed_as_bfloat16", "num_threads")),
    )


class _RmsNorm(ctypes.Structure):
    """`struct RmsNorm` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "y")),
        *((name, _INT) for name in ("num_rows", "x_row", "size")),
        ("epsilon", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("rounds_first", "is_bfloat16", "num_threads")),
    )


@cache
def _kernel() -> Any:
    """Raises KernelUnavailable."""
    library = load_kernel("linear")
    library.tokenmill_linear.argtypes = (ctypes.POINTER(LinearCall),)
    library.tokenmill_linear.restype = None
    library.tokenmill_rms_norm.argtypes = (ctypes.POINTER(_RmsNorm),)
    library.tokenmill_rms_norm.restype = None
    library.tokenmill_packed_size.argtypes = (_INT, _INT)
    library.tokenmill_packed_size.restype = _INT
    places: list[Any] = [_POINTER, *[_INT] * 4, _POINTER, ctypes.c_int32]
    library.tokenmill_unpack.argtypes, library.tokenmill_unpack.restype = places, None
    library.tokenmill_pack.argtypes = [*places, ctypes.c_int32]
    library.tokenmill_pack.restype = None
    library.tokenmill_fits_bfloat16.argtypes = (_POINTER, _INT, ctypes.c_int32)
    library.tokenmill_fits_bfloat16.restype = ctypes.c_int32
    library.tokenmill_bfloat16_products.argtypes = ()
    library.tokenmill_bfloat16_products.restype = ctypes.c_int32
    return library


def linear_function() -> Any:
    """`tokenmill_linear`, for callers that are native themselves. Raises KernelUnavailable."""
    return _kernel().tokenmill_linear


def bfloat16_products() -> int:
    """Which of `BFLOAT16_PRODUCTS` this process computes with; 0: it was compiled without others.

    Raises KernelUnavailable.
    """
    return int(_kernel().tokenmill_bfloat16_products())


def normalise(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """`[T, K]`, float32 or bfloat16 on the CPU."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    call = _RmsNorm(
        x=x.data_ptr(),
        weight=norm.weight.data_ptr(),
        y=y.data_ptr(),
        num_rows=len(x),
        x_row=x.stride(0),
        size=x.shape[1],
        epsilon=norm.epsilon,
        rounds_first=norm.rounds_first,
        is_bfloat16=x.dtype == torch.bfloat16,
        num_threads=torch.get_num_threads(),
    )
    _kernel().tokenmill_rms_norm(call)
    return y


class PackedWeight:
    """Weights `[N, K]` that multiply the same x, packed as one.

    Weights that are exact in bfloat16 are kept so, whatever the type of the layer: half the memory
    to read, and the same results. `gate`, an activation, takes two weights: gate and up.

    Raises KernelUnavailable where the kernel cannot be built or does not know the weights' type.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        *,
        bias: torch.Tensor | None = None,
        gate: int = 0,
    ) -> None:
        self.dtype = weights[0].dtype
        if self.dtype not in DTYPES or weights[0].device.type != "cpu":
            raise KernelUnavailable(f"the kernel does not compute in {self.dtype}")
        kernel = _kernel()
        self._call = kernel.tokenmill_linear
        parts = [weight.detach().float().contiguous() for weight in weights]
        if not gate:
            parts = [torch.cat(parts) if len(parts) > 1 else parts[0]]
        self.outputs, self.inputs = parts[0].shape
        self._step = len(parts)
        self._as_bfloat16 = all(map(_is_bfloat16, parts))
        self._packed = torch.empty(
            kernel.tokenmill_packed_size(self.outputs, self.inputs) * len(parts),
            dtype=torch.bfloat16 if self._as_bfloat16 else torch.float32,
        )
        for number, part in enumerate(parts):
            kernel.tokenmill_pack(part.data_ptr(), *self._place(number), torch.get_num_threads())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._template = LinearCall(
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            gate=gate,
            inputs=self.inputs,
            outputs=self.outputs,
            is_bfloat16=self.dtype == torch.bfloat16,
            packed_as_bfloat16=self._as_bfloat16,
        )

    def unpacked(self, number: int = 0) -> torch.Tensor:
        """`[N, K]` in the original type; with a gate, gate is number 0 and up number 1."""
        rows = torch.empty(self.outputs, self.inputs)
        _kernel().tokenmill_unpack(
            self._packed.data_ptr(), *self._place(number, of=rows.data_ptr())
        )
        return rows.to(self.dtype)

    def multiply(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual + norm(x) · Wᵀ` of x `[T, K]` and residual `[T, N]`, on the CPU."""
        if x.shape[1] != self.inputs or x.dtype != self.dtype:
            raise ValueError(f"takes [T, {self.inputs}] {self.dtype}, not {x.shape} {x.dtype}")
        if x.stride(-1) != 1:
            x = x.contiguous()
        y = x.new_empty(len(x), self.outputs)
        if not len(x):
            return y
        call = self.call(norm)
        call.x, call.x_row, call.num_rows = x.data_ptr(), x.stride(0), len(x)
        call.y = y.data_ptr()
        if residual is not None:
            residual = residual.contiguous()
            call.residual = residual.data_ptr()
        call.num_threads = torch.get_num_threads()
        self._call(call)  # without the GIL
        return y

    def call(self, norm: Norm | None = None) -> LinearCall:
        """All that does not depend on x; points into this object and the norm."""
        call = LinearCall.from_buffer_copy(self._template)
        if norm is not None:
            call.norm, call.epsilon = norm.weight.data_ptr(), norm.epsilon
            call.norm_rounds_first = norm.rounds_first
        return call

    def _place(self, number: int, of: int | None = None) -> tuple[int, ...]:
        target = self._packed.data_ptr() if of is None else of
        return self.outputs, self.inputs, number, self._step, target, self._as_bfloat16


def _is_bfloat16(weight: torch.Tensor) -> bool:
    """Of dense float32 weights."""
    threads = torch.get_num_threads()
    return bool(_kernel().tokenmill_fits_bfloat16(weight.data_ptr(), weight.numel(), threads))

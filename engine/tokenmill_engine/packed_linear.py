"""Linear layers on a CPU with their weights packed once, by the kernel in `kernels/linear.cpp`."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .kernels.build import KernelUnavailable, load_kernel

logger = logging.getLogger(__name__)

DTYPES = (torch.float32, torch.bfloat16)
#: Largest difference from torch's own result that a packed layer may show, as a share of the
#: result's standard deviation: both only sum up in another order, or round to bfloat16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}

_INT, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Linear(ctypes.Structure):
    """`struct Linear` of the source."""

    _fields_ = (
        *((name, _POINTER) for name in ("x", "weight", "bias", "y")),
        *((name, _INT) for name in ("num_rows", "x_row", "inputs", "outputs")),
        *((name, ctypes.c_int32) for name in ("is_bfloat16", "packed_as_bfloat16", "num_threads")),
    )


class _Kernel:
    """The functions of the library, typed."""

    def __init__(self) -> None:
        library = load_kernel("linear")
        self.linear = library.tokenmill_linear
        self.linear.argtypes, self.linear.restype = (ctypes.POINTER(_Linear),), None
        self.packed_size = library.tokenmill_packed_size
        self.packed_size.argtypes, self.packed_size.restype = (_INT, _INT), _INT
        self.pack = library.tokenmill_pack
        self.unpack = library.tokenmill_unpack
        for function in (self.pack, self.unpack):
            function.argtypes = (_POINTER, _INT, _INT, _POINTER, ctypes.c_int32)
            function.restype = None


class PackedLinear(nn.Module):
    """An `nn.Linear` that computes from packed weights; `weight` rebuilds the original.

    Weights that are exact in bfloat16 are kept so, whatever the type of the layer: half the memory
    to read, and the same results.

    Raises KernelUnavailable where the kernel cannot be built or does not know the layer's type.
    """

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        if weight.dtype not in DTYPES or weight.device.type != "cpu":
            raise KernelUnavailable(f"the kernel does not compute in {weight.dtype}")
        self._kernel = _Kernel()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = weight.dtype
        rows = weight.float().contiguous()
        self._as_bfloat16 = bool((rows.view(torch.int32) & 0xFFFF).eq(0).all())
        self._packed = torch.empty(
            self._kernel.packed_size(*weight.shape),
            dtype=torch.bfloat16 if self._as_bfloat16 else torch.float32,
        )
        self._kernel.pack(
            rows.data_ptr(), *weight.shape, self._packed.data_ptr(), self._as_bfloat16
        )
        bias = linear.bias
        self.bias = None if bias is None else bias.detach()
        self._bias = None if bias is None else bias.detach().float().contiguous()

    @property
    def weight(self) -> torch.Tensor:
        """`[out_features, in_features]`, for models that read it beside calling the layer."""
        rows = torch.empty(self.out_features, self.in_features)
        self._kernel.unpack(
            self._packed.data_ptr(), *rows.shape, rows.data_ptr(), self._as_bfloat16
        )
        return rows.to(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in_features]` to `[…, out_features]`"""
        if x.dtype != self.dtype or x.device.type != "cpu":
            return functional.linear(x, self.weight.to(x.device), self.bias)
        rows = x.reshape(-1, self.in_features)
        if rows.stride(-1) != 1:
            rows = rows.contiguous()
        y = x.new_empty(len(rows), self.out_features)
        call = _Linear(
            x=rows.data_ptr(),
            weight=self._packed.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            y=y.data_ptr(),
            num_rows=len(rows),
            x_row=rows.stride(0),
            inputs=self.in_features,
            outputs=self.out_features,
            is_bfloat16=self.dtype == torch.bfloat16,
            packed_as_bfloat16=self._as_bfloat16,
            num_threads=torch.get_num_threads(),
        )
        if len(rows):
            self._kernel.linear(call)
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replaces the linear layers of `model` in place; returns how many.

    A layer whose packed form gives other results on random rows stays as it is, and so does the
    whole model where the kernel cannot be had; both are logged.
    """
    packed, kept = 0, 0
    for parent, name, linear in _linears(model):
        try:
            replacement = PackedLinear(linear)
        except KernelUnavailable as why:
            logger.warning("linear layers: plain torch: %s", why)
            return packed
        if _agree(linear, replacement):
            setattr(parent, name, replacement)
            packed += 1
        else:
            kept += 1
    if kept:
        logger.warning(
            "linear layers: %d give other results when packed and stay as they are", kept
        )
    logger.info("linear layers: %d packed", packed)
    return packed


def _linears(model: nn.Module) -> list[tuple[nn.Module, str, nn.Linear]]:
    """Exactly `nn.Linear`: a subclass computes something else."""
    return [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    ]


def _agree(linear: nn.Linear, packed: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, linear.in_features, generator=generator).to(linear.weight.dtype)
    expected, got = linear(x).float(), packed(x).float()
    difference, spread = float((got - expected).abs().max()), float(expected.std())
    return difference <= TOLERANCES[linear.weight.dtype] * spread  # False for NaN

"""The operations of fused modules on a GPU: torch's products, and Triton for what surrounds them.

A pre-norm layer takes eight launches beside its attention: norm, QKV, heads and cache, output, sum
and norm, gate and up, activation, down with sum. Torch alone takes 37, or 53 with normalised heads.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Sequence

import torch
from torch.nn import functional

from .fused_modules import FusedLayer
from .fused_operations import ACTIVATIONS, Norm, Product, Stack
from .kernels.build import KernelUnavailable
from .triton_tiles import DTYPES, power_of_two
from .triton_writes import load_elementwise_kernels

#: Numbers of a row that one program holds; wider rows would spill registers.
MAX_NORM_SIZE = 16_384
GATED_BLOCK = 1024


class TritonOperations:
    """`Operations` of a GPU. Raises KernelUnavailable where there is no Triton."""

    dtypes: Collection[torch.dtype] = DTYPES
    gates: Collection[int] = tuple(ACTIVATIONS)

    def __init__(self) -> None:
        self.kernels = load_elementwise_kernels()
        self.errors: tuple[type[Exception], ...] = (
            importlib.import_module("triton.errors").TritonError,
        )

    def normalise(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """See `Operations.normalise`. Raises ValueError for rows that are too wide."""
        return self._normalise(x, None, norm)[1]

    def product(
        self, weights: Sequence[torch.Tensor], *, bias: torch.Tensor | None = None, gate: int = 0
    ) -> MergedWeight:
        return MergedWeight(self, weights, bias, gate)

    def add_product(
        self, product: Product, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor, Norm | None]:
        """See `Operations.add_product`: normalised already, in the launch that adds."""
        total, normed = self._normalise(product.multiply(x), residual, norm)
        return total, normed, None

    def stack(self, layers: Sequence[FusedLayer]) -> Stack | None:
        """None: launches are recorded in graphs, which cost the host less still."""
        return None

    def open_gates(self, pairs: torch.Tensor, gate: int) -> torch.Tensor:
        """`[T, 2 N]`, gates before ups, to `[T, N]`."""
        size = pairs.shape[1] // 2
        output = pairs.new_empty(len(pairs), size)
        block = min(GATED_BLOCK, power_of_two(size))
        if len(pairs):
            self.kernels.gated[len(pairs), -(-size // block)](
                output, pairs, pairs.stride(0), **gated_constants(size, gate)
            )
        return output

    def _normalise(
        self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum, if there is one, and what is normalised."""
        size = x.shape[1]
        if size > MAX_NORM_SIZE or len(norm.weight) != size:
            raise ValueError(f"norms {len(norm.weight)} numbers, at most {MAX_NORM_SIZE}: {size}")
        x = _dense_last(x)
        normed = x.new_empty(x.shape)
        added = x if residual is None else _dense_last(residual)
        total = x if residual is None else x.new_empty(x.shape)
        if len(x):
            self.kernels.rms_norm[(len(x),)](
                normed,
                total,
                x,
                added,
                norm.weight,
                norm.epsilon,
                x.stride(0),
                added.stride(0),
                **norm_constants(size, norm, has_residual=residual is not None),
                num_warps=norm_warps(size),
            )
        return total, normed


class MergedWeight:
    """A `Product` by torch; two or more weights lie behind one another in a copy of their own."""

    def __init__(
        self,
        operations: TritonOperations,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        gate: int,
    ) -> None:
        self.dtype = weights[0].dtype
        if self.dtype not in DTYPES or any(weight.dtype != self.dtype for weight in weights):
            raise KernelUnavailable(f"the kernels do not compute in {self.dtype}")
        parts = [weight.detach() for weight in weights]
        self._weight = torch.cat(parts) if len(parts) > 1 else parts[0]
        self._bias = None if bias is None else bias.detach()
        self.outputs = len(self._weight) // 2 if gate else len(self._weight)
        self._gate, self._operations = gate, operations

    def unpacked(self, number: int = 0) -> torch.Tensor:
        """See `Product.unpacked`; not a copy."""
        return self._weight[number * self.outputs : (number + 1) * self.outputs]

    def multiply(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `Product.multiply`."""
        if norm is not None:
            x = self._operations.normalise(x, norm)
        if residual is not None and self._bias is None and not self._gate:
            return residual.addmm_(x, self._weight.t())  # the sum is the product's epilogue
        y = functional.linear(x, self._weight, self._bias)
        if self._gate:
            y = self._operations.open_gates(y, self._gate)
        return y if residual is None else y.add_(residual)


def norm_constants(size: int, norm: Norm, *, has_residual: bool) -> dict[str, int]:
    """The capitals of `rms_norm`."""
    return {
        "SIZE": size,
        "PADDED": power_of_two(size),
        "ROUNDS_FIRST": norm.rounds_first,
        "HAS_RESIDUAL": has_residual,
    }


def norm_warps(size: int) -> int:
    """So that a thread holds at most 16 numbers of a row: with more, sm_80 spills float16."""
    return min(32, max(1, power_of_two(size) // 512))


def gated_constants(size: int, gate: int) -> dict[str, int]:
    """The capitals of `gated`."""
    return {"SIZE": size, "BLOCK": min(GATED_BLOCK, power_of_two(size)), "GATE": gate}


def _dense_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

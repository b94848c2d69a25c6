"""What fused modules are made of on a CPU: the kernels in `kernels/linear.cpp` and `layers.cpp`."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from .fused_modules import FusedLayer
from .fused_operations import GELU_TANH, SILU, Norm, Product, Stack
from .linear_kernel import DTYPES, PackedWeight, normalise
from .native_layers import NativeLayers


class NativeOperations:
    """`Operations` of a CPU: norms and residual sums happen within the products."""

    dtypes: Collection[torch.dtype] = DTYPES
    gates: Collection[int] = (SILU, GELU_TANH)
    errors: tuple[type[Exception], ...] = ()

    def normalise(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return normalise(x, norm)

    def product(
        self, weights: Sequence[torch.Tensor], *, bias: torch.Tensor | None = None, gate: int = 0
    ) -> PackedWeight:
        return PackedWeight(weights, bias=bias, gate=gate)

    def add_product(
        self, product: Product, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor, Norm | None]:
        total = product.multiply(x, residual=residual)
        return total, total, norm

    def stack(self, layers: Sequence[FusedLayer]) -> Stack | None:
        return NativeLayers(layers) if NativeLayers.fits(layers) else None

"""What fused modules are made of: one small set of operations that each kind of device implements.

Which modules are fused, and whether a fused one computes the same, is decided once for all devices
in `fused_modules.py` and `fusion.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeGuard

import torch
from torch.nn import functional

from .attention import (
    AttentionBackend,
    AttentionMetadata,
    AttentionRule,
    ForwardContext,
    LayerCache,
)

if TYPE_CHECKING:
    from .fused_modules import FusedLayer

#: The activations of gated products: SiLU, GELU by its tanh, and GELU by the error function.
SILU, GELU_TANH, GELU = 1, 2, 3
ACTIVATIONS: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = {
    SILU: functional.silu,
    GELU_TANH: partial(functional.gelu, approximate="tanh"),
    GELU: functional.gelu,
}


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """RMS normalisation: `x / sqrt(mean(x²) + epsilon) · weight`.

    `rounds_first` says that the quotient is rounded to the model's type before it is scaled.
    """

    weight: torch.Tensor  # [K] float32
    epsilon: float
    rounds_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class HeadPreparation:
    """What Q and K still lack when the kernel gets them, in this order, for each head.

    The norms agree in all but their weights.
    """

    cos: torch.Tensor  # [T, R], of Q's type, dense: the rotary embedding of the first R numbers
    sin: torch.Tensor
    query_norm: Norm | None = None
    key_norm: Norm | None = None


class PreparingBackend(AttentionBackend, Protocol):
    """An attention backend that also does the heads' norms and rotary embedding."""

    prepares_heads: bool  # True

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


def prepares_heads(backend: AttentionBackend) -> TypeGuard[PreparingBackend]:
    return getattr(backend, "prepares_heads", False)


class Product(Protocol):
    """Weights `[N, K]` that multiply the same x, held as one; with a gate, two of them."""

    dtype: torch.dtype
    outputs: int  # N, of one of the two with a gate

    def unpacked(self, number: int = 0) -> torch.Tensor:
        """`[N, K]` in the original type; with a gate, gate is number 0 and up number 1."""

    def multiply(
        self,
        x: torch.Tensor,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`residual + norm(x) · Wᵀ` of x `[T, K]`; the result may take the residual's memory."""


class Stack(Protocol):
    """Fused layers that follow each other, run as one."""

    def run(
        self,
        x: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        context: ForwardContext,
    ) -> torch.Tensor:
        """Rows `[T, K]`, cos and sin `[1, T, R]`, to rows `[T, K]` of their own memory."""


class Operations(Protocol):
    """Of one kind of device."""

    dtypes: Collection[torch.dtype]
    gates: Collection[int]  # the activations that `product` knows
    errors: tuple[type[Exception], ...]  # beside torch's own: what a failing kernel raises

    def normalise(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """`[T, K]` to `[T, K]`, dense."""

    def product(
        self, weights: Sequence[torch.Tensor], *, bias: torch.Tensor | None = None, gate: int = 0
    ) -> Product:
        """`gate`, an activation, takes two weights: gate and up.

        Raises KernelUnavailable where the device has none for these weights.
        """

    def add_product(
        self, product: Product, x: torch.Tensor, residual: torch.Tensor, norm: Norm
    ) -> tuple[torch.Tensor, torch.Tensor, Norm | None]:
        """`residual + product(x)` as a tensor of its own, and what a product of its norm takes.

        That is rows and the norm still to be done to them: a device may have done it already.
        """

    def stack(self, layers: Sequence[FusedLayer]) -> Stack | None:
        """None where the device gains nothing by it, or cannot."""

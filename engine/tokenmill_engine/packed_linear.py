"""Linear layers on a CPU with their weights packed once, by the kernel in `kernels/linear.cpp`."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from .kernels.build import KernelUnavailable
from .linear_kernel import PackedWeight

logger = logging.getLogger(__name__)

#: Largest difference from torch's own result that a packed layer may show, as a share of the
#: result's standard deviation: both only sum up in another order, or round to bfloat16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}


class PackedLinear(nn.Module):
    """An `nn.Linear` that computes from packed weights; `weight` rebuilds the original.

    Raises KernelUnavailable as `PackedWeight` does.
    """

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._packed = PackedWeight([linear.weight], bias=self.bias)
        self.dtype = self._packed.dtype

    @property
    def weight(self) -> torch.Tensor:
        """`[out_features, in_features]`, for models that read it beside calling the layer."""
        return self._packed.unpacked()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[…, in_features]` to `[…, out_features]`"""
        if x.dtype != self.dtype or x.device.type != "cpu":
            return functional.linear(x, self.weight.to(x.device), self.bias)
        y = self._packed.multiply(x.reshape(-1, self.in_features))
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

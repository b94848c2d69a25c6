"""Which kernels a model gets: our native ones where they can be built and pay, else plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping

import torch
from transformers import PreTrainedModel

from .attention import AttentionBackend, AttentionSpec, CallKey
from .config import Kernels
from .device_sampling import choose_on_device, warm_up
from .errors import ConfigError
from .fused_operations import Operations, PreparingBackend
from .fusion import fuse_modules
from .kernels.build import KernelUnavailable
from .linear_kernel import BFLOAT16_PRODUCTS, DTYPES, bfloat16_products
from .native_attention import NativePagedAttention
from .native_operations import NativeOperations
from .native_sampling import NativeSampling
from .packed_linear import pack_linears
from .paged_attention_reference import TorchPagedAttention
from .sampler import TokenChooser, choose_by_torch
from .triton_attention import TritonPagedAttention
from .triton_fusions import TritonOperations

logger = logging.getLogger(__name__)


def choose_attention(
    kernels: Kernels, specs: Collection[AttentionSpec], device: torch.device
) -> AttentionBackend:
    """Logs the choice.

    Raises ConfigError when `native` was asked for and is not to be had.
    """
    if kernels == "torch":
        logger.info("attention: plain torch")
        return TorchPagedAttention()
    try:
        backend = _own_attention(specs, device)
    except KernelUnavailable as why:
        if kernels == "native":
            raise ConfigError("kernels", f"{why}; or use torch") from why
        logger.warning("attention: plain torch, several times slower: %s", why)
        return TorchPagedAttention()
    logger.info("attention: native kernel for %s", device.type)
    return backend


def _own_attention(specs: Collection[AttentionSpec], device: torch.device) -> AttentionBackend:
    if device.type == "cpu":
        return NativePagedAttention(specs)
    if device.type == "cuda":
        return TritonPagedAttention(specs, device)
    raise KernelUnavailable(f"there is no kernel for {device.type}")


def prepare_modules(
    kernels: Kernels,
    model: PreTrainedModel,
    backend: AttentionBackend,
    specs: Mapping[CallKey, AttentionSpec],
    max_model_len: int,
) -> None:
    """Fuses modules and, on a CPU, packs linear layers in place; logs it.

    What is fused computes the same at positions below `max_model_len`, in tokens.
    Where torch lets the processor multiply bfloat16 itself, and our kernel was compiled without
    that, torch is several times faster in bfloat16: there, nothing is changed.
    """
    if kernels == "torch":
        return
    if isinstance(backend, TritonPagedAttention):
        _fuse(model, backend, specs, TritonOperations, max_model_len)
        return
    if model.device.type != "cpu":
        return
    if kernels == "auto" and model.dtype == torch.bfloat16 and only_torch_multiplies_bfloat16():
        logger.info("linear layers: plain torch, whose bfloat16 is faster on this processor")
        return
    if isinstance(backend, NativePagedAttention) and model.dtype in DTYPES:
        _fuse(model, backend, specs, NativeOperations, max_model_len)
    pack_linears(model)


def choose_sampling(
    kernels: Kernels, device: torch.device, backend: AttentionBackend, *, vocab_size: int
) -> TokenChooser:
    """Who chooses tokens from the logits; logs it.

    On a GPU our kernel goes with Triton's attention, which has proved that Triton runs there.
    """
    if isinstance(backend, TritonPagedAttention):
        warm_up(device, vocab_size)
        logger.info("sampling: Triton kernel")
        return choose_on_device
    if kernels == "torch" or device.type != "cpu":
        logger.info("sampling: plain torch")
        return choose_by_torch
    try:
        chooser = NativeSampling()
    except KernelUnavailable as why:
        if kernels == "native":
            raise ConfigError("kernels", f"{why}; or use torch") from why
        logger.warning("sampling: plain torch, several times slower: %s", why)
        return choose_by_torch
    logger.info("sampling: native kernel")
    return chooser


def choose_async_scheduling(wanted: bool | None, choose: TokenChooser) -> bool:
    """Whether steps are launched one ahead; unless told, where that hides what the host does.

    A chooser on the host waits for each step, and a CPU that computes is busy with that.
    """
    return choose is choose_on_device if wanted is None else wanted


def _fuse(
    model: PreTrainedModel,
    backend: PreparingBackend,
    specs: Mapping[CallKey, AttentionSpec],
    operations: Callable[[], Operations],
    max_model_len: int,
) -> None:
    try:
        fuse_modules(model, backend, specs, operations(), max_model_len=max_model_len)
    except KernelUnavailable as why:
        logger.warning("modules are not fused: %s", why)


def only_torch_multiplies_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16, and our kernel was compiled without that."""
    if not torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported():
        return False
    try:
        kind = bfloat16_products()
    except KernelUnavailable:
        return True
    logger.info("bfloat16 products: %s", BFLOAT16_PRODUCTS[kind])
    return not kind

"""Which attention backend a model gets."""

from __future__ import annotations

import logging
from collections.abc import Collection

import torch

from .attention import AttentionBackend, AttentionSpec
from .config import AttentionBackendName
from .errors import ConfigError
from .kernels.build import KernelUnavailable
from .native_attention import NativePagedAttention
from .paged_attention_reference import TorchPagedAttention

logger = logging.getLogger(__name__)


def choose_backend(
    name: AttentionBackendName, specs: Collection[AttentionSpec], device: torch.device
) -> AttentionBackend:
    """`auto`: the native kernel on a CPU that has a compiler, else plain torch; logs which.

    Raises ConfigError when `native` was asked for and is not to be had.
    """
    if name == "torch" or (name == "auto" and device.type != "cpu"):
        logger.info("attention: plain torch")
        return TorchPagedAttention()
    try:
        if device.type != "cpu":
            raise KernelUnavailable(f"the kernel does not run on {device.type}")
        backend = NativePagedAttention(specs)
    except KernelUnavailable as why:
        if name == "native":
            raise ConfigError("attention_backend", f"{why}; or use torch") from why
        logger.warning("attention: plain torch, several times slower: %s", why)
        return TorchPagedAttention()
    logger.info("attention: native kernel")
    return backend

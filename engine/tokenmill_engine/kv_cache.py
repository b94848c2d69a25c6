"""The K/V tensors of all attention calls, and how many blocks of them fit into memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .attention import AttentionBackend, AttentionSpec, CallKey, LayerCache
from .huge_pages import prefer_huge_pages


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """One pool of blocks: block `i` is row `i` of the tensors of every attention call."""

    num_blocks: int
    block_size: int
    layers: Mapping[CallKey, LayerCache]

    @property
    def num_bytes(self) -> int:
        return sum(layer.key.nbytes + layer.value.nbytes for layer in self.layers.values())

    def fill(self, value: float) -> None:
        """NaN makes whoever reads a slot before it is written show."""
        for layer in self.layers.values():
            layer.key.fill_(value)
            layer.value.fill_(value)


def allocate_kv_cache(
    specs: Mapping[CallKey, AttentionSpec],
    backend: AttentionBackend,
    *,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    num_spare_blocks: int = 0,
) -> KVCache:
    """Tensors for every attention call, each shaped by what that call passes.

    Spare blocks lie behind the others and belong to no request.
    Not initialised: a slot is written before anything reads it, and memory that is not touched is
    not taken from a CPU until the pool fills up.
    """
    layers = {}
    for call, spec in specs.items():
        key_shape, value_shape = backend.cache_shapes(
            spec, num_blocks + num_spare_blocks, block_size
        )
        layers[call] = LayerCache(
            key=torch.empty(key_shape, dtype=spec.dtype, device=device),
            value=torch.empty(value_shape, dtype=spec.dtype, device=device),
        )
        prefer_huge_pages(layers[call].key)
        prefer_huge_pages(layers[call].value)
    return KVCache(num_blocks=num_blocks, block_size=block_size, layers=layers)


def bytes_per_block(specs: Mapping[CallKey, AttentionSpec], block_size: int) -> int:
    """Of one block over all attention calls."""
    return block_size * sum(spec.bytes_per_token for spec in specs.values())

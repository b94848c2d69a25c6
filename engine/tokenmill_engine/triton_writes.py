"""How the Triton attention stores K and V: as they are, or with Q on the way from one product."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch

from .attention import LayerCache
from .fused_operations import HeadPreparation
from .kernels.build import KernelUnavailable
from .triton_tiles import CallShape, heads_per_program, write_constants


def load_elementwise_kernels() -> ModuleType:
    """Raises KernelUnavailable where there is no Triton."""
    try:
        return importlib.import_module(".kernels.triton_elementwise", __package__)
    except ModuleNotFoundError as error:
        raise KernelUnavailable(f"there is no {error.name}") from error


def write_kv(
    kernels: ModuleType,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: LayerCache,
    slots: tuple[torch.Tensor, torch.Tensor],
    shape: CallShape,
) -> None:
    """Stores K and V as they are. `slots`: block and place in it of each row, int64."""
    grid = (len(key), -(-shape.num_kv_heads // heads_per_program(shape.num_kv_heads)))
    kernels.write_kv[grid](
        key,
        value,
        layer.key,
        layer.value,
        *slots,
        *key.stride()[:2],
        *value.stride()[:2],
        *layer.key.stride()[:3],
        *layer.value.stride()[:3],
        **write_constants(shape),
    )


def write_prepared(
    kernels: ModuleType,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    heads: HeadPreparation,
    layer: LayerCache,
    slots: tuple[torch.Tensor, torch.Tensor],
    shape: CallShape,
) -> torch.Tensor:
    """Prepares query and key, stores key and value; `tensors` are query, key, value.

    `slots`: block and place in it of each row, int64. Returns the query, `[T, H, D]`.
    """
    query, key, value = tensors
    prepared = query.new_empty(query.shape)
    norms = (heads.query_norm, heads.key_norm)
    norm = heads.query_norm or heads.key_norm
    constants = prepare_constants(shape, heads)
    in_group = constants["HEADS"]
    groups = -(-shape.num_heads // in_group) + -(-shape.num_kv_heads // in_group)
    kernels.prepare_and_write[len(query), groups](
        prepared,
        query,
        key,
        value,
        layer.key,
        layer.value,
        *(heads.cos if norm is None else norm.weight for norm in norms),
        heads.cos,
        heads.sin,
        *slots,
        0.0 if norm is None else norm.epsilon,
        *query.stride()[:2],
        *key.stride()[:2],
        *value.stride()[:2],
        heads.cos.stride(0),
        heads.sin.stride(0),
        *layer.key.stride()[:3],
        *layer.value.stride()[:3],
        **constants,
    )
    return prepared


def prepare_constants(shape: CallShape, heads: HeadPreparation) -> dict[str, int]:
    """The capitals of `prepare_and_write`."""
    norm = heads.query_norm or heads.key_norm
    return {
        **shape.dim_constants,
        "NUM_HEADS": shape.num_heads,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEADS": heads_per_program(max(shape.num_heads, shape.num_kv_heads)),
        "ROTARY": heads.cos.shape[-1],
        "ROUNDS_FIRST": norm is not None and norm.rounds_first,
        "HAS_QUERY_NORM": heads.query_norm is not None,
        "HAS_KEY_NORM": heads.key_norm is not None,
    }

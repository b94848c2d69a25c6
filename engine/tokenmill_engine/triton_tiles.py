"""With which constants the Triton kernels are compiled for a model: tiles, padding, precision.

The tiles are starting points from compilations for sm_80 and sm_90: none spills registers, all fit
into the 99 KiB of shared memory that the smallest of these processors has. They were never timed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .attention import AttentionRule

#: Widest head that the tiles below were compiled for.
MAX_HEAD_DIM = 512

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class CallShape:
    """Heads of one attention call; `num_heads` query heads share `num_kv_heads` KV heads."""

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def dim_constants(self) -> dict[str, int]:
        """Sizes, and what they are padded to: the tensor cores want powers of 2 from 16 on."""
        return {
            "KEY_DIM": self.key_dim,
            "KEY_PADDED": power_of_two(self.key_dim, 16),
            "VALUE_DIM": self.value_dim,
            "VALUE_PADDED": power_of_two(self.value_dim, 16),
        }


@dataclass(frozen=True, slots=True)
class Tile:
    """Lanes (rows times the query heads of a KV head) and keys of one product, and who does it."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int = 2

    @property
    def options(self) -> dict[str, int | bool]:
        """Of the launch; the default of fused multiply-add differs between Triton's releases."""
        return {
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
            "enable_fp_fusion": True,
        }


def decode_tile(shape: CallShape) -> Tile:
    """One row and all query heads of a KV head."""
    rows = power_of_two(shape.groups, 16)
    width = power_of_two(max(shape.key_dim, shape.value_dim), 16)
    if shape.dtype == torch.float32:
        return Tile(rows, 16, num_warps=4)
    keys = {512: 16, 256: 32}.get(width, 64)
    return Tile(rows, keys, num_warps=4 if rows * width <= 16 * 256 else 8)


def prompt_tile(shape: CallShape) -> Tile:
    """Several rows of a chunk, as long as the registers hold their sums."""
    width = power_of_two(max(shape.key_dim, shape.value_dim), 16)
    least = power_of_two(shape.groups, 16)
    if shape.dtype == torch.float32:
        return Tile(least, 16, num_warps=4)
    rows, keys = {512: (32, 16), 256: (64, 32)}.get(width, (64, 64))
    rows = max(least, rows)
    dims = shape.dim_constants
    # Latent attention: with 8 warps the compiler spills for sm_80.
    wide_keys = dims["KEY_PADDED"] > dims["VALUE_PADDED"]
    return Tile(rows, keys, num_warps=4 if wide_keys or rows * width <= 64 * 64 else 8)


def attend_constants(
    shape: CallShape, rule: AttentionRule, tile: Tile, *, block_size: int, split_tokens: int
) -> dict[str, object]:
    """The capitals of `attend`; `split_tokens` 0: no item has a stretch of keys."""
    return {
        **shape.dim_constants,
        "NUM_HEADS": shape.num_heads,
        "GROUPS": shape.groups,
        "BLOCK_SIZE": block_size,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "SPLIT": split_tokens,
        "WINDOW": rule.window or 0,
        "CHUNK": rule.chunk or 0,
        "HAS_SOFTCAP": rule.softcap is not None,
        "HAS_SINKS": rule.sinks is not None,
        "PRECISION": "ieee" if shape.dtype == torch.float32 else "tf32",
    }


def merge_constants(shape: CallShape, rule: AttentionRule) -> dict[str, object]:
    """The capitals of `merge`."""
    dims = shape.dim_constants
    return {
        "NUM_HEADS": shape.num_heads,
        "HEADS": heads_per_program(shape.num_heads),
        "VALUE_DIM": dims["VALUE_DIM"],
        "VALUE_PADDED": dims["VALUE_PADDED"],
        "HAS_SINKS": rule.sinks is not None,
    }


def write_constants(shape: CallShape) -> dict[str, object]:
    """The capitals of `write_kv`."""
    return {
        **shape.dim_constants,
        "NUM_KV_HEADS": shape.num_kv_heads,
        "HEADS": heads_per_program(shape.num_kv_heads),
    }


def heads_per_program(num_heads: int) -> int:
    """Few, so that a batch of one still occupies several processors."""
    return min(4, power_of_two(num_heads))


def power_of_two(number: int, least: int = 1) -> int:
    """The smallest one that is neither below `number` nor below `least`."""
    return max(least, 1 << (number - 1).bit_length())

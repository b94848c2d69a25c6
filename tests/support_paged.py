"""Random steps for the Triton attention, and what comes out of them by definition, in float64.

`random_case` draws a case; `CaseRun` lays its sequences into scattered blocks of a cache that is
full of NaN. The oracle never sees a block.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import numpy as np
import torch

from tokenmill_engine.attention import (
    AttentionMetadata,
    AttentionRule,
    AttentionSpec,
    LayerCache,
)
from tokenmill_engine.triton_attention import TritonPagedAttention

CPU = torch.device("cpu")
NAN = float("nan")

#: Largest error of the interpreter, whose products and sums are float32: by the rounding of the
#: inputs' type, which the weights and the output go through.
TOLERANCES = {torch.float32: 4e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """Everything that the kernel tells apart."""

    dims: tuple[int, int]  # of a key and of a value
    groups: int
    kv_heads: int
    block_size: int
    step: str  # decode, chunk, mixed
    kv: str  # short (shorter than a stretch of keys) or long
    window: int | None
    chunk: int | None
    softcap: float | None
    sinks: bool
    split_tokens: int
    layout: str
    dtype: torch.dtype
    seed: int = 0


CHOICES: dict[str, tuple[object, ...]] = {
    "dims": ((64, 64), (80, 80), (96, 96), (128, 128), (256, 256), (24, 12)),
    "groups": (1, 2, 4, 7, 8),
    "kv_heads": (1, 2),
    "block_size": (16, 32, 64, 256),
    "step": ("decode", "chunk", "mixed"),
    "kv": ("short", "long"),
    "window": (None, None, 5, 40, 1000),
    "chunk": (None, 24),
    "softcap": (None, 5.0),
    "sinks": (False, True),
    "split_tokens": (32, 64, 512),
    "layout": ("HND", "NHD"),
    "dtype": (torch.float32, torch.float16, torch.bfloat16),
}


def random_case(seed: int) -> Case:
    """A window and a chunk exclude each other, as in the models."""
    rng = random.Random(seed)
    drawn = {name: rng.choice(values) for name, values in CHOICES.items()}
    if drawn["window"] is not None:
        drawn["chunk"] = None
    return Case(**drawn, seed=seed)


def pairs_of(case: Case) -> set[tuple[str, object, str, object]]:
    """Every two choices that the case combines."""
    values = [(f.name, getattr(case, f.name)) for f in fields(case) if f.name in CHOICES]
    return {(*one, *other) for i, one in enumerate(values) for other in values[i + 1 :]}


def lengths_of(case: Case) -> list[tuple[int, int]]:
    """(rows of the step, tokens in the cache) of each sequence, at edges of blocks and tiles."""
    rng = random.Random(case.seed)
    split = min(case.split_tokens, 64)
    size = case.block_size
    edges = (size, split, 16, 64) if case.kv == "short" else (2 * split, 130)
    lengths = [max(1, rng.choice(edges) + rng.choice((-1, 0, 1))) for _ in range(3)]
    lengths = [min(length, 140) for length in [*lengths, 1]]
    if case.step == "decode":
        return [(1, length) for length in lengths]
    chunks = [(min(length, rng.choice((2, 9, 21))), length) for length in lengths]
    if case.step == "chunk":
        return chunks[:2]
    return [(1, lengths[0]), chunks[1], (1, lengths[2]), (1, lengths[3])]


class CaseRun:
    """A case with its numbers: queries of the rows of the step, K and V of all tokens."""

    def __init__(self, case: Case, lengths: list[tuple[int, int]] | None = None) -> None:
        self.case = case
        self.lengths = lengths if lengths is not None else lengths_of(case)
        generator = torch.Generator().manual_seed(case.seed)

        def draw(count: int, heads: int, dim: int) -> torch.Tensor:
            return torch.randn(count, heads, dim, generator=generator).to(case.dtype)

        key_dim, value_dim = case.dims
        heads = case.kv_heads * case.groups
        self.queries = [draw(rows, heads, key_dim) for rows, _ in self.lengths]
        self.keys = [draw(length, case.kv_heads, key_dim) for _, length in self.lengths]
        self.values = [draw(length, case.kv_heads, value_dim) for _, length in self.lengths]
        sinks = torch.randn(heads, generator=generator) if case.sinks else None
        self.rule = AttentionRule(1.3 / key_dim**0.5, case.window, case.chunk, case.softcap, sinks)
        self.spec = AttentionSpec(
            case.window, case.chunk, case.kv_heads, key_dim, value_dim, case.dtype
        )

    def backend(self) -> TritonPagedAttention:
        return TritonPagedAttention([self.spec], CPU, split_tokens=self.case.split_tokens)

    def step(
        self, chosen: list[int], seed: int = 0
    ) -> tuple[list[torch.Tensor], LayerCache, AttentionMetadata]:
        """Query, key and value of the rows of the chosen sequences, with all before them cached.

        Block 0 belongs to nobody, and which blocks the others have depends on `seed`.
        """
        size = self.case.block_size
        counts = [-(-self.lengths[i][1] // size) for i in chosen]
        ids = np.random.default_rng(seed).permutation(sum(counts)) + 1
        cu_blocks = np.cumsum([0, *counts])
        layer = self._nan_cache(sum(counts) + 1)
        slots = []
        for n, i in enumerate(chosen):
            rows, length = self.lengths[i]
            positions = np.arange(length)
            blocks = ids[cu_blocks[n] : cu_blocks[n + 1]][positions // size]
            before = slice(0, length - rows)
            where = torch.from_numpy(blocks[before]), slice(None)
            offsets = torch.from_numpy(positions[before] % size)
            layer.key[where[0], :, offsets] = self.keys[i][before]
            layer.value[where[0], :, offsets] = self.values[i][before]
            slots.append((blocks[length - rows :], positions[length - rows :] % size))
        meta = AttentionMetadata(
            block_size=size,
            cu_rows=np.cumsum([0, *(self.lengths[i][0] for i in chosen)]),
            kv_lens=np.array([self.lengths[i][1] for i in chosen]),
            block_ids=ids,
            cu_blocks=cu_blocks,
            slot_blocks=torch.from_numpy(np.concatenate([blocks for blocks, _ in slots])),
            slot_offsets=torch.from_numpy(np.concatenate([offsets for _, offsets in slots])),
        )
        return [self._rows(chosen, name) for name in ("queries", "keys", "values")], layer, meta

    def _rows(self, chosen: list[int], name: str) -> torch.Tensor:
        """Of the step; a view whose rows are not adjacent, as a fused projection would give."""
        rows = torch.cat([getattr(self, name)[i][-self.lengths[i][0] :] for i in chosen])
        wide = rows.new_full((len(rows), rows.shape[1] + 1, rows.shape[2]), NAN)
        wide[:, :-1] = rows
        return wide[:, :-1]

    def _nan_cache(self, num_blocks: int) -> LayerCache:
        def empty(dim: int) -> torch.Tensor:
            case = self.case
            if case.layout == "HND":
                shape = (num_blocks, case.kv_heads, case.block_size, dim)
                return torch.full(shape, NAN, dtype=case.dtype)
            shape = (num_blocks, case.block_size, case.kv_heads, dim)
            return torch.full(shape, NAN, dtype=case.dtype).transpose(1, 2)

        return LayerCache(*(empty(dim) for dim in self.case.dims))

    def expected(self) -> torch.Tensor:
        """`[T, H, Dv]` float64: one score for every pair of positions, then a softmax."""
        return torch.cat([self._expected(i) for i in range(len(self.lengths))])

    def _expected(self, i: int) -> torch.Tensor:
        rows, length = self.lengths[i]
        query = torch.arange(length - rows, length)[:, None]
        key = torch.arange(length)[None]
        visible = key <= query
        if self.rule.window is not None:
            visible &= query - key < self.rule.window
        if self.rule.chunk is not None:
            visible &= key // self.rule.chunk == query // self.rule.chunk
        keys, values = (
            numbers[i].double().repeat_interleave(self.case.groups, 1)
            for numbers in (self.keys, self.values)
        )
        scores = torch.einsum("qhd,khd->hqk", self.queries[i].double(), keys) * self.rule.scaling
        if self.rule.softcap is not None:
            scores = self.rule.softcap * torch.tanh(scores / self.rule.softcap)
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.rule.sinks is not None:
            sinks = self.rule.sinks.double()[:, None, None].expand(-1, rows, 1)
            scores = torch.cat([scores, sinks], -1)
        weights = torch.softmax(scores, -1)[..., :length]
        return torch.einsum("hqk,khd->qhd", weights, values)

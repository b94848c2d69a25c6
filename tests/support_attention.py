"""Random steps through a paged attention, and what they should give by the definition."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from support_models import make_step, nan_filled_cache
from tokenmill_engine.attention import (
    AttentionBackend,
    AttentionRule,
    AttentionSpec,
    LayerCache,
)
from tokenmill_engine.step_inputs import build_step_inputs

MakeBackend = Callable[[AttentionSpec], AttentionBackend]


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 2
    groups: int = 3
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 4
    dtype: torch.dtype = torch.float32

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(
            None, None, self.kv_heads, self.key_dim, self.value_dim, dtype=self.dtype
        )


class Sequence:
    """K and V of a whole sequence, and how much of it has been fed to the paged attention."""

    def __init__(self, shape: Shape, length: int, generator: torch.Generator) -> None:
        def draw(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=generator).to(shape.dtype)

        self.query = draw(shape.kv_heads * shape.groups, shape.key_dim)
        self.key = draw(shape.kv_heads, shape.key_dim)
        self.value = draw(shape.kv_heads, shape.value_dim)
        self.length, self.done = length, 0


def dense(sequence: Sequence, rule: AttentionRule) -> torch.Tensor:
    """`[length, H, Dv]` float64, by the definition: one score for every pair of positions."""
    groups = sequence.query.shape[1] // sequence.key.shape[1]
    visible = [
        [
            k <= q
            and (rule.window is None or k > q - rule.window)
            and (rule.chunk is None or k // rule.chunk == q // rule.chunk)
            for k in range(sequence.length)
        ]
        for q in range(sequence.length)
    ]
    key = sequence.key.double().repeat_interleave(groups, 1)
    value = sequence.value.double().repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", sequence.query.double(), key) * rule.scaling
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~torch.tensor(visible), float("-inf"))
    if rule.sinks is not None:
        sinks = rule.sinks.double()[:, None, None].expand(-1, sequence.length, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = torch.softmax(scores, -1)[..., : sequence.length]
    return torch.einsum("hqk,khd->qhd", weights, value)


def paged(
    make_backend: MakeBackend,
    sequences: list[Sequence],
    rule: AttentionRule,
    shape: Shape,
    seed: int,
) -> list[torch.Tensor]:
    """Feed the sequences in random chunks, several to a step; scattered blocks, full of NaN."""
    rng = np.random.default_rng(seed)
    backend = make_backend(shape.spec)
    num_blocks = sum(s.length // shape.block_size + 1 for s in sequences)
    layer = nan_filled_cache(backend, shape.spec, num_blocks, shape.block_size)
    free = rng.permutation(num_blocks).tolist()
    tables: list[list[int]] = [[] for _ in sequences]
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    while unfinished := [i for i, s in enumerate(sequences) if s.done < s.length]:
        chosen = [i for i in rng.permutation(unfinished).tolist() if rng.random() < 0.8]
        if not chosen:
            continue
        parts = []
        for i in chosen:
            left = sequences[i].length - sequences[i].done
            count = 1 if rng.random() < 0.4 else int(rng.integers(1, left + 1))
            parts.append((i, sequences[i].done, sequences[i].done + count))
            while len(tables[i]) * shape.block_size < parts[-1][2]:
                tables[i].append(free.pop())
            sequences[i].done += count
        result = one_step(sequences, parts, tables, (backend, layer, rule, shape))
        row = 0
        for i, start, end in parts:
            outputs[i].append(result[row : row + end - start])
            row += end - start
    return [torch.cat(parts) for parts in outputs]


def one_step(
    sequences: list[Sequence],
    parts: list[tuple[int, int, int]],
    tables: list[list[int]],
    with_: tuple[AttentionBackend, LayerCache, AttentionRule, Shape],
) -> torch.Tensor:
    backend, layer, rule, shape = with_
    output = make_step((range(end), start, end, tables[i]) for i, start, end in parts)
    meta = build_step_inputs(
        output, block_size=shape.block_size, device=torch.device("cpu")
    ).metadata
    rows = [
        torch.cat([getattr(sequences[i], name)[start:end] for i, start, end in parts])
        for name in ("query", "key", "value")
    ]
    return backend.write_and_attend(*rows, layer, meta, rule)


def sequences_of(shape: Shape, lengths: tuple[int, ...], seed: int) -> list[Sequence]:
    generator = torch.Generator().manual_seed(seed)
    return [Sequence(shape, length, generator) for length in lengths]


def make_rule(shape: Shape, settings: dict[str, object]) -> AttentionRule:
    settings = dict(settings, scaling=1.7 / math.sqrt(shape.key_dim))
    if settings.get("sinks"):
        heads = shape.kv_heads * shape.groups
        settings["sinks"] = torch.linspace(-2, 3, heads, dtype=shape.dtype)
    return AttentionRule(**settings)


def in_chunks(
    with_: tuple[AttentionBackend, AttentionRule, Shape], sequence: Sequence, size: int, last: int
) -> torch.Tensor:
    """One sequence in chunks of this size, its last tokens one by one; blocks in reverse order."""
    backend, rule, shape = with_
    num_blocks = sequence.length // shape.block_size + 1
    layer = nan_filled_cache(backend, shape.spec, num_blocks, shape.block_size)
    context, table = (backend, layer, rule, shape), list(range(num_blocks))[::-1]
    starts = [*range(0, sequence.length - last, size)]
    ends = [*starts[1:], sequence.length - last]
    singles = [(start, start + 1) for start in range(ends[-1], sequence.length)]
    parts = [(0, *part) for part in [*zip(starts, ends, strict=True), *singles]]
    return torch.cat([one_step([sequence], [part], [table], context) for part in parts])

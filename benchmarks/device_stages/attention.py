"""Stages 1 and 5: the attention kernels against float64, and how fast they read the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from tokenmill_engine.attention import (
    AttentionMetadata,
    AttentionRule,
    AttentionSpec,
    LayerCache,
)
from tokenmill_engine.triton_attention import TritonPagedAttention

from .context import Bench
from .machine import copy_rate

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
TOLERANCES = {BFLOAT: 2e-2, HALF: 3e-3, FLOAT: 1e-5}


@dataclass(frozen=True)
class Shape:
    """Heads of a call, the blocks of its cache, and the rows and tokens of each sequence."""

    num_heads: int
    num_kv_heads: int
    dim: int
    dtype: torch.dtype
    lengths: Sequence[tuple[int, int]]  # (rows, tokens in the cache)
    block_size: int = 32


class Call:
    """Random queries, keys and values, and a cache that holds NaN wherever nothing was written."""

    def __init__(self, shape: Shape, rule: AttentionRule, device: torch.device) -> None:
        self.shape, self.rule, self.device = shape, rule, device
        torch.manual_seed(0)
        spec = AttentionSpec(
            rule.window, rule.chunk, shape.num_kv_heads, shape.dim, shape.dim, shape.dtype
        )
        self.backend = TritonPagedAttention([spec], device)
        blocks = [-(-tokens // shape.block_size) for _, tokens in shape.lengths]
        order = np.random.default_rng(0).permutation(sum(blocks))
        shapes = self.backend.cache_shapes(spec, len(order), shape.block_size)
        self.layer = LayerCache(
            *(torch.full(s, float("nan"), dtype=shape.dtype, device=device) for s in shapes)
        )
        self.meta = _metadata(shape, order, blocks, device)
        rows = int(self.meta.cu_rows[-1])
        self.query = self._random(rows, shape.num_heads)
        self.key, self.value = (self._random(rows, shape.num_kv_heads) for _ in range(2))
        self._write_contexts()

    def attend(self) -> torch.Tensor:
        tensors = (self.query, self.key, self.value)
        return self.backend.write_and_attend(*tensors, self.layer, self.meta, self.rule)

    def expected(self) -> torch.Tensor:
        """In float64, one sequence and one head of the cache after the other. After `attend`."""
        parts = [self._expected_of(number) for number in range(len(self.shape.lengths))]
        return torch.cat(parts)

    def _random(self, rows: int, heads: int) -> torch.Tensor:
        kind = {"dtype": self.shape.dtype, "device": self.device}
        return torch.randn(rows, heads, self.shape.dim, **kind)

    def _write_contexts(self) -> None:
        for number, (rows, tokens) in enumerate(self.shape.lengths):
            blocks, offsets = self._slots(number)
            for cache in (self.layer.key, self.layer.value):
                numbers = self._random(tokens - rows, self.shape.num_kv_heads)
                cache[blocks[: tokens - rows], :, offsets[: tokens - rows]] = numbers

    def _slots(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Block and offset of each position of a sequence."""
        tokens = np.arange(self.shape.lengths[number][1])
        table = self.meta.block_ids[self.meta.cu_blocks[number] :]
        blocks = torch.from_numpy(table[tokens // self.shape.block_size]).to(self.device)
        return blocks, torch.from_numpy(tokens % self.shape.block_size).to(self.device)

    def _expected_of(self, number: int) -> torch.Tensor:
        rows, tokens = self.shape.lengths[number]
        first = int(self.meta.cu_rows[number])
        blocks, offsets = self._slots(number)
        groups = self.shape.num_heads // self.shape.num_kv_heads
        positions = np.arange(tokens - rows, tokens)
        seen = np.arange(tokens) <= positions[:, None]
        seen &= np.arange(tokens) >= self.rule.first_visible(positions)[:, None]
        hidden = ~torch.from_numpy(seen).to(self.device)
        outputs = []
        for head in range(self.shape.num_heads):
            keys = self.layer.key[blocks, head // groups, offsets].double()
            values = self.layer.value[blocks, head // groups, offsets].double()
            scores = self.query[first : first + rows, head].double() @ keys.T * self.rule.scaling
            if self.rule.softcap is not None:
                scores = self.rule.softcap * torch.tanh(scores / self.rule.softcap)
            scores = scores.masked_fill(hidden, float("-inf"))
            if self.rule.sinks is not None:
                sink = self.rule.sinks[head].double().expand(rows, 1)
                weights = torch.cat([scores, sink], 1).softmax(1)[:, :-1]
            else:
                weights = scores.softmax(1)
            outputs.append(weights @ values)
        return torch.stack(outputs, 1)


def check_attention(bench: Bench) -> None:
    """Stage 1."""
    for name, shape, rule in _tiny_cases() if bench.tiny else _cases(bench.device):
        if bench.is_out_of_time:
            bench.line("out of time", left_out=name)
            return
        call = Call(shape, rule, bench.device)
        got = call.attend()
        error = float((got.double() - call.expected()).abs().max())
        bench.require(error <= TOLERANCES[shape.dtype], f"{name}: error {error:.2g}")
        if shape.lengths[0][0] == 1:
            alone = Call(shape, rule, bench.device)
            alone.meta = _only_first(alone.meta)
            one = (call.query[:1], call.key[:1], call.value[:1])
            found = alone.backend.write_and_attend(*one, call.layer, alone.meta, rule)
            bench.require(torch.equal(found[0], got[0]), f"{name}: other bits when alone")
        bench.line(name, error=error)


def time_attention(bench: Bench) -> None:
    """Stage 5: GB/s of decode steps, TFLOP/s of prompts."""
    copy_gbps = copy_rate(bench)
    models = {"Qwen3-0.6B": (16, 8, 128), "Llama-3.1-8B": (32, 8, 128)}
    batches, contexts, blocks = (1, 8, 64, 256), (1024, 8192), (16, 32, 64)
    if bench.tiny:
        models, batches, contexts, blocks = {"tiny": (4, 2, 16)}, (2,), (20,), (16,)
    for (name, heads), batch, context, block in product(models.items(), batches, contexts, blocks):
        if bench.is_out_of_time:
            bench.line("out of time")
            return
        if batch * context > 600_000:
            continue
        shape = Shape(*heads, bench.dtype, [(1, context)] * batch, block)
        call = Call(shape, AttentionRule(heads[2] ** -0.5), bench.device)
        milliseconds = bench.median_ms(call.attend)
        read = 2 * batch * context * heads[1] * heads[2] * bench.dtype.itemsize
        gbps = read / milliseconds / 1e6
        figures = {"ms": milliseconds, "gbps": gbps, "of_copy": gbps / copy_gbps}
        bench.line(f"decode {name}", batch=batch, context=context, block=block, **figures)
    for name, heads in models.items():
        tokens = 24 if bench.tiny else 8192
        shape = Shape(*heads, bench.dtype, [(tokens, tokens)])
        call = Call(shape, AttentionRule(heads[2] ** -0.5), bench.device)
        milliseconds = bench.median_ms(call.attend)
        flops = 2 * 2 * heads[0] * heads[2] * tokens**2 / 2
        bench.line(
            f"prompt {name}", tokens=tokens, ms=milliseconds, tflops=flops / milliseconds / 1e9
        )


def _cases(device: torch.device) -> list[tuple[str, Shape, AttentionRule]]:
    long = [(1, 33000), (1, 1), (1, 511), (1, 512), (1, 513)]
    many = [(1, 100 + 17 * number) for number in range(64)]
    mixed = [(1, 2000), (300, 1300), (1, 1), (129, 129), (2, 700)]
    plain = AttentionRule(0.09)
    sinks = torch.randn(64, device=device)
    return [
        ("long", Shape(32, 8, 128, BFLOAT, long), plain),
        ("many", Shape(16, 8, 128, BFLOAT, many), plain),
        ("mixed", Shape(32, 8, 128, BFLOAT, mixed), plain),
        ("mixed, small blocks", Shape(32, 8, 128, HALF, mixed, 16), plain),
        ("7 to 1", Shape(28, 4, 128, HALF, mixed), plain),
        ("window", Shape(32, 8, 96, BFLOAT, mixed), AttentionRule(0.1, window=600)),
        ("chunk", Shape(40, 8, 128, BFLOAT, mixed), AttentionRule(0.09, chunk=512)),
        ("soft cap", Shape(8, 4, 256, BFLOAT, mixed), AttentionRule(0.06, softcap=50.0)),
        ("sinks", Shape(64, 8, 64, BFLOAT, mixed), AttentionRule(0.1, window=128, sinks=sinks)),
        ("float32", Shape(9, 3, 64, FLOAT, mixed), AttentionRule(0.125)),
        ("float32, wide", Shape(8, 4, 256, FLOAT, mixed), AttentionRule(0.06)),
        # More than 2**31 numbers in a cache: offsets must be of 64 bits.
        ("large cache", Shape(32, 8, 256, BFLOAT, [(1, 1_100_000), *long]), plain),
    ]


def _tiny_cases() -> list[tuple[str, Shape, AttentionRule]]:
    lengths = [(1, 20), (5, 9), (1, 1)]
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    return [
        ("plain", Shape(4, 2, 16, FLOAT, lengths, 4), AttentionRule(0.25)),
        (
            "window, soft cap, sinks",
            Shape(4, 2, 16, FLOAT, lengths, 4),
            AttentionRule(0.25, window=6, softcap=5.0, sinks=sinks),
        ),
    ]


def _metadata(
    shape: Shape, order: np.ndarray, blocks: list[int], device: torch.device
) -> AttentionMetadata:
    cu_rows = np.cumsum([0, *(rows for rows, _ in shape.lengths)])
    cu_blocks = np.cumsum([0, *blocks])
    tables = np.split(order, cu_blocks[1:-1])
    positions = [np.arange(tokens - rows, tokens) for rows, tokens in shape.lengths]
    slots = [table[p // shape.block_size] for table, p in zip(tables, positions, strict=True)]
    offsets = np.concatenate(positions) % shape.block_size
    return AttentionMetadata(
        block_size=shape.block_size,
        cu_rows=cu_rows,
        kv_lens=np.array([tokens for _, tokens in shape.lengths]),
        block_ids=order,
        cu_blocks=cu_blocks,
        slot_blocks=torch.from_numpy(np.concatenate(slots)).to(device),
        slot_offsets=torch.from_numpy(offsets).to(device),
    )


def _only_first(meta: AttentionMetadata) -> AttentionMetadata:
    return AttentionMetadata(
        block_size=meta.block_size,
        cu_rows=meta.cu_rows[:2],
        kv_lens=meta.kv_lens[:1],
        block_ids=meta.block_ids,
        cu_blocks=meta.cu_blocks[:2],
        slot_blocks=meta.slot_blocks[:1],
        slot_offsets=meta.slot_offsets[:1],
    )

"""The paged attention of every backend against a dense reference in float64, over random steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from support_models import make_step, nan_filled_cache
from tokenmill_engine.attention import (
    AttentionBackend,
    AttentionRule,
    AttentionSpec,
    LayerCache,
)
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.native_attention import NativePagedAttention
from tokenmill_engine.paged_attention_plan import PAGES_PER_TILE, ROWS_PER_TILE
from tokenmill_engine.paged_attention_reference import TorchPagedAttention
from tokenmill_engine.step_inputs import build_step_inputs

MakeBackend = Callable[[AttentionSpec], AttentionBackend]


@pytest.fixture(params=["torch", "native"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    if request.param == "torch":
        return lambda _: TorchPagedAttention()
    try:
        NativePagedAttention([])
    except KernelUnavailable as why:
        pytest.skip(str(why))
    return lambda spec: NativePagedAttention([spec])


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


SHAPES = {
    "plain": Shape(),
    "mha": Shape(kv_heads=4, groups=1),
    "gqa 7:1": Shape(kv_heads=1, groups=7, key_dim=32, value_dim=32),
    "narrow V": Shape(key_dim=24, value_dim=12),
    "wide V": Shape(key_dim=8, value_dim=20),
    "blocks of 1": Shape(block_size=1),
    "blocks of 32": Shape(block_size=32),
    "blocks of 5": Shape(block_size=5, key_dim=7, value_dim=7),
}
RULES = {
    "causal": {},
    "window 1": {"window": 1},
    "window 7": {"window": 7},
    "window beyond the sequence": {"window": 1000},
    "chunk 8": {"chunk": 8},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all at once": {"window": 9, "softcap": 3.0, "sinks": True},
}


def make_rule(shape: Shape, settings: dict[str, object]) -> AttentionRule:
    settings = dict(settings, scaling=1.7 / math.sqrt(shape.key_dim))
    if settings.get("sinks"):
        heads = shape.kv_heads * shape.groups
        settings["sinks"] = torch.linspace(-2, 3, heads, dtype=shape.dtype)
    return AttentionRule(**settings)


@pytest.mark.parametrize("settings", RULES.values(), ids=RULES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_equals_dense_attention(
    make_backend: MakeBackend, shape: Shape, settings: dict[str, object]
) -> None:
    rule = make_rule(shape, settings)
    sequences = sequences_of(shape, (1, 5, 33, 70), seed=len(settings))
    for got, sequence in zip(
        paged(make_backend, sequences, rule, shape, seed=3), sequences, strict=True
    ):
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("settings", [{}, {"window": 150}, {"softcap": 2.0, "sinks": True}])
def test_more_rows_and_blocks_than_one_tile(
    make_backend: MakeBackend, settings: dict[str, object]
) -> None:
    shape = Shape(block_size=1)
    lengths = (3 * ROWS_PER_TILE + 5, *[60] * (PAGES_PER_TILE // 50))
    rule = make_rule(shape, settings)
    sequences = sequences_of(shape, lengths, seed=1)
    for got, sequence in zip(
        paged(make_backend, sequences, rule, shape, seed=1), sequences, strict=True
    ):
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("settings", [{}, {"window": 7, "sinks": True}])
def test_bfloat16_is_as_close_as_its_rounding(
    make_backend: MakeBackend, settings: dict[str, object]
) -> None:
    shape = Shape(dtype=torch.bfloat16, key_dim=64, value_dim=64, block_size=32)
    rule = make_rule(shape, settings)
    sequences = sequences_of(shape, (5, 70, 130), seed=2)
    for got, sequence in zip(
        paged(make_backend, sequences, rule, shape, seed=2), sequences, strict=True
    ):
        assert got.dtype is torch.bfloat16
        # Inputs are exact here; weights and outputs are rounded to 8 bits.
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=2**-7, atol=2**-7)


def test_a_neighbour_full_of_nan_harms_nobody(make_backend: MakeBackend) -> None:
    shape, rule = Shape(), make_rule(Shape(), {})
    sequences = sequences_of(shape, (21, 33, 9), seed=5)
    for tensor in (sequences[0].query, sequences[0].key, sequences[0].value):
        tensor.fill_(float("nan"))
    results = paged(make_backend, sequences, rule, shape, seed=5)
    assert results[0].isnan().all()
    for got, sequence in zip(results[1:], sequences[1:], strict=True):
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=1e-5, atol=2e-6)


def test_a_freed_block_full_of_nan_harms_nobody(make_backend: MakeBackend) -> None:
    """The next owner of a block reads none of the slots that it has not written itself."""
    shape, rule = Shape(), make_rule(Shape(), {})
    (sequence,) = sequences_of(shape, (6,), seed=6)
    backend = make_backend(shape.spec)
    layer = nan_filled_cache(backend, shape.spec, 2, shape.block_size)
    rows = [
        one_step([sequence], [(0, position, position + 1)], [[1, 0]], (backend, layer, rule, shape))
        for position in range(sequence.length)
    ]
    torch.testing.assert_close(
        torch.cat(rows).double(), dense(sequence, rule), rtol=1e-5, atol=2e-6
    )


def test_decode_does_not_depend_on_the_batch(make_backend: MakeBackend) -> None:
    """Bit for bit: a row is reduced over its own blocks, in their order."""
    shape, rule = Shape(), make_rule(Shape(), {"window": 50})
    sequences = sequences_of(shape, (70, 33, 5, 64), seed=7)

    def last_token_of_the_first(others: list[Sequence]) -> torch.Tensor:
        chosen = [sequences[0], *others]
        tables = [list(range(20 * i, 20 * i + 20)) for i in range(len(chosen))]
        backend = make_backend(shape.spec)
        layer = nan_filled_cache(backend, shape.spec, 20 * len(chosen), shape.block_size)
        context = (backend, layer, rule, shape)
        prompts = [(i, 0, s.length - 1) for i, s in enumerate(chosen)]
        decodes = [(i, s.length - 1, s.length) for i, s in enumerate(chosen)]
        one_step(chosen, prompts, tables, context)
        return one_step(chosen, decodes, tables, context)[0]

    assert torch.equal(last_token_of_the_first([]), last_token_of_the_first(sequences[1:]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("settings", [{}, {"window": 9, "softcap": 3.0, "sinks": True}])
def test_the_native_result_does_not_depend_on_how_a_prompt_was_cut(
    settings: dict[str, object], dtype: torch.dtype
) -> None:
    """Bit for bit, in tiles of many rows or of one: a resumed request sees the same scores."""
    shape = Shape(block_size=8, dtype=dtype)
    rule = make_rule(shape, settings)
    try:
        backend = NativePagedAttention([shape.spec])
    except KernelUnavailable as why:
        pytest.skip(str(why))

    def in_chunks_of(size: int) -> torch.Tensor:
        (sequence,) = sequences_of(shape, (75,), seed=8)
        layer = nan_filled_cache(backend, shape.spec, 10, shape.block_size)
        context, table = (backend, layer, rule, shape), list(range(10))
        starts = range(0, sequence.length, size)
        parts = [(0, start, min(start + size, sequence.length)) for start in starts]
        return torch.cat([one_step([sequence], [part], [table], context) for part in parts])

    whole = in_chunks_of(75)
    for size in (1, 2, 7, 40):
        assert torch.equal(in_chunks_of(size), whole)


@pytest.mark.parametrize("settings", [{}, {"window": 300}, {"chunk": 192}])
@pytest.mark.parametrize("groups", [1, 3, 8])
def test_a_long_context_is_the_same_in_any_cut_and_by_any_number_of_threads(
    groups: int, settings: dict[str, object]
) -> None:
    """Bit for bit, and close to the definition: several stretches of scores, each with an edge."""
    shape = Shape(groups=groups, block_size=32)
    rule = make_rule(shape, settings)
    try:
        backend = NativePagedAttention([shape.spec])
    except KernelUnavailable as why:
        pytest.skip(str(why))
    (sequence,) = sequences_of(shape, (545,), seed=9)
    table = list(range(18))[::-1]

    def in_chunks_of(size: int, last: int) -> torch.Tensor:
        layer = nan_filled_cache(backend, shape.spec, 18, shape.block_size)
        context = (backend, layer, rule, shape)
        starts = [*range(0, sequence.length - last, size)]
        ends = [*starts[1:], sequence.length - last]
        singles = [(start, start + 1) for start in range(ends[-1], sequence.length)]
        parts = [(0, *part) for part in [*zip(starts, ends, strict=True), *singles]]
        return torch.cat([one_step([sequence], [part], [table], context) for part in parts])

    whole = in_chunks_of(545, 0)
    torch.testing.assert_close(whole.double(), dense(sequence, rule), rtol=1e-5, atol=2e-6)
    threads = torch.get_num_threads()
    try:
        for count, size, last in ((1, 100, 40), (2, 530, 1), (3, 257, 33)):
            torch.set_num_threads(count)
            assert torch.equal(in_chunks_of(size, last), whole)
    finally:
        torch.set_num_threads(threads)

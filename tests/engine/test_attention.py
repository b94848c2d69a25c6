"""The paged attention of every backend against a dense reference in float64, over random steps."""

from __future__ import annotations

import pytest
import torch

from support_attention import (
    MakeBackend,
    Sequence,
    Shape,
    dense,
    in_chunks,
    make_rule,
    one_step,
    paged,
    sequences_of,
)
from support_models import nan_filled_cache
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.native_attention import NativePagedAttention
from tokenmill_engine.paged_attention_plan import PAGES_PER_TILE, ROWS_PER_TILE
from tokenmill_engine.paged_attention_reference import TorchPagedAttention


@pytest.fixture(params=["torch", "native"])
def make_backend(request: pytest.FixtureRequest) -> MakeBackend:
    if request.param == "torch":
        return lambda _: TorchPagedAttention()
    try:
        NativePagedAttention([])
    except KernelUnavailable as why:
        pytest.skip(str(why))
    return lambda spec: NativePagedAttention([spec])


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
    context = (backend, rule, shape)
    whole = in_chunks(context, sequence, 545, 0)
    torch.testing.assert_close(whole.double(), dense(sequence, rule), rtol=1e-5, atol=2e-6)
    threads = torch.get_num_threads()
    try:
        for count, size, last in ((1, 100, 40), (2, 530, 1), (3, 257, 33)):
            torch.set_num_threads(count)
            assert torch.equal(in_chunks(context, sequence, size, last), whole)
    finally:
        torch.set_num_threads(threads)

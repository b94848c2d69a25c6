"""The native attention in bfloat16, by tiles where the processor has them and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from support_attention import Shape, dense, in_chunks, make_rule, paged, sequences_of
from tokenmill_engine.attention import AttentionSpec
from tokenmill_engine.kernels import build
from tokenmill_engine.kernels.build import KernelUnavailable, load_kernel
from tokenmill_engine.native_attention import NativePagedAttention

BFLOAT16 = torch.bfloat16

#: Rows of a tile are 16, those of two 32: groups around both, decode and prompts.
SHAPES = {
    "mha": Shape(4, 1, 64, 64, 32, BFLOAT16),
    "gqa 3:1": Shape(2, 3, 64, 64, 32, BFLOAT16),
    "gqa 7:1": Shape(1, 7, 32, 32, 32, BFLOAT16),
    "gqa 17:1": Shape(1, 17, 32, 64, 32, BFLOAT16),
    "gqa 40:1": Shape(1, 40, 32, 32, 32, BFLOAT16),
    "gqa 70:1": Shape(1, 70, 32, 32, 32, BFLOAT16),
    "wide K": Shape(1, 2, 192, 128, 32, BFLOAT16),
    "blocks of 64": Shape(2, 3, 96, 64, 64, BFLOAT16),
    "blocks of 96": Shape(1, 3, 32, 32, 96, BFLOAT16),
    "blocks of 512, no tiles": Shape(1, 3, 32, 32, 512, BFLOAT16),
    "blocks of 16, no tiles": Shape(2, 3, 64, 64, 16, BFLOAT16),
    "K of 80, no tiles": Shape(2, 3, 80, 80, 32, BFLOAT16),
    "V of 48, no tiles": Shape(2, 3, 64, 48, 32, BFLOAT16),
}
ALL_AT_ONCE = "all at once"
RULES: dict[str, dict[str, object]] = {
    "causal": {},
    "window 45": {"window": 45},
    ALL_AT_ONCE: {"window": 77, "softcap": 3.0, "sinks": True},
    "window 1": {"window": 1},
    "window 300": {"window": 300},
    "chunk 48": {"chunk": 48},
    "softcap": {"softcap": 2.0},
}
#: What `make test` has time for, beside everything at once in every shape.
QUICK_SHAPES, QUICK_RULES = ("mha", "gqa 3:1"), ("causal", "window 45")


def is_quick(shape: str, rule: str) -> bool:
    return rule == ALL_AT_ONCE or (shape in QUICK_SHAPES and rule in QUICK_RULES)


shapes_and_rules = pytest.mark.parametrize(
    ("shape", "settings"),
    [
        pytest.param(
            SHAPES[shape],
            RULES[rule],
            id=f"{shape}-{rule}",
            marks=() if is_quick(shape, rule) else pytest.mark.slow,
        )
        for shape in SHAPES
        for rule in RULES
    ],
)


@pytest.fixture(autouse=True, params=[("-mno-amx-tile",), ()], ids=["vectors", "tiles"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(build.FLAGS_OF, "paged_attention", request.param)
    monkeypatch.setattr(build, "_under_way", {})
    load_kernel.cache_clear()
    if not request.param and not torch.cpu._is_amx_tile_supported():
        pytest.skip("this processor has no tiles")
    try:
        load_kernel("paged_attention")
    except KernelUnavailable as why:
        pytest.skip(str(why))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    load_kernel.cache_clear()


def backend_of(spec: AttentionSpec) -> NativePagedAttention:
    return NativePagedAttention([spec])


@shapes_and_rules
def test_equals_dense_attention_up_to_rounding(shape: Shape, settings: dict[str, object]) -> None:
    rule = make_rule(shape, settings)
    sequences = sequences_of(shape, (1, 31, 33, 130, 300), seed=len(settings))
    for got, sequence in zip(
        paged(backend_of, sequences, rule, shape, seed=3), sequences, strict=True
    ):
        assert got.dtype is BFLOAT16
        # Inputs are exact; weights and outputs are rounded to 8 bits.
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=2**-7, atol=2**-7)


@shapes_and_rules
def test_the_result_is_the_same_in_any_cut_and_by_any_number_of_threads(
    shape: Shape, settings: dict[str, object]
) -> None:
    """Bit for bit, over several stretches of scores: a resumed request sees the same."""
    context = (backend_of(shape.spec), make_rule(shape, settings), shape)
    (sequence,) = sequences_of(shape, (545,), seed=9)
    whole = in_chunks(context, sequence, 545, 0)
    for count, size, last in ((1, 100, 40), (2, 530, 1), (3, 257, 33), (1, 17, 5)):
        torch.set_num_threads(count)
        assert torch.equal(in_chunks(context, sequence, size, last), whole)


@pytest.mark.parametrize("threads", [1, 2])
def test_neighbours_and_former_owners_of_blocks_harm_nobody(threads: int) -> None:
    """Of NaN in an unwritten slot, or in another sequence, nothing is seen."""
    torch.set_num_threads(threads)
    shape = SHAPES["gqa 3:1"]
    rule = make_rule(shape, {"window": 45})
    sequences = sequences_of(shape, (70, 133, 9), seed=5)
    for tensor in (sequences[0].query, sequences[0].key, sequences[0].value):
        tensor.fill_(float("nan"))
    results = paged(backend_of, sequences, rule, shape, seed=5)
    assert results[0].isnan().all()
    for got, sequence in zip(results[1:], sequences[1:], strict=True):
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=2**-7, atol=2**-7)


def test_weights_that_vanish_are_zeros() -> None:
    """Scores far below the maximum, as large models have them, in the order that is hard."""
    shape = SHAPES["mha"]
    rule = make_rule(shape, {})
    sequences = sequences_of(shape, (200, 320), seed=6)
    for sequence in sequences:
        sequence.query *= 40
        sequence.key *= torch.linspace(0.1, 4, sequence.length)[:, None, None]
    for got, sequence in zip(
        paged(backend_of, sequences, rule, shape, seed=6), sequences, strict=True
    ):
        assert got.isfinite().all()
        torch.testing.assert_close(got.double(), dense(sequence, rule), rtol=2**-6, atol=2**-5)

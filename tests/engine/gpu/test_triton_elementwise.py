"""Norms, gates and heads in Triton's interpreter, against their definitions in float64."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch.nn import functional

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_launches import round_to_nearest
from tokenmill_engine.attention import LayerCache
from tokenmill_engine.fused_operations import ACTIVATIONS, HeadPreparation, Norm
from tokenmill_engine.triton_fusions import MAX_NORM_SIZE, TritonOperations
from tokenmill_engine.triton_tiles import CallShape
from tokenmill_engine.triton_writes import load_elementwise_kernels, write_prepared

#: Of a number of size 1: a few roundings of the type.
TOLERANCES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES)
EPSILON = 1e-5


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest(monkeypatch)
    torch.manual_seed(0)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """`expected` float64."""
    assert got.shape == expected.shape
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    x = x.double()
    if norm is None:
        return x
    scale = (x.square().mean(-1, keepdim=True) + norm.epsilon).rsqrt()
    return x * scale * norm.weight.double()


@DTYPES
@pytest.mark.parametrize("size", [1, 24, 64, 100, 577])
def test_a_norm(dtype: torch.dtype, size: int) -> None:
    operations = TritonOperations()
    wide = torch.randn(5, size + 8).to(dtype)
    for x, rounds_first in product((wide[:, :size], wide.T[:size].T), (False, True)):
        norm = Norm(torch.rand(size) + 0.5, EPSILON, rounds_first)
        assert_close(operations.normalise(x, norm), normed(x, norm))


@DTYPES
def test_a_sum_is_rounded_before_it_is_normalised(dtype: torch.dtype) -> None:
    operations = TritonOperations()
    weight = torch.randn(40, 24).to(dtype)
    x, residual = torch.randn(3, 24).to(dtype), torch.randn(3, 40).to(dtype)
    norm = Norm(torch.rand(40), EPSILON, True)
    kept = residual.clone()

    total, rows, left = operations.add_product(operations.product([weight]), x, residual, norm)

    assert left is None
    assert torch.equal(residual, kept)  # it may be the input of the layer
    assert torch.equal(total, residual + functional.linear(x, weight))
    assert_close(rows, normed(total, norm))


@DTYPES
@pytest.mark.parametrize("gate", ACTIVATIONS)
@pytest.mark.parametrize("size", [1, 96, 1030])
def test_a_gate(dtype: torch.dtype, gate: int, size: int) -> None:
    pairs = torch.cat([torch.linspace(-30, 30, 3 * size).view(3, size), torch.randn(3, size)], 1)
    pairs = pairs.to(dtype)
    got = TritonOperations().open_gates(pairs, gate)
    gates, ups = pairs.double().chunk(2, 1)
    expected = ACTIVATIONS[gate](gates) * ups
    # Relative to the largest factors: near its root the activation has a small value.
    torch.testing.assert_close(
        got.double() / (1 + gates.abs()), expected / (1 + gates.abs()),
        rtol=0, atol=TOLERANCES[dtype],
    )  # fmt: skip


def test_extreme_gates_are_not_nan() -> None:
    pairs = torch.tensor([[-1e4, 1e4, -90.0, 90.0, 1.0, 1.0, 1.0, 1.0]])
    for gate in ACTIVATIONS:
        got = TritonOperations().open_gates(pairs, gate)
        torch.testing.assert_close(got, torch.tensor([[0.0, 1e4, 0.0, 90.0]]))


@DTYPES
def test_merged_weights(dtype: torch.dtype) -> None:
    operations = TritonOperations()
    gate, up, bias = torch.randn(20, 24), torch.randn(20, 24), torch.randn(40)
    gate, up, bias = gate.to(dtype), up.to(dtype), bias.to(dtype)
    x, residual = torch.randn(3, 24).to(dtype), torch.randn(3, 40).to(dtype)
    both = torch.cat([gate, up])
    merged = operations.product([gate, up])
    wanted = x.double() @ both.double().T
    scale = 5  # of the results, sums of 24 products
    assert_close(merged.multiply(x) / scale, wanted / scale)
    with_bias = operations.product([gate, up], bias=bias).multiply(x, residual=residual.clone())
    assert_close(with_bias / scale, (wanted + bias.double() + residual.double()) / scale)
    in_place = residual.clone()
    assert merged.multiply(x, residual=in_place) is in_place  # one launch, and no memory
    assert_close(in_place / scale, (wanted + residual.double()) / scale)
    gated = operations.product([gate, up], gate=1)
    assert [gated.outputs, merged.outputs] == [20, 40]
    assert torch.equal(gated.unpacked(0), gate)
    assert torch.equal(gated.unpacked(1), up)
    opened = functional.silu(wanted[:, :20]) * wanted[:, 20:]
    assert_close(gated.multiply(x) / scale**2, opened / scale**2)


def test_what_a_program_cannot_hold_is_refused() -> None:
    size = MAX_NORM_SIZE + 1
    with pytest.raises(ValueError, match="at most"):
        TritonOperations().normalise(torch.ones(1, size), Norm(torch.ones(size), EPSILON, True))
    with pytest.raises(ValueError, match="norms 4 numbers"):
        TritonOperations().normalise(torch.ones(1, 8), Norm(torch.ones(4), EPSILON, True))


#: Query heads, KV heads, dimensions of K and V, how many are rotated, which heads have norms.
CASES = (
    (4, 2, 16, 16, 16, "qk"),
    (9, 3, 24, 24, 24, ""),
    (5, 5, 80, 80, 20, ""),
    (6, 1, 24, 12, 0, "q"),
    (7, 7, 32, 32, 32, "k"),
)


@DTYPES
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("rounds_first", [False, True])
def test_heads_on_their_way(
    dtype: torch.dtype, case: tuple[int, int, int, int, int, str], rounds_first: bool
) -> None:
    num_heads, num_kv_heads, key_dim, value_dim, rotary, which = case
    rows, blocks, block_size = 5, 3, 4
    widths = (num_heads * key_dim, num_kv_heads * key_dim, num_kv_heads * value_dim)
    parts = torch.randn(rows, sum(widths)).to(dtype).split(widths, 1)
    query = parts[0].view(rows, num_heads, key_dim)
    key = parts[1].view(rows, num_kv_heads, key_dim)
    value = parts[2].view(rows, num_kv_heads, value_dim)
    norms = {
        name: Norm(torch.rand(key_dim) + 0.5, EPSILON, rounds_first) if name in which else None
        for name in "qk"
    }
    angles = torch.rand(rows, max(rotary // 2, 1)).repeat(1, 2)[:, :rotary] * 6
    tables = (angles.cos().to(dtype), angles.sin().to(dtype))
    heads = HeadPreparation(*tables, norms["q"], norms["k"])
    layer = LayerCache(
        torch.full((blocks, num_kv_heads, block_size, key_dim), float("nan"), dtype=dtype),
        torch.full((blocks, num_kv_heads, block_size, value_dim), float("nan"), dtype=dtype),
    )
    slots = (torch.tensor([2, 2, 0, 0, 1]), torch.tensor([3, 0, 1, 2, 3]))
    shape = CallShape(num_heads, num_kv_heads, key_dim, value_dim, dtype)

    prepared = write_prepared(
        load_elementwise_kernels(), (query, key, value), heads, layer, slots, shape
    )

    assert_close(prepared, rotated(normed(query, norms["q"]), tables))
    stored = layer.key[slots[0], :, slots[1]]
    assert_close(stored, rotated(normed(key, norms["k"]), tables))
    assert torch.equal(layer.value[slots[0], :, slots[1]], value)
    assert int(layer.key.isnan().all(-1).sum()) == (blocks * block_size - rows) * num_kv_heads


def rotated(x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """By complex numbers: each of the first half with its partner of the second."""
    cos, sin = (table.double() for table in tables)
    half = cos.shape[1] // 2
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    turned = pairs * torch.complex(cos, sin)[:, None, :half]
    return torch.cat([turned.real, turned.imag, x[..., 2 * half :]], -1)

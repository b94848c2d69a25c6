"""Products of bfloat16 in each way that the kernel knows, against float64."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from tokenmill_engine import linear_kernel
from tokenmill_engine.fused_operations import GELU_TANH, SILU, Norm
from tokenmill_engine.kernels import build
from tokenmill_engine.kernels.build import KernelUnavailable, load_kernel
from tokenmill_engine.linear_kernel import BFLOAT16_PRODUCTS, PackedWeight, bfloat16_products

#: Flags with which the kernel multiplies in the way of this index.
FLAGS = (
    ("-mno-amx-tile", "-mno-avx512bf16"),
    ("-mno-amx-tile",),
    ("-mno-amx-tile", "-DTOKENMILL_PAIRS_ANYWHERE"),
    (),
)

ROWS = (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 49, 70)
SLOW = pytest.mark.slow
MANY_ROWS = 700  # several row blocks, and several passes over x


@pytest.fixture(autouse=True, params=range(4), ids=["float32", "intel", "pairs", "tiles"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Each test runs with the kernel compiled for each way that this processor has."""
    monkeypatch.setitem(build.FLAGS_OF, "linear", FLAGS[request.param])
    monkeypatch.setattr(build, "_under_way", {})
    forget()
    try:
        if bfloat16_products() != request.param:
            pytest.skip(f"this processor does not multiply {BFLOAT16_PRODUCTS[request.param]}")
    except KernelUnavailable as why:
        pytest.skip(str(why))
    torch.manual_seed(3)
    threads = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(threads)
    forget()


def forget() -> None:
    load_kernel.cache_clear()
    linear_kernel._kernel.cache_clear()


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).bfloat16()


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, *, roundings: int = 1, share: float = 1e-4
) -> None:
    """Within half a unit of bfloat16's 8 bits for each rounding, and `share` of the spread."""
    assert got.dtype is torch.bfloat16
    spread = float(expected.std()) if expected.numel() > 1 else 1.0
    torch.testing.assert_close(got.double(), expected, rtol=roundings * 2**-8, atol=share * spread)


@pytest.mark.parametrize("outputs", [1, pytest.param(31, marks=SLOW), 33, 96, 100])
@pytest.mark.parametrize("inputs", [1, pytest.param(2, marks=SLOW), 31, 32, 33, 64, 77, 576])
def test_equals_float64(inputs: int, outputs: int) -> None:
    weight, bias = bf16(outputs, inputs), bf16(outputs)
    packed = PackedWeight([weight], bias=bias)
    assert torch.equal(packed.unpacked(), weight)
    for rows in ROWS:
        x = bf16(rows, inputs)
        assert_close(packed.multiply(x), x.double() @ weight.double().T + bias.double())


def test_any_number_of_rows_equals_float64() -> None:
    weight = bf16(64, 96)
    packed = PackedWeight([weight])
    for rows in (*range(1, 71), 255, 256, 257, MANY_ROWS):
        x = bf16(rows, 96)
        assert_close(packed.multiply(x), x.double() @ weight.double().T)


def test_float32_rows_over_a_weight_packed_as_bfloat16_equal_float64() -> None:
    """They share its layout, whose padding is another where there are tiles."""
    weight = bf16(50, 43).float()
    packed = PackedWeight([weight])
    assert torch.equal(packed.unpacked(), weight)
    for rows in ROWS:
        x = torch.randn(rows, 43)
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(packed.multiply(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("gate", [SILU, GELU_TANH])
@pytest.mark.parametrize(("inputs", "outputs"), [(64, 64), (43, 50), (160, 33)])
def test_gated_products_equal_float64(inputs: int, outputs: int, gate: int) -> None:
    weights = [bf16(outputs, inputs) / inputs**0.5 for _ in range(2)]
    packed = PackedWeight(weights, gate=gate)
    for rows in ROWS:
        x = bf16(rows, inputs)
        opened, up = (x.double() @ weight.double().T for weight in weights)
        act = (
            functional.silu(opened) if gate == SILU else functional.gelu(opened, approximate="tanh")
        )
        # Gate, activation and up are rounded before they are multiplied.
        assert_close(packed.multiply(x), act * up, roundings=4, share=0.02)


@pytest.mark.parametrize("inputs", [64, 77])
@pytest.mark.parametrize("rounds_first", [False, True])
def test_norm_before_and_residual_after_equal_float64(inputs: int, rounds_first: bool) -> None:
    weight, norm = bf16(70, inputs), Norm(torch.rand(inputs) + 0.5, 1e-5, rounds_first)
    packed = PackedWeight([weight[:40], weight[40:]])
    for rows in ROWS:
        x, residual = bf16(rows, inputs) * 5, bf16(rows, 70)
        scaled = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5)
        expected = residual.double() + (scaled * norm.weight.double()) @ weight.double().T
        got = packed.multiply(x, norm=norm, residual=residual)
        assert_close(got, expected, roundings=2, share=0.02)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("inputs", [64, 43, 1600])
def test_a_row_is_the_same_bit_by_bit_in_any_batch(inputs: int, num_threads: int) -> None:
    torch.set_num_threads(1)
    norm, bias = Norm(torch.rand(inputs), 1e-6, True), bf16(70)
    plain = PackedWeight([bf16(70, inputs)], bias=bias)
    gated = PackedWeight([bf16(70, inputs), bf16(70, inputs)], gate=SILU)
    x, residual = bf16(MANY_ROWS, inputs), bf16(MANY_ROWS, 70)

    def results(first: int, end: int) -> list[torch.Tensor]:
        part = x[first:end]
        return [
            plain.multiply(part),
            plain.multiply(part, norm=norm, residual=residual[first:end]),
            gated.multiply(part, norm=norm),
        ]

    alone = [
        torch.cat(parts) for parts in zip(*(results(i, i + 1) for i in range(70)), strict=True)
    ]
    whole = results(0, MANY_ROWS)
    torch.set_num_threads(num_threads)
    for part, row in zip(whole, alone, strict=True):
        assert torch.equal(part[:70], row)
    sizes = range(2, 70, 2 * num_threads - 1)  # threads that wait for each other are slow
    for first, end in [*((0, rows) for rows in sizes), (5, 44), (17, 18), (3, MANY_ROWS)]:
        for part, row in zip(results(first, end), whole, strict=True):
            assert torch.equal(part, row[first:end])


def test_padding_is_never_seen() -> None:
    """What earlier calls left in the kernel's memory, here NaN, meets no later one."""
    packed = PackedWeight([bf16(40, 43)])
    x = bf16(19, 43)
    expected = packed.multiply(x)
    assert packed.multiply(torch.full((60, 43), float("nan")).bfloat16()).isnan().all()
    wide = PackedWeight([bf16(40, 640)])
    assert wide.multiply(torch.full((60, 640), float("nan")).bfloat16()).isnan().all()
    assert torch.equal(packed.multiply(x), expected)


def test_torch_may_compute_in_between() -> None:
    """Its products configure the same registers."""
    weight, x = bf16(64, 64), bf16(20, 64)
    packed = PackedWeight([weight])
    expected, of_torch = packed.multiply(x), functional.linear(x, weight)
    for rows in (1, 5, 20, 3):
        assert torch.equal(packed.multiply(x[:rows]), expected[:rows])
        assert torch.equal(functional.linear(x, weight), of_torch)

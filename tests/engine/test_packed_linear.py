"""Packed linear layers against torch's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from tokenmill_engine import linear_kernel
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.packed_linear import PackedLinear, pack_linears


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    try:
        PackedLinear(nn.Linear(1, 1))
    except KernelUnavailable as why:
        pytest.skip(str(why))
    torch.manual_seed(1)
    with torch.inference_mode():
        yield


SHAPES = [(1, 1), (16, 16), (17, 3), (576, 64), (7, 200), (100, 33), (64, 129)]
ROWS = [1, 2, 3, 5, 6, 7, 12, 13, 36, 71, 72, 73, 150]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_equals_torch_in_float64(inputs: int, outputs: int, bias: bool) -> None:
    linear = nn.Linear(inputs, outputs, bias=bias)
    packed, exact = PackedLinear(linear), nn.Linear(inputs, outputs, bias=bias).double()
    exact.load_state_dict(linear.state_dict())
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        torch.testing.assert_close(packed(x).double(), exact(x.double()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_bfloat16_equals_the_rounded_float32_result(inputs: int, outputs: int) -> None:
    linear = nn.Linear(inputs, outputs).bfloat16()
    packed = PackedLinear(linear)
    exact = nn.Linear(inputs, outputs).double()
    exact.load_state_dict(linear.state_dict())
    for rows in ROWS:
        x = torch.randn(rows, inputs).bfloat16()
        got = packed(x)
        assert got.dtype is torch.bfloat16
        # Half a unit in the last of 8 bits, and float32's own rounding before it.
        torch.testing.assert_close(got.double(), exact(x.double()), rtol=2**-8, atol=1e-4)


def test_weights_that_bfloat16_holds_give_the_same_bits_in_half_the_memory() -> None:
    linear = nn.Linear(64, 80)
    linear.weight.copy_(linear.weight.bfloat16())
    small = PackedLinear(linear)
    linear.weight[0, 0] += 2**-20  # now it takes float32; the other outputs are the same
    large = PackedLinear(linear)
    assert (small._packed._packed.dtype, large._packed._packed.dtype) == (
        torch.bfloat16,
        torch.float32,
    )
    for rows in (1, 5, 72):
        x = torch.randn(rows, 64)
        assert torch.equal(small(x)[:, 1:], large(x)[:, 1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    packed = PackedLinear(nn.Linear(48, 72).to(dtype))
    x = torch.randn(150, 48).to(dtype)
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows])


def test_any_leading_shape_and_strides() -> None:
    linear = nn.Linear(24, 10)
    packed = PackedLinear(linear)
    for x in (torch.randn(24), torch.randn(2, 3, 24), torch.randn(24, 5).T, torch.randn(0, 24)):
        torch.testing.assert_close(packed(x), linear(x))
    wide = torch.randn(4, 50)
    torch.testing.assert_close(packed(wide[:, 3:27]), linear(wide[:, 3:27]))


def test_the_weight_can_be_read_back() -> None:
    for linear in (nn.Linear(33, 47), nn.Linear(33, 47).bfloat16()):
        packed = PackedLinear(linear)
        assert torch.equal(packed.weight, linear.weight)
        assert packed.weight.dtype is linear.weight.dtype


class Model(nn.Module):
    """A tied head, a nested layer, one that is no plain `nn.Linear`, one that is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.special = nn.modules.linear.NonDynamicallyQuantizableLinear(8, 8)
        self.broken = nn.Linear(8, 8)
        self.broken.weight.data[0, 0] = float("nan")
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.special(self.block(self.embed(ids))))
        return logits


def test_a_model_computes_the_same(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = Model(), torch.arange(20)
    expected = model(ids)
    with caplog.at_level(logging.INFO):
        assert pack_linears(model) == 2
    assert isinstance(model.head, PackedLinear)
    assert isinstance(model.block[0], PackedLinear)
    assert not isinstance(model.special, PackedLinear)
    assert not isinstance(model.broken, PackedLinear)
    assert "1 give other results when packed" in caplog.text
    torch.testing.assert_close(model(ids), expected)


def test_without_a_compiler_the_model_stays(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise KernelUnavailable("no C++ compiler")

    linear_kernel._kernel.cache_clear()
    monkeypatch.setattr(linear_kernel, "load_kernel", fail)
    model = Model()
    assert pack_linears(model) == 0
    assert type(model.head) is nn.Linear
    assert "plain torch: no C++ compiler" in caplog.text

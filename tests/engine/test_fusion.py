"""Fused modules: which are fused in which architecture, and that those stay that differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from support_models import tiny_model
from support_zoo import MSCALE, SERVED, rope
from tokenmill_engine.fused_modules import FusedMLP, FusedNorm
from tokenmill_engine.fused_operations import GELU_TANH, SILU, Norm
from tokenmill_engine.fusion import fuse_modules
from tokenmill_engine.fusion_check import same
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.linear_kernel import PackedWeight
from tokenmill_engine.native_attention import NativePagedAttention
from tokenmill_engine.native_operations import NativeOperations
from tokenmill_engine.packed_linear import PackedLinear
from tokenmill_engine.probe import probe


@pytest.fixture(autouse=True)
def seeded() -> None:
    try:
        PackedLinear(nn.Linear(1, 1))
    except KernelUnavailable as why:
        pytest.skip(str(why))
    torch.manual_seed(1)


def fused(
    name: str,
    change: Any = None,
    *,
    max_model_len: int = 256,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, int]:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config | config).to(dtype)
    if change is not None:
        change(model)
    specs = probe(model).specs
    backend = NativePagedAttention(specs.values())
    return fuse_modules(model, backend, specs, NativeOperations(), max_model_len=max_model_len)


@pytest.mark.parametrize(
    ("name", "norms", "mlps", "attentions", "layers"),
    [
        ("llama", 9, 4, 4, 4),
        ("llama mha bias", 9, 4, 4, 4),
        ("qwen2", 9, 4, 4, 4),
        ("qwen3", 17, 4, 4, 4),
        ("gemma", 9, 4, 4, 4),
        ("mistral", 9, 4, 4, 4),
        ("smollm3", 9, 4, 4, 4),
        ("granite", 9, 4, 4, 0),  # its residual sums are weighted
        ("glm4", 17, 0, 0, 0),  # rotary pairs are neighbours, one gate_up_proj, four norms
        ("gpt2", 0, 0, 0, 0),
    ],
)
def test_what_is_fused(name: str, norms: int, mlps: int, attentions: int, layers: int) -> None:
    counts = {"norms": norms, "MLPs": mlps, "attentions": attentions, "layers": layers}
    assert fused(name) == counts | {"stacks": int(layers > 1)}


def test_what_computes_something_else_stays() -> None:
    def change(model: Any) -> None:
        own = model.model.layers[1].mlp.forward
        model.model.layers[1].mlp.forward = lambda x: own(x) * 1.01
        second = model.model.layers[2].self_attn.forward
        model.model.layers[2].self_attn.forward = lambda **given: (-second(**given)[0], None)

    assert fused("llama", change) == {
        "norms": 9, "MLPs": 3, "attentions": 3, "layers": 2, "stacks": 0,
    }  # fmt: skip


def scaled_queries(beta: float) -> dict[str, Any]:
    """Ministral 3's: from position 16,384 on, Q is scaled by its position."""
    length = {"max_position_embeddings": 262144}
    settings = {"factor": 16.0, "original_max_position_embeddings": 16384, **length, **MSCALE}
    return length | rope("yarn", llama_4_scaling_beta=beta, **settings)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("max_model_len", "beta", "attentions"),
    [(16384, 0.1, 4), (16385, 0.1, 0), (262144, 0.1, 0), (262144, 0.0, 4)],
)
def test_attention_that_scales_q_by_position_stays_where_such_positions_are_served(
    dtype: torch.dtype, max_model_len: int, beta: float, attentions: int
) -> None:
    """Scaled by 1.07, as at 16,384, the output differs by less than a rounding in bfloat16 may."""
    config = scaled_queries(beta)
    counts = fused("ministral3", max_model_len=max_model_len, dtype=dtype, **config)
    expected = {"norms": 9, "MLPs": 4, "attentions": attentions, "layers": attentions}
    assert counts == expected | {"stacks": int(attentions > 1)}


def test_attention_and_layers_that_read_positions_themselves_stay() -> None:
    def change(model: Any) -> None:
        own = model.model.layers[1].self_attn.forward
        model.model.layers[1].self_attn.forward = lambda position_ids, **given: (
            own(**given)[0] + 0.01 * (position_ids[0, :, None] > 200),
            None,
        )
        layer = model.model.layers[2].forward
        model.model.layers[2].forward = lambda x, position_ids, **given: (
            layer(x, position_ids=position_ids, **given) + (position_ids[..., None] > 200)
        )

    assert fused("llama", change) == {
        "norms": 9, "MLPs": 4, "attentions": 3, "layers": 2, "stacks": 0,
    }  # fmt: skip
    assert fused("llama", change, max_model_len=201) == {
        "norms": 9, "MLPs": 4, "attentions": 4, "layers": 4, "stacks": 1,
    }  # fmt: skip


@pytest.mark.parametrize("bound", [2.0, 1e6])
def test_attention_that_bounds_its_numbers_stays_whether_they_reach_the_bound_or_not(
    bound: float,
) -> None:
    counts = fused("olmo", clip_qkv=bound)
    assert (counts["MLPs"], counts["attentions"], counts["layers"]) == (4, 0, 0)
    assert fused("olmo", clip_qkv=None)["attentions"] == 4


def test_an_mlp_that_bounds_its_numbers_stays() -> None:
    def change(model: Any) -> None:
        mlp = model.model.layers[1].mlp
        own = mlp.forward
        mlp.forward = lambda x: own(x).clamp(max=1e6)

    assert fused("llama", change) == {
        "norms": 9, "MLPs": 3, "attentions": 4, "layers": 3, "stacks": 1,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["llama4", "llama4 tuned, far below the switch"])
def test_what_would_only_call_the_own_forward_is_not_fused(name: str) -> None:
    """Llama 4's rotary table is complex, which the fused attention does not take."""
    assert fused(name) == {"norms": 9, "MLPs": 0, "attentions": 0, "layers": 0, "stacks": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_huge_number_may_be_rounded_otherwise_and_nothing_may_differ_more(
    dtype: torch.dtype,
) -> None:
    """Models have numbers of a hundred times the usual size, which one rounding moves that far."""
    output = torch.randn(7, 64).clamp(-3, 3).to(dtype)
    output[3, 5] = 300.0
    spread = float(output.float().std())
    rounded, moved = output.clone(), output.clone()
    rounded[3, 5] += 300 * torch.finfo(dtype).eps / 2
    moved[2, 2] += 0.2 * spread
    assert not torch.equal(rounded, output)
    assert same(rounded, output)
    assert not same(moved, output)
    assert not same(torch.full_like(output, float("nan")), output)


ROWS = (1, 2, 3, 7, 64, 145)


@pytest.mark.parametrize("gate", [SILU, GELU_TANH])
@pytest.mark.parametrize("inputs", [40, 43])
def test_gated_product_equals_float64(gate: int, inputs: int) -> None:
    gate_weight, up_weight = torch.randn(50, inputs), torch.randn(50, inputs)
    packed = PackedWeight([gate_weight, up_weight], gate=gate)
    assert torch.equal(packed.unpacked(0), gate_weight)
    assert torch.equal(packed.unpacked(1), up_weight)
    for rows in ROWS:
        x = torch.randn(rows, inputs)
        opened = x.double() @ gate_weight.double().T
        act = (
            functional.silu(opened) if gate == SILU else functional.gelu(opened, approximate="tanh")
        )
        expected = act * (x.double() @ up_weight.double().T)
        torch.testing.assert_close(packed.multiply(x).double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_product_and_residual_sum_equal_the_parts_for_each_row_alone(
    dtype: torch.dtype,
) -> None:
    weight, shift = torch.randn(70, 48).to(dtype), torch.randn(70).to(dtype)
    packed = PackedWeight([weight[:40], weight[40:]], bias=shift)
    norm = Norm(torch.rand(48), 1e-5, True)
    x, residual = torch.randn(145, 48).to(dtype) * 5, torch.randn(145, 70).to(dtype)
    whole = packed.multiply(x, norm=norm, residual=residual)
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    normed = (scaled.to(dtype).float() * norm.weight).to(dtype)
    expected = residual + functional.linear(normed, weight, shift)
    tolerance = 1e-4 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(whole, expected, rtol=2**-7, atol=tolerance)
    for rows in ROWS:
        part = packed.multiply(x[:rows], norm=norm, residual=residual[:rows])
        assert torch.equal(part, whole[:rows])


def test_wrong_shapes_and_types_are_refused() -> None:
    packed = PackedWeight([torch.randn(3, 4)])
    for x in (torch.randn(2, 5), torch.randn(2, 4).bfloat16()):
        with pytest.raises(ValueError, match=r"takes \[T, 4\]"):
            packed.multiply(x)


def test_patterns_are_known_by_their_structure() -> None:
    assert FusedMLP.of(nn.Linear(3, 3), NativeOperations()) is None
    assert list(FusedNorm.variants(nn.LayerNorm(8), NativeOperations())) == []
    norm = nn.RMSNorm(8, eps=1e-5)
    x = torch.randn(3, 8)
    results = [variant(x) for variant in FusedNorm.variants(norm, NativeOperations())]
    torch.testing.assert_close(results[0], functional.rms_norm(x, (8,), eps=1e-5))

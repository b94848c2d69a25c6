"""Whole models with the fused modules of a GPU, in Triton's interpreter: results and launches."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_graphs import CallAgain, GraphsFirst, graph_runner, worst
from support_launches import Launches, round_to_nearest
from support_models import (
    make_step,
    random_prompts,
    reference,
    run_batched,
    tiny_model,
    tiny_runner,
)
from support_zoo import SERVED
from tokenmill_engine.attention import IMPLEMENTATION, AttentionSpec, CallKey
from tokenmill_engine.capture_lint import capture_hazards
from tokenmill_engine.fusion import fuse_modules
from tokenmill_engine.probe import probe, switch_attention
from tokenmill_engine.triton_attention import TritonPagedAttention
from tokenmill_engine.triton_fusions import TritonOperations

BFLOAT, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
#: Launches of a layer without fusions and beside attention: a norm takes 8 (to float32, square,
#: mean, sum with epsilon, root, product, back, product), the rotary embedding of Q and K 10.
UNFUSED = {"llama": 2 * 8 + 10 + 7 + 2 + 2, "qwen3": 4 * 8 + 10 + 7 + 2 + 2}
#: Norm; QKV, output, gate and up; heads and cache; sum and norm; activation; down with its sum.
FUSED = {"rms_norm": 2, "aten::linear": 3, "prepare_and_write": 1, "gated": 1, "aten::addmm_": 1}
ATTENTION = {"attend": 1}
TOLERANCE = 2e-3


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    round_to_nearest(monkeypatch)


@dataclass
class Fused:
    model: PreTrainedModel
    specs: dict[CallKey, AttentionSpec]
    backend: TritonPagedAttention
    operations: TritonOperations
    counts: dict[str, int]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Fused:
        specs = probe(model).specs
        backend = TritonPagedAttention(specs.values(), model.device, split_tokens=8)
        operations = TritonOperations()
        counts = fuse_modules(model, backend, specs, operations, max_model_len=256)
        return cls(model, specs, backend, operations, counts)


def make(
    name: str, num_layers: int = 2, dtype: torch.dtype = FLOAT, **config: Any
) -> PreTrainedModel:
    variant = SERVED[name]
    config = {**variant.config, "num_hidden_layers": num_layers, **config}
    return tiny_model(variant.class_name, **config).to(dtype)


def whole(name: str, num_layers: int) -> dict[str, int]:
    """Everything fused."""
    norms = num_layers * (4 if name == "qwen3" else 2) + 1
    rest = dict.fromkeys(("MLPs", "attentions", "layers"), num_layers)
    return {"norms": norms, **rest, "stacks": 0}


def launches(name: str, num_layers: int, *, fused: bool) -> Counter[str]:
    """Of a decode step of two sequences, in the type that GPUs serve in."""
    model = make(name, num_layers, BFLOAT)
    parts = Fused.of(model) if fused else None
    assert parts is None or parts.counts == whole(name, num_layers)
    backend = TritonPagedAttention([], model.device)
    runner = tiny_runner(model, backend=backend, kernels="torch", skip_self_test=True)
    runner.kv_cache.fill(0.0)
    watch = Launches()
    with ExitStack() as stack:
        if parts is not None:
            stack.enter_context(watch.of(parts.operations, "kernels"))
        stack.enter_context(watch.of(backend, "_kernels"))
        stack.enter_context(watch.of(backend, "_elementwise"))
        stack.enter_context(watch)
        runner.compute_logits(make_step([([7] * 5, 4, 5, [3, 4]), ([8] * 3, 2, 3, [1])]))
    return watch.counts


@pytest.mark.parametrize("name", UNFUSED)
def test_launches_of_a_layer(name: str) -> None:
    without = launches(name, 2, fused=False) - launches(name, 1, fused=False)
    assert without.total() >= UNFUSED[name] + 2  # two of attention: write and attend
    fused = launches(name, 2, fused=True) - launches(name, 1, fused=True)
    assert fused == FUSED | ATTENTION
    assert sum(FUSED.values()) <= 12


@pytest.mark.parametrize("name", UNFUSED)
def test_a_whole_model_equals_generate(name: str) -> None:
    model = make(name)
    prompts = random_prompts(model, (7, 1))
    wanted = [reference(model, prompt, 2) for prompt in prompts]
    fused = Fused.of(model)
    assert fused.counts == whole(name, 2)
    runner = tiny_runner(model, backend=fused.backend, kernels="torch", skip_self_test=True)
    logits = run_batched(runner, prompts, [generation.token_ids for generation in wanted])
    assert worst(logits, [generation.logits for generation in wanted]) < TOLERANCE


@pytest.mark.parametrize("dtype", [BFLOAT, pytest.param(HALF, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", UNFUSED)
def test_rounding_is_no_worse_than_without_fusions(name: str, dtype: torch.dtype) -> None:
    """Against float64, which has the same weights."""
    model = make(name, 2, dtype)
    exact = make(name, 2, dtype).double()
    (prompt,) = random_prompts(model, (12,))
    truth, unfused = (last_logits(which, prompt) for which in (exact, model))
    fused = Fused.of(model)
    assert fused.counts == whole(name, 2)
    runner = tiny_runner(model, backend=fused.backend, kernels="torch", skip_self_test=True)
    (logits,) = runner.compute_logits(make_step([(prompt, 0, 12, [5, 9, 2])]))
    errors = [float((got.double() - truth).square().mean().sqrt()) for got in (logits, unfused)]
    assert errors[0] < 1.5 * errors[1]


@torch.inference_mode()
def last_logits(model: PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    model.set_attn_implementation("eager")
    logits: torch.Tensor = model(torch.tensor([prompt]), use_cache=False).logits[0, -1]
    return logits


def test_steps_through_graphs() -> None:
    model = make("qwen3", 1)
    prompts = random_prompts(model, (7, 3))
    wanted = [reference(model, prompt, 3) for prompt in prompts]
    Fused.of(model)
    driver = CallAgain()
    graphs_first = GraphsFirst(graph_runner(model, driver))
    logits = run_batched(graphs_first, prompts, [generation.token_ids for generation in wanted])
    assert worst(logits, [generation.logits for generation in wanted]) < TOLERANCE
    assert driver.num_replays > 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "change", "norms", "mlps", "attentions", "layers"),
    [
        ("gemma", {}, 5, 2, 2, 2),  # weights count from 1, GELU by its tanh
        ("llama", {"hidden_act": "gelu"}, 5, 2, 2, 2),
        ("llama mha bias", {}, 5, 2, 2, 2),
        ("qwen2", {}, 5, 2, 2, 2),
        ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}, 9, 2, 2, 0),
        ("granite", {}, 5, 2, 2, 0),  # its residual sums are weighted
        ("glm4", {}, 9, 0, 0, 0),  # rotary pairs are neighbours, one gate_up_proj
        ("gpt2", {"n_layer": 2}, 0, 0, 0, 0),
    ],
)
def test_what_is_fused(
    name: str, change: dict[str, Any], norms: int, mlps: int, attentions: int, layers: int
) -> None:
    counts = {"norms": norms, "MLPs": mlps, "attentions": attentions, "layers": layers}
    counts["stacks"] = 0
    assert Fused.of(make(name, **change)).counts == counts


def test_graphs_can_hold_what_is_fused_and_the_lint_sees_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fused = Fused.of(make("qwen3", 1))
    switch_attention(fused.model, IMPLEMENTATION)
    assert capture_hazards(fused.model, fused.specs) == ()
    opened = fused.operations.open_gates

    def waits(pairs: torch.Tensor, gate: int) -> torch.Tensor:
        assert pairs.sum().item() is not None
        return opened(pairs, gate)

    monkeypatch.setattr(fused.operations, "open_gates", waits)
    (hazard,) = capture_hazards(fused.model, fused.specs)
    assert hazard.operation == "aten::item"
    assert hazard.place.startswith("test_triton_fusions.py:")


def test_a_kernel_that_fails_leaves_its_modules_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from triton.runtime.errors import OutOfResources

    def fails(*_: object) -> torch.Tensor:
        raise OutOfResources(300, 200, "shared memory")

    monkeypatch.setattr(TritonOperations, "open_gates", fails)
    with caplog.at_level(logging.WARNING):
        fused = Fused.of(make("llama", 1))
    assert fused.counts == {"norms": 3, "MLPs": 0, "attentions": 1, "layers": 0, "stacks": 0}
    assert "left out: out of resource: shared memory" in caplog.text


def test_merged_weights_take_the_place_of_the_old_ones() -> None:
    model = make("llama", 1)
    layer = model.model.layers[0]
    names = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj", "mlp.up_proj"]
    kept = {name: layer.get_submodule(name).weight.detach().clone() for name in names}
    Fused.of(model)
    parts = {name: layer.get_submodule(name) for name in names}
    assert all(torch.equal(parts[name].weight, kept[name]) for name in names)
    storages = {part.weight.untyped_storage().data_ptr() for part in parts.values()}
    assert len(storages) == 2
    assert not [name for name, _ in layer.named_parameters() if "proj" in name]

"""Who gets graphs: decided on a made-up GPU, for nothing is run on it."""

from __future__ import annotations

import logging

import pytest
import torch

from support_models import tiny_model, tiny_runner
from support_zoo import SERVED
from tokenmill_engine import graph_choice
from tokenmill_engine.attention import AttentionBackend
from tokenmill_engine.graph_buckets import StepLimits
from tokenmill_engine.graph_choice import choose_graphs
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.paged_attention_reference import TorchPagedAttention
from tokenmill_engine.step_graphs import StepGraphs
from tokenmill_engine.triton_attention import TritonPagedAttention

LIMITS = StepLimits(max_rows=24, max_seqs=4, max_model_len=64, num_blocks=128, block_size=4)


@pytest.fixture(autouse=True)
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_choice, "CudaGraphs", lambda: None)


def make_runner(
    backend: AttentionBackend | None = None, name: str = "llama", device: str = "cuda"
) -> ModelRunner:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config | {"num_hidden_layers": 1})
    backend = backend or TritonPagedAttention([], model.device)
    runner = tiny_runner(model, backend=backend, skip_self_test=True)
    runner.device = torch.device(device)
    return runner


def choose(runner: ModelRunner, *, enforce_eager: bool = False) -> StepGraphs | None:
    return choose_graphs(runner, LIMITS, vocab_size=300, enforce_eager=enforce_eager)


def test_a_model_that_can_be_recorded_gets_graphs() -> None:
    assert isinstance(choose(make_runner()), StepGraphs)


def test_a_cpu_has_no_graphs() -> None:
    runner = make_runner(device="cpu")
    assert choose(runner) is None
    assert runner.graphs is None


@pytest.mark.parametrize(
    ("backend", "name", "enforce_eager", "why"),
    [
        (None, "llama", True, "as asked for"),
        (TorchPagedAttention(), "llama", False, "only our own attention"),
        (None, "llama rope dynamic", False, "aten::is_nonzero at transformers/modeling_rope"),
    ],
)
def test_what_cannot_be_recorded_runs_without_and_says_why(
    backend: AttentionBackend | None,
    name: str,
    enforce_eager: bool,
    why: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = make_runner(backend, name)
    with caplog.at_level(logging.INFO):
        assert choose(runner, enforce_eager=enforce_eager) is None
    assert why in caplog.text

"""The probe: what it learns of a model, and what it refuses whatever the configuration says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from support_models import tiny_config, tiny_model
from support_zoo import SERVED
from support_zoo_refused import REFUSED
from tokenmill_engine.attention import AttentionSpec
from tokenmill_engine.errors import UnsupportedModel
from tokenmill_engine.probe import ProbeResult, probe


def zoo_probe(name: str) -> ProbeResult:
    variant = (SERVED | REFUSED)[name]
    return probe(tiny_model(variant.class_name, **variant.config))


def spec(
    *, window: int | None = None, chunk: int | None = None, kv_heads: int = 2, dim: int = 16
) -> AttentionSpec:
    return AttentionSpec(window, chunk, kv_heads, dim, dim, torch.float32)


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        probe(model)
    return str(caught.value)


def test_a_plain_model_has_one_call_a_layer() -> None:
    result = zoo_probe("llama")
    assert result.specs == {(layer, 0): spec() for layer in range(4)}
    assert result.vocab_size == 300


def test_windows_are_found_where_no_argument_tells_them() -> None:
    """PhiMoE and Qwen2-MoE put theirs into the mask only, Llama 4 its chunks."""
    assert zoo_probe("phimoe sliding").specs[0, 0].window == 7
    windows = [one.window for one in zoo_probe("qwen2 moe sliding").specs.values()]
    assert windows == [7, None, None, None]  # of the first two layers, every other one
    assert [one.chunk for one in zoo_probe("llama4").specs.values()] == [8, None, 8, None]


def test_shapes_may_differ_between_layers_and_between_k_and_v() -> None:
    gemma = zoo_probe("gemma4 k is v").specs
    assert gemma[0, 0] == spec(window=7)
    assert gemma[1, 0] == spec(kv_heads=1, dim=32)
    latent = zoo_probe("deepseek v3").specs[0, 0]
    assert (latent.num_kv_heads, latent.key_dim, latent.value_dim) == (4, 24, 12)


def test_a_layer_may_attend_twice() -> None:
    assert list(zoo_probe("diffllama").specs)[:4] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_arguments_of_unknown_meaning() -> None:
    assert "unknown meaning: indices" in refusal(
        tiny_model(REFUSED["deepseek v3.2"].class_name, **REFUSED["deepseek v3.2"].config)
    )


def test_a_pattern_that_the_kernels_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    build = modeling_llama.create_causal_mask

    def with_prefix(**kwargs: Any) -> torch.Tensor | None:
        return build(**kwargs, or_mask_function=lambda batch, head, q, k: k < 2)

    monkeypatch.setattr(modeling_llama, "create_causal_mask", with_prefix)
    assert "pattern other than" in refusal(tiny_model())


def test_a_mask_that_comes_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    own = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: own)
    assert "mask of its own" in refusal(tiny_model())
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    assert "gets no mask" in refusal(tiny_model())


def test_a_window_that_the_mask_contradicts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        modeling_mistral,
        "create_sliding_window_causal_mask",
        modeling_mistral.create_causal_mask,
    )
    model = tiny_model("MistralForCausalLM", **tiny_config(sliding_window=7))
    assert "window of 7 tokens, but its mask has none" in refusal(model)


def test_a_model_that_fails_without_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()

    def fail(*_: Any, **__: Any) -> None:
        raise AttributeError("NoneType has no attribute update")

    monkeypatch.setattr(model.model.layers[2], "forward", fail)
    assert "cannot run without a cache object of its own: AttributeError" in refusal(model)

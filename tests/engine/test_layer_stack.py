"""Layers that run as one: bit for bit what they give one by one, where nothing lies between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from support_models import make_step, random_prompts, run_batched, tiny_model, tiny_runner
from support_zoo import SERVED
from tokenmill_engine import fusion, native_layers
from tokenmill_engine.fused_modules import Fused, FusedLayer
from tokenmill_engine.fused_stack import StackRest, StackStart
from tokenmill_engine.kernels.build import KernelUnavailable, load_kernel
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.native_layers import NativeLayers

FLOAT, BFLOAT = torch.float32, torch.bfloat16
PROMPTS = random_prompts(tiny_model(), (1, 6, 19, 40))
CONTINUATIONS = [[5, 9, 2, 7]] * len(PROMPTS)


@pytest.fixture(autouse=True)
def _kernels() -> None:
    try:
        load_kernel("layers")
    except KernelUnavailable as why:
        pytest.skip(str(why))


def runner_of(
    name: str = "llama",
    dtype: torch.dtype = FLOAT,
    change: Callable[[Any], None] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> ModelRunner:
    torch.manual_seed(4)
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config | (config or {})).to(dtype)
    if change is not None:
        change(model)
    return tiny_runner(model, kernels="native", skip_self_test=True, **options)


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    return run_batched(runner, PROMPTS, CONTINUATIONS, seed=1)


def forwards(runner: ModelRunner) -> list[type]:
    model: Any = runner.model
    return [type(layer.forward) for layer in model.model.layers]


def one_by_one(monkeypatch: pytest.MonkeyPatch, *given: Any, **options: Any) -> ModelRunner:
    with monkeypatch.context() as patch:
        patch.setattr(fusion, "chains", lambda _: ())
        return runner_of(*given, **options)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
@pytest.mark.parametrize(
    "name", ["llama", "llama mha bias", "qwen2", "qwen3", "gemma", "mistral", "smollm3 sliding"]
)
def test_a_stack_gives_what_its_layers_give(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stacked, plain = runner_of(name, dtype), one_by_one(monkeypatch, name, dtype)
    assert forwards(stacked) == [StackStart, StackRest, StackRest, StackRest]
    assert forwards(plain) == [FusedLayer] * 4
    for got, expected in zip(logits_of(stacked), logits_of(plain), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_rows_beyond_a_chunk_follow(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = one_by_one(monkeypatch, "llama", dtype)
    monkeypatch.setattr(native_layers, "CHUNK_ROWS", 7)
    stacked = runner_of("llama", dtype)
    assert forwards(stacked)[0] is StackStart
    for got, expected in zip(logits_of(stacked), logits_of(plain), strict=True):
        assert torch.equal(got, expected)


def test_pages_for_tiles_are_read_and_written_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ("llama", BFLOAT, None, {"head_dim": 32})
    options: dict[str, Any] = {"block_size": 32, "num_gpu_blocks_override": 16}
    runners = (runner_of(*given, **options), one_by_one(monkeypatch, *given, **options))
    prompt = PROMPTS[3]
    for start, end in ((0, 33), (33, 34), (34, 40)):
        step = make_step([(prompt, start, end, [7, 3])])
        got, expected = (runner.compute_logits(step) for runner in runners)
        assert torch.equal(got, expected)


class Layers(nn.ModuleList):
    """In which a model's loop over its layers does something before one of them."""

    number: int
    what: Callable[[torch.Tensor], torch.Tensor]

    def __getitem__(self, key: Any) -> Any:
        layers = super().__getitem__(key)
        if not isinstance(key, slice):
            return layers
        return [
            layer if number != self.number else lambda x, layer=layer, **kwargs: layer(
                self.what(x), **kwargs
            )
            for number, layer in enumerate(layers)
        ]  # fmt: skip


def between(number: int, what: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    def change(model: Any) -> None:
        layers = Layers(model.model.layers)
        layers.number, layers.what = number, what
        model.model.layers = layers

    return change


def test_a_stack_ends_where_something_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    change = between(2, lambda x: 1.5 * x)
    stacked = runner_of(change=change)
    assert forwards(stacked) == [StackStart, StackRest, StackStart, StackRest]
    plain = one_by_one(monkeypatch, change=change)
    for got, expected in zip(logits_of(stacked), logits_of(plain), strict=True):
        assert torch.equal(got, expected)


def test_what_is_changed_in_place_between_layers_keeps_them_apart() -> None:
    """The layer before is not even fused: what was recorded of it is no longer what it gave."""
    first, second, *rest = forwards(runner_of(change=between(2, lambda x: x.mul_(1.5))))
    assert first is FusedLayer
    assert not issubclass(second, Fused)
    assert rest == [StackStart, StackRest]


def test_what_comes_between_the_layers_of_a_stack_later_is_refused() -> None:
    """The first layer has run them all by then."""
    runner = runner_of()
    between(2, lambda x: 1.5 * x)(runner.model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="between the layers"):
            logits_of(runner)


def test_layers_of_different_widths_are_no_stack() -> None:
    layers = [
        layer
        for size in (64, 96)
        for layer in fused_layers(runner_of(config={"hidden_size": size}))
    ]
    assert NativeLayers.fits(layers[:4])
    assert NativeLayers.fits(layers[4:])
    assert not NativeLayers.fits(layers)


def fused_layers(runner: ModelRunner) -> list[FusedLayer]:
    model: Any = runner.model
    return [layer.forward._own for layer in model.model.layers]

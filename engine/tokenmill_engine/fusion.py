"""Replacing the forwards of a model's modules by fused ones, each checked on random tokens first.

Nothing is known of architectures here: the model runs once, on random tokens over a small paged
cache, while the inputs and outputs of every module that could be fused are recorded. A fused one
stays only where it gives the recorded output for the recorded input.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention import (
    IMPLEMENTATION,
    AttentionMetadata,
    AttentionRule,
    AttentionSpec,
    CallKey,
    ForwardContext,
    LayerCache,
    forward_context,
)
from .fused_modules import AttentionCall, Forward, FusedAttention, FusedLayer, FusedMLP, FusedNorm
from .fused_operations import Norm, Operations, PreparingBackend
from .kv_cache import allocate_kv_cache
from .outputs import ScheduledRequest, SchedulerOutput
from .probe import switch_attention
from .request import Request
from .sampling_params import SamplingParams
from .step_inputs import StepInputs, build_step_inputs

logger = logging.getLogger(__name__)

NUM_TOKENS, BLOCK_SIZE = 7, 4

#: Largest difference from the recorded output, beyond the rounding of each number itself, as a
#: share of the output's standard deviation; a module that computes something else is off by about
#: 1. The worst of SmolLM2's modules, through Triton: 0.037 in bfloat16, 0.008 in float16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}


@dataclass(slots=True, eq=False)
class _Record:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    calls: list[tuple[CallKey, AttentionRule]]


@dataclass(slots=True, eq=False)
class _Recorder:
    """An `AttentionBackend` that notes which calls reach it."""

    backend: PreparingBackend
    keys: Mapping[int, CallKey]  # by address of the K of a call's cache
    calls: list[tuple[CallKey, AttentionRule]] = field(default_factory=list)

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.backend.cache_shapes(spec, num_blocks, block_size)

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        self.calls.append((self.keys[layer.key.data_ptr()], rule))
        return self.backend.write_and_attend(query, key, value, layer, meta, rule)


@torch.inference_mode()
def fuse_modules(
    model: PreTrainedModel,
    backend: PreparingBackend,
    specs: Mapping[CallKey, AttentionSpec],
    operations: Operations,
) -> dict[str, int]:
    """Fuses what can be fused, in place; returns how many of each kind, which is also logged."""
    step = _Step(model, backend, specs, operations)
    records = step.record(_candidates(model, operations))
    counts = {"norms": 0, "MLPs": 0, "attentions": 0, "layers": 0}
    for module, record in records.items():
        for norm in FusedNorm.variants(module, operations):
            if step.agrees(norm, record):
                _install(module, norm)
                counts["norms"] += 1
                break
    for module, record in records.items():
        mlp = FusedMLP.of(module, operations)
        if mlp is not None and step.agrees(mlp, record):
            _install(module, mlp, mlp.parts)
            counts["MLPs"] += 1
        counts["attentions"] += _fuse_attention(module, record, step)
    for module, record in records.items():
        layer = FusedLayer.of(module, operations)
        if layer is not None and step.agrees(layer, record):
            _install(module, layer)
            counts["layers"] += 1
    logger.info("fused: %s", ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return counts


def _candidates(model: nn.Module, operations: Operations) -> list[nn.Module]:
    return [
        module
        for module in model.modules()
        if hasattr(module, "self_attn")
        or FusedAttention.fits(module)
        or hasattr(module, "down_proj")
        or next(FusedNorm.variants(module, operations), None) is not None
    ]


def _fuse_attention(module: nn.Module, record: _Record, step: _Step) -> int:
    if not FusedAttention.fits(module) or len(record.calls) != 1:
        return 0
    key, rule = record.calls[0]
    spec = step.specs[key]
    query_norm, key_norm = (_head_norm(module, name, spec) for name in ("q_norm", "k_norm"))
    for rotates in (True, False):
        fused = FusedAttention(
            module,
            AttentionCall(key, spec, rule),
            step.operations,
            rotates=rotates,
            norms=(query_norm, key_norm),
        )
        if step.agrees(fused, record):
            _install(module, fused, fused.parts)
            return 1
    return 0


def _head_norm(module: nn.Module, name: str, spec: AttentionSpec) -> Norm | None:
    forward = getattr(getattr(module, name, None), "forward", None)
    if not isinstance(forward, FusedNorm) or len(forward.norm.weight) != spec.key_dim:
        return None
    return forward.norm


def _install(module: nn.Module, fused: Forward, parts: Mapping[str, nn.Module] = {}) -> None:
    for name, part in parts.items():
        setattr(module, name, part)
    # On the instance: the class, its attributes and hooks stay what architectures expect.
    module.__dict__["forward"] = fused


class _Step:
    """One prompt of random tokens, its cache, and runs of modules in its context."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: PreparingBackend,
        specs: Mapping[CallKey, AttentionSpec],
        operations: Operations,
    ) -> None:
        self.backend, self.specs, self.operations = backend, specs, operations
        self._model = model
        self._layers = allocate_kv_cache(
            specs,
            backend,
            num_blocks=-(-NUM_TOKENS // BLOCK_SIZE),
            block_size=BLOCK_SIZE,
            device=model.device,
        ).layers
        self._inputs = _random_prompt(model)

    def record(self, modules: Iterable[nn.Module]) -> dict[nn.Module, _Record]:
        """What goes into and comes out of each of `modules` that runs exactly once."""
        switch_attention(self._model, IMPLEMENTATION)
        keys = {layer.key.data_ptr(): key for key, layer in self._layers.items()}
        recorder = _Recorder(self.backend, keys)
        records: dict[nn.Module, _Record] = {}
        again: set[nn.Module] = set()
        starts: dict[nn.Module, int] = {}

        def before(module: nn.Module, _args: Any) -> None:
            starts[module] = len(recorder.calls)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if module in records:
                again.add(module)
            calls = recorder.calls[starts[module] :]
            records[module] = _Record(args, dict(kwargs), output, calls)

        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            with forward_context(replace(self._context(), backend=recorder)):
                self._model(
                    input_ids=self._inputs.input_ids,
                    position_ids=self._inputs.position_ids,
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=self._inputs.logits_rows,
                )
        return {module: record for module, record in records.items() if module not in again}

    def agrees(self, fused: Forward, record: _Record) -> bool:
        """Whether `fused` gives the recorded output."""
        for key, _ in record.calls:
            self._layers[key].key.fill_(float("nan"))
            self._layers[key].value.fill_(float("nan"))
        try:
            with forward_context(self._context()):
                output = fused(*record.args, **record.kwargs)
        except (RuntimeError, ValueError):  # shapes that the pattern does not expect
            return False
        except self.operations.errors as why:
            logger.warning("a fused module fails and is left out: %s", str(why).partition("\n")[0])
            return False
        return _same(output, record.output)

    def _context(self) -> ForwardContext:
        return ForwardContext(
            backend=self.backend,
            specs=self.specs,
            layers=self._layers,
            metadata=self._inputs.metadata,
            long_rows=self._inputs.long_rows,
        )


def _random_prompt(model: PreTrainedModel) -> StepInputs:
    embeddings: Any = model.get_input_embeddings()
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(embeddings.weight), (NUM_TOKENS,), generator=generator).tolist()
    request = Request("fusion", tokens, SamplingParams(max_tokens=1))
    request.block_ids = list(reversed(range(-(-NUM_TOKENS // BLOCK_SIZE))))
    output = SchedulerOutput((ScheduledRequest(request, 0, NUM_TOKENS),), NUM_TOKENS)
    return build_step_inputs(output, block_size=BLOCK_SIZE, device=model.device)


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return (
            isinstance(got, tuple) and len(got) == len(expected) and all(map(_same, got, expected))
        )
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return got is expected
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    # What a last rounding may do to a number belongs to its own size: a few of a model's numbers
    # can be a hundred times as large as the others.
    own = torch.finfo(expected.dtype).eps * expected.float().abs()
    beyond = float(((got.float() - expected.float()).abs() - own).max())
    return beyond <= TOLERANCES[expected.dtype] * float(expected.float().std())

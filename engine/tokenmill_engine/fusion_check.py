"""What modules gave for random tokens, and whether a fused one gives the same.

The model runs once over a small paged cache, while the inputs and outputs of every module that
could be fused are recorded. Its rows have positions from the first to the last that the model is
served at. Fused modules know them from the rotary tables alone; a module that also reads them
itself, as some do to scale Q, is found by a second call with other positions. A module that keeps
numbers within bounds, which random tokens may never reach, is found by the operations it uses.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
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
from .fused_modules import Fused
from .fused_operations import Operations, PreparingBackend
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

#: What keeps numbers within bounds, as OLMo does with Q, K and V.
BOUNDS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "clamp", "clamp_", "clamp_min", "clamp_min_", "clamp_max", "clamp_max_", "clip", "clip_",
        "minimum", "maximum", "hardtanh", "hardtanh_",
    )
)  # fmt: skip

#: Share of these for two calls of the same code, which may round otherwise only by their threads.
REPEAT = 0.1


@dataclass(slots=True, eq=False)
class Record:
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    calls: list[RecordedCall]
    reads_positions: bool = False  # beside the rotary tables, which is all that fused ones read
    bounds_numbers: bool = False

    @property
    def may_be_fused(self) -> bool:
        """Whether equal results mean that the same is computed."""
        return not (self.reads_positions or self.bounds_numbers)

    @property
    def results(self) -> tuple[Any, ...]:
        """The output and each query, which shows more of what was done to it."""
        return self.output, *(call.query for call in self.calls)


@dataclass(slots=True, eq=False)
class RecordedCall:
    """Of the attention backend."""

    key: CallKey
    rule: AttentionRule
    query: torch.Tensor


@dataclass(slots=True, eq=False)
class _Recorder:
    """An `AttentionBackend` that notes which calls reach it."""

    backend: PreparingBackend
    keys: Mapping[int, CallKey]  # by address of the K of a call's cache
    calls: list[RecordedCall] = field(default_factory=list)

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
        self.calls.append(RecordedCall(self.keys[layer.key.data_ptr()], rule, query.clone()))
        return self.backend.write_and_attend(query, key, value, layer, meta, rule)


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types for it
    """Notes the modules under way when floating-point numbers are kept within bounds."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.under_way: list[nn.Module] = []
        self.bounding: set[nn.Module] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in BOUNDS and args[0].is_floating_point():
            self.bounding.update(self.under_way)
        return func(*args, **(kwargs or {}))


class RecordedStep:
    """One prompt of random tokens, its cache, and runs of modules in its context."""

    def __init__(
        self,
        model: PreTrainedModel,
        backend: PreparingBackend,
        specs: Mapping[CallKey, AttentionSpec],
        operations: Operations,
        max_model_len: int,
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
        self._keys = {layer.key.data_ptr(): key for key, layer in self._layers.items()}
        self._inputs = _random_prompt(model)
        self._positions = _spread_positions(max_model_len).to(model.device)

    def record(self, modules: Iterable[nn.Module]) -> dict[nn.Module, Record]:
        """What goes into and comes out of each of `modules` that runs exactly once."""
        switch_attention(self._model, IMPLEMENTATION)
        recorder = _Recorder(self.backend, self._keys)
        records: dict[nn.Module, Record] = {}
        again: set[nn.Module] = set()
        starts: dict[nn.Module, int] = {}
        watch = _Watch()

        def before(module: nn.Module, _args: Any) -> None:
            starts[module] = len(recorder.calls)
            watch.under_way.append(module)

        def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            watch.under_way.pop()
            if module in records:
                again.add(module)
            calls = recorder.calls[starts[module] :]
            records[module] = Record(args, dict(kwargs), output, calls)

        with ExitStack() as hooks:
            for module in modules:
                hooks.enter_context(module.register_forward_pre_hook(before))
                hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
            with watch, forward_context(replace(self._context(), backend=recorder)):
                self._model(
                    input_ids=self._inputs.input_ids,
                    position_ids=self._positions,
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=self._inputs.logits_rows,
                )
        once = {module: record for module, record in records.items() if module not in again}
        for module, record in once.items():
            record.reads_positions = self._reads_positions(module, record)
            record.bounds_numbers = module in watch.bounding
        return once

    def _reads_positions(self, module: nn.Module, record: Record) -> bool:
        """Whether it gives something else where all positions are 0 but in the rotary tables."""
        args = tuple(map(_without_positions, record.args))
        kwargs = {name: _without_positions(value) for name, value in record.kwargs.items()}
        given, moved = (*record.args, *record.kwargs.values()), (*args, *kwargs.values())
        if all(map(operator.is_, given, moved)):
            return False
        recorder = _Recorder(self.backend, self._keys)
        try:
            with forward_context(replace(self._context(), backend=recorder)):
                output = module(*args, **kwargs)
        except (RuntimeError, ValueError):
            return True
        again = Record(args, kwargs, output, recorder.calls)
        return not same(again.results, record.results, REPEAT)

    def agrees(self, fused: Fused, record: Record, *, share: float = 1.0) -> bool:
        """Whether `fused` gives the recorded output, and not by the module's own forward."""
        return same(self.output_of(fused, record), record.output, share)

    def output_of(self, fused: Fused, record: Record) -> Any:
        """For what was recorded; None if it is not for `fused` to compute that."""
        for call in record.calls:
            self._layers[call.key].key.fill_(float("nan"))
            self._layers[call.key].value.fill_(float("nan"))
        try:
            with forward_context(self._context()):
                return fused.compute(*record.args, **record.kwargs)
        except (RuntimeError, ValueError):  # shapes that the pattern does not expect
            return None
        except self.operations.errors as why:
            logger.warning("a fused module fails and is left out: %s", str(why).partition("\n")[0])
            return None

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


def _spread_positions(max_model_len: int) -> torch.Tensor:
    """`[1, T]` int64, from the first to the last, even in their logarithms.

    They need not be those of the cache: attention counts its own.
    """
    steps = (number / (NUM_TOKENS - 1) for number in range(NUM_TOKENS))
    return torch.tensor([[round(max_model_len**step) - 1 for step in steps]])


def _without_positions(value: Any) -> Any:
    is_whole = isinstance(value, torch.Tensor) and value.dtype in (torch.int64, torch.int32)
    return torch.zeros_like(value) if is_whole else value


def same(got: Any, expected: Any, share: float = 1.0) -> bool:
    """Within this share of the tolerance."""
    if isinstance(expected, tuple):
        if not isinstance(got, tuple) or len(got) != len(expected):
            return False
        return all(same(*pair, share) for pair in zip(got, expected, strict=True))
    if not isinstance(expected, torch.Tensor) or not isinstance(got, torch.Tensor):
        return got is expected
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    # What a last rounding may do to a number belongs to its own size: a few of a model's numbers
    # can be a hundred times as large as the others.
    own = torch.finfo(expected.dtype).eps * expected.float().abs()
    beyond = float(((got.float() - expected.float()).abs() - own).max())
    return beyond <= share * TOLERANCES[expected.dtype] * float(expected.float().std())

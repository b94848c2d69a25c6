"""From engine options to a runner that is ready for its first request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from .attention import AttentionBackend
from .checkpoint import LoadedModel, Progress, load_model
from .config import EngineConfig
from .errors import ConfigError
from .graph_buckets import StepLimits
from .graph_choice import NUM_SPARE_BLOCKS, choose_graphs
from .kernel_choice import choose_attention, prepare_modules
from .kv_budget import KVBudget, cpu_cache_bytes, cuda_cache_bytes, plan_kv_budget
from .kv_cache import allocate_kv_cache, bytes_per_block
from .long_rope import install_long_rope
from .model_check import ExactLimits, check_model, max_positions
from .model_runner import ModelRunner
from .probe import ProbeResult, probe
from .self_test import BLOCK_SIZE, NUM_BLOCKS, plain_results, self_test

#: For a model that does not say how long its sequences may become.
DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the scheduler must know of the model. The limits are those in force; `notes` say why."""

    vocab_size: int  # width of the logits
    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    rope_switch_tokens: int | None
    dtype: torch.dtype
    device: torch.device
    kv_cache_bytes: int
    notes: tuple[str, ...] = ()


def load_runner(
    config: EngineConfig, on_progress: Progress | None = None
) -> tuple[ModelRunner, ModelFacts]:
    """Load, check and warm up the model that `config` names.

    Raises `ModelLoadError`, `UnsupportedModel` or `ConfigError`.
    """
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    return build_runner(load_model(config, on_progress), config, on_progress=on_progress)


def build_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    *,
    backend: AttentionBackend | None = None,
    on_progress: Progress | None = None,
) -> tuple[ModelRunner, ModelFacts]:
    """The same for a model that is loaded already."""
    report = on_progress or (lambda _: None)
    check_model(loaded.model)
    report("probing the attention layers")
    probed = probe(loaded.model)
    parts = _Parts(
        loaded=loaded,
        backend=backend or choose_attention(config.kernels, probed.specs.values(), loaded.device),
        probed=probed,
        rope_switch_tokens=install_long_rope(loaded.model),
    )
    limits = _effective_limits(config, loaded)
    expected = []
    if not config.skip_self_test:
        report("computing what the self-test expects")
        longest = parts.rope_switch_tokens or limits.max_model_len
        expected = plain_results(loaded.model, longest=min(longest, limits.max_model_len))
    report("fusing and packing")
    prepare_modules(config.kernels, loaded.model, parts.backend, probed.specs, limits.max_model_len)
    if expected:
        report("testing the model on its own weights")
        tested = parts.runner(NUM_BLOCKS, BLOCK_SIZE, fill=float("nan"))
        self_test(tested, expected, max_step_tokens=limits.max_num_batched_tokens)
    report("allocating the KV cache")
    block_bytes = bytes_per_block(parts.probed.specs, config.block_size)
    budget = plan_kv_budget(
        replace(config, max_num_seqs=limits.max_num_seqs),
        block_bytes=block_bytes,
        max_model_len=limits.max_model_len,
        memory_bytes=_memory_bytes(config, parts, limits),
    )
    runner = parts.runner(budget.num_blocks, config.block_size)
    facts = _facts(loaded, parts, limits, budget, runner)
    runner.graphs = choose_graphs(
        runner,
        _step_limits(facts),
        vocab_size=facts.vocab_size,
        enforce_eager=config.enforce_eager,
    )
    report("warming up")
    runner.warm_up()
    return runner, facts


@dataclass(frozen=True, slots=True, eq=False)
class _Parts:
    """Everything of a runner but its KV cache."""

    loaded: LoadedModel
    backend: AttentionBackend
    probed: ProbeResult
    rope_switch_tokens: int | None

    def runner(self, num_blocks: int, block_size: int, *, fill: float | None = None) -> ModelRunner:
        kv_cache = allocate_kv_cache(
            self.probed.specs,
            self.backend,
            num_blocks=num_blocks,
            block_size=block_size,
            device=self.loaded.device,
            num_spare_blocks=NUM_SPARE_BLOCKS if self.loaded.device.type == "cuda" else 0,
        )
        if fill is not None:
            kv_cache.fill(fill)
        return ModelRunner(
            self.loaded.model,
            self.probed.specs,
            kv_cache,
            self.backend,
            rope_switch_tokens=self.rope_switch_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Limits:
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    notes: tuple[str, ...]


def _effective_limits(config: EngineConfig, loaded: LoadedModel) -> _Limits:
    """The options, lowered to where the model's results stay exact."""
    exact = ExactLimits.of(loaded.model)
    why = "; ".join(exact.reasons)
    made_for = max_positions(loaded.hf_config)
    notes = []
    if config.max_model_len is not None:
        if made_for is not None and config.max_model_len > made_for:
            raise ConfigError(
                "max_model_len", f"is {config.max_model_len}; the model ends at {made_for} tokens"
            )
        if exact.sequence_tokens is not None and config.max_model_len > exact.sequence_tokens:
            raise ConfigError(
                "max_model_len",
                f"is {config.max_model_len}; results of this model are exact up to "
                f"{exact.sequence_tokens} tokens only: {why}",
            )
    max_model_len = config.max_model_len or made_for or DEFAULT_MAX_MODEL_LEN
    if exact.sequence_tokens is not None and max_model_len > exact.sequence_tokens:
        notes.append(
            f"max_model_len lowered from {max_model_len} to {exact.sequence_tokens}: {why}"
        )
        max_model_len = exact.sequence_tokens
    step_tokens = config.max_num_batched_tokens
    if exact.step_tokens is not None and step_tokens > exact.step_tokens:
        notes.append(
            f"max_num_batched_tokens lowered from {step_tokens} to {exact.step_tokens}: {why}"
        )
        step_tokens = exact.step_tokens
    max_num_seqs = min(config.max_num_seqs, step_tokens)
    if max_num_seqs < config.max_num_seqs:
        notes.append(
            f"max_num_seqs lowered from {config.max_num_seqs} to {max_num_seqs}: each running "
            "request needs a row of the step"
        )
    return _Limits(max_model_len, max_num_seqs, step_tokens, tuple(notes))


def _memory_bytes(config: EngineConfig, parts: _Parts, limits: _Limits) -> Callable[[], int]:
    if parts.loaded.device.type != "cuda":
        return cpu_cache_bytes

    def profile() -> None:
        runner = parts.runner(1, config.block_size)
        runner.profile(limits.max_num_batched_tokens, limits.max_num_seqs, limits.max_model_len)

    return lambda: cuda_cache_bytes(parts.loaded.device, config.gpu_memory_utilization, profile)


def _facts(
    loaded: LoadedModel, parts: _Parts, limits: _Limits, budget: KVBudget, runner: ModelRunner
) -> ModelFacts:
    return ModelFacts(
        vocab_size=parts.probed.vocab_size,
        num_blocks=budget.num_blocks,
        block_size=runner.kv_cache.block_size,
        max_model_len=budget.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        rope_switch_tokens=parts.rope_switch_tokens,
        dtype=loaded.dtype,
        device=loaded.device,
        kv_cache_bytes=runner.kv_cache.num_bytes,
        notes=(*loaded.notes, *limits.notes, *budget.notes),
    )


def _step_limits(facts: ModelFacts) -> StepLimits:
    return StepLimits(
        max_rows=facts.max_num_batched_tokens,
        max_seqs=facts.max_num_seqs,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
    )

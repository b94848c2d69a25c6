"""Engine options: frozen, validated, never written to after construction. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from .errors import ConfigError

DType = Literal["auto", "float32", "bfloat16", "float16"]
Device = Literal["auto", "cpu", "cuda"]
SchedulingPolicy = Literal["fcfs", "priority"]
Kernels = Literal["auto", "native", "torch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """What bounds a step: rows (`max_num_batched_tokens`) and requests (`max_num_seqs`)."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_model_len: int = 2048
    policy: SchedulingPolicy = "fcfs"
    #: How many later requests may start before one for which there are no blocks yet.
    max_overtakes: int = 8
    #: A prefix that a step computes is worth waiting for from so many tokens on: with fewer the
    #: request computes them too, for a step takes longer than they do.
    min_awaited_tokens: int = 64
    #: Steps with decoding requests should take this long at most; prompt chunks are sized for it.
    itl_target_ms: float | None = None
    #: LongRoPE changes its frequencies when a request grows past this many tokens: everything
    #: cached until then must be computed again (None: the model has no such switch).
    rope_switch_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            _at_least(field, getattr(self, field), 1)
        _at_least("max_overtakes", self.max_overtakes, 0)
        _at_least("min_awaited_tokens", self.min_awaited_tokens, 1)
        _above_zero("itl_target_ms", self.itl_target_ms)
        _one_of("scheduling_policy", self.policy, get_args(SchedulingPolicy))
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs ({self.max_num_seqs}), "
                "so that every running request can decode one token in a step",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All engine options, under vLLM's names; the defaults are ours where a comment says so."""

    model: str
    revision: str | None = None
    tokenizer: str | None = None
    dtype: DType = "auto"
    device: Device = "auto"
    max_model_len: int | None = None  # None: what the model supports, as far as the cache holds it
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    block_size: int = 32  # vLLM: 16; 32 measured faster on CPU, see docs/decisions
    num_gpu_blocks_override: int | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: SchedulingPolicy = "fcfs"
    itl_target_ms: float | None = None  # ours: inter-token latency that prompts must not exceed
    async_scheduling: bool | None = None  # None: where tokens are chosen on a GPU
    seed: int = 0
    trust_remote_code: bool = False
    enforce_eager: bool = False
    kernels: Kernels = "auto"  # auto: our native ones where they can be built and pay
    num_threads: int | None = None  # torch threads on CPU; None: torch's own choice
    skip_self_test: bool = False  # the numeric self-test at start-up

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("model", "must name a Hugging Face folder or hub id")
        _one_of("dtype", self.dtype, get_args(DType))
        _one_of("device", self.device, get_args(Device))
        for field in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size"):
            _at_least(field, getattr(self, field), 1)
        for field in ("num_gpu_blocks_override", "kv_cache_memory_bytes", "num_threads"):
            _at_least(field, getattr(self, field), 1)
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError("gpu_memory_utilization", "must be above 0 and at most 1")
        if not self.enable_chunked_prefill:
            raise ConfigError(
                "enable_chunked_prefill",
                "cannot be switched off: prompts are always computed in chunks within the token "
                "budget; raise max_num_batched_tokens to make the chunks larger",
            )
        if not 0 <= self.seed < 2**63:
            raise ConfigError("seed", "must be between 0 and 2**63 - 1")
        _above_zero("itl_target_ms", self.itl_target_ms)
        _one_of("scheduling_policy", self.scheduling_policy, get_args(SchedulingPolicy))
        _one_of("kernels", self.kernels, get_args(Kernels))


def _at_least(field: str, value: int | None, minimum: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(field, f"must be a whole number of at least {minimum}")


def _above_zero(field: str, value: float | None) -> None:
    if value is not None and not 0 < value < float("inf"):
        raise ConfigError(field, "must be a number above 0")


def _one_of(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(field, f"must be one of {', '.join(choices)}")

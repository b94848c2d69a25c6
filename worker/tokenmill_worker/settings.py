"""The options of a worker. No other module decides by the environment.

An option is a flag `--lease-ms`, an environment variable `TOKENMILL_LEASE_MS` or a key `lease_ms`
of the config file; the first one that is given counts, in this order.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from tokenmill import limits
from tokenmill._redis import URL_FILE_VARIABLE
from tokenmill.errors import ConfigurationError
from tokenmill.keys import Keyspace
from tokenmill_engine.config import (
    Device,
    DType,
    EngineConfig,
    Kernels,
    SchedulingPolicy,
)
from tokenmill_engine.errors import ConfigError

from .config_file import read_config_file
from .errors import SettingsError
from .model_store import DEFAULT_MODEL
from .queue_settings import QueueSettings

logger = logging.getLogger(__name__)

ENV_PREFIX = "TOKENMILL_"
#: Variables with our prefix that the Makefile, compose, the tests and the benchmarks read.
READ_ELSEWHERE = (
    "ASSUMED_TOKENS_PER_S", "EXPORTER_HOST", "EXPORTER_PORT", "GPU", "GRAFANA_PORT", "IMAGE",
    "KERNELS_DIR", "MODEL_DIR", "PEERS_DIR", "PROMETHEUS_PORT", "REDIS_MAXMEMORY", "REDIS_PORT",
    "SECRETS_DIR", "TEST_MODEL", "TEST_SERVER", "VARIANT",
)  # fmt: skip
#: The reader blocks on Redis for at most this long at a time. A drain waits for the end of a read.
BLOCK_MS = 500


class Settings(QueueSettings):
    """Every option, with its default and its help text."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,  # a compose file passes on what is unset as an empty text
        extra="forbid",
        frozen=True,
        protected_namespaces=(),
    )

    # ---- leases ----
    lease_ms: int = Field(
        15_000,
        ge=300,
        le=3_600_000,
        description="Without a sign of life for so long, a worker's requests go to its peers.",
    )
    heartbeat_ms: int | None = Field(
        None, ge=50, description="Interval of the signs of life; a quarter of the lease if unset."
    )
    engine_stall_ms: int = Field(
        120_000, ge=1000, description="An engine step longer than this ends the process."
    )
    drain_grace_s: float = Field(
        0.0,
        ge=0,
        le=86_400,
        description="On SIGTERM, go on generating for so long before handing over to peers.",
    )
    handover_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Time for handing over when Redis does not answer."
    )
    resume_policy: Literal["prefix", "strict"] = Field(
        "prefix",
        description="May this worker go on with what another model began? strict: no, it fails.",
    )
    aging_ms: int = Field(
        10_000,
        ge=1,
        le=3_600_000,
        description="A request that has waited so long is served like the next higher priority.",
    )
    give_back_ms: int = Field(
        1000,
        ge=50,
        le=3_600_000,
        description="A request without room here for so long goes to a peer that has some.",
    )
    max_strikes: int = Field(
        3, ge=1, le=100, description="Workers lost on a request without a token before it is dead."
    )
    max_attempts: int = Field(
        20, ge=1, le=1000, description="Leases of one request, at most; hand-overs do not count."
    )
    max_retries: int = Field(
        2, ge=0, le=100, description="How often a request is retried after an error it may not own."
    )
    retry_backoff_ms: int = Field(1000, ge=1, description="Delay of the first retry; it doubles.")
    retention_s: float = Field(
        limits.DEFAULT_RETENTION_S,
        ge=1,
        le=limits.MAX_DEADLINE_S,
        description="How long an ended request and its tokens can be read.",
    )
    dead_letter_body_s: float = Field(
        86_400,
        ge=0,
        le=30 * 86_400,
        description="How long a dead request's body is kept to queue it again; 0: not at all.",
    )
    default_deadline_s: float = Field(
        limits.DEFAULT_DEADLINE_S,
        ge=1,
        le=limits.MAX_DEADLINE_S,
        description="Deadline of requests that come by plain XADD and so bring none.",
    )
    max_queued: int = Field(
        limits.MAX_QUEUED, ge=1, description="Plain XADD requests beyond this many are dropped."
    )

    max_running_per_tenant: int = Field(
        0,
        ge=0,
        description="Requests of one tenant that run at a time in the pool (in each partition), "
        "times its weight; 0: no cap. Less than there are places keeps some free for others.",
    )

    # ---- publishing ----
    flush_ms: int = Field(
        0, ge=0, le=10_000, description="Least time between two writes; more makes bigger events."
    )

    # ---- operation ----
    metrics_host: str = Field("127.0.0.1", description="Where /metrics and the probes listen.")
    metrics_port: int = Field(
        0, ge=0, le=65_535, description="Their port; 0 takes a free one and logs it."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Least severe messages to log."
    )
    log_format: Literal["plain", "json"] = Field("plain", description="Form of a log line.")

    # ---- the engine, under vLLM's names ----
    model: str = Field(DEFAULT_MODEL, description="Hugging Face folder or hub id.")
    served_model_name: str | None = Field(
        None, description="Name that requests and metrics use; the model's own if unset."
    )
    revision: str | None = Field(None, description="Branch, tag or commit of a hub model.")
    tokenizer: str | None = Field(None, description="Tokenizer folder, if not the model's.")
    dtype: DType = Field("auto", description="Type of the weights; auto: as they are stored.")
    device: Device = Field("auto", description="auto: a GPU if there is one.")
    max_model_len: int | None = Field(
        None, ge=1, description="Tokens of prompt and answer together; the model's own if unset."
    )
    max_num_seqs: int = Field(128, ge=1, le=4096, description="Requests computed at a time.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens computed in one step.")
    block_size: int = Field(32, ge=1, description="Tokens in one block of the KV cache.")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="Blocks of the KV cache, instead of measuring the memory."
    )
    gpu_memory_utilization: float = Field(
        0.92, gt=0, le=1, description="Share of the GPU's memory to use."
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Memory of the KV cache, instead of a share."
    )
    enable_prefix_caching: bool = Field(True, description="Share the cache of equal prefixes.")
    enable_chunked_prefill: bool = Field(True, description="Long prompts in several steps.")
    scheduling_policy: SchedulingPolicy = Field("fcfs", description="Order of admission.")
    itl_target_ms: float | None = Field(
        None, gt=0, description="Make prompt chunks so small that others get tokens this often."
    )
    async_scheduling: bool | None = Field(
        None, description="Launch a step before the last one's tokens are read; on a GPU if unset."
    )
    seed: int = Field(0, ge=0, le=limits.MAX_SEED, description="Seed of the engine itself.")
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Read it first."
    )
    enforce_eager: bool = Field(False, description="No CUDA graphs.")
    kernels: Kernels = Field(
        "auto", description="native: our own; torch: plain torch; auto: the best here."
    )
    num_threads: int | None = Field(None, ge=1, description="CPU threads; torch's choice if unset.")
    skip_self_test: bool = Field(False, description="Skip the numeric check of the loaded model.")

    @model_validator(mode="after")
    def _fit_together(self) -> Settings:
        if 3 * self.heartbeat_interval_ms >= self.lease_ms:
            raise ValueError("heartbeat_ms: three of them must be shorter than lease_ms")
        if self.socket_timeout_s * 1000 < 2 * BLOCK_MS:
            raise ValueError(f"socket_timeout_s: must be at least {2 * BLOCK_MS / 1000:g}")
        Keyspace(self.namespace, self.pool)
        self.engine_config()
        return self

    @property
    def heartbeat_interval_ms(self) -> int:
        return self.lease_ms // 4 if self.heartbeat_ms is None else self.heartbeat_ms

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that a request's `model` may have; the first is reported: no path of a machine."""
        if self.served_model_name is not None:
            return (self.served_model_name,)
        folder = Path(self.model).name
        if folder == self.model:
            return (folder,)
        is_path = self.model.startswith(("/", ".", "~"))
        return (folder, self.model) if is_path else (self.model, folder)

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            **{item.name: getattr(self, item.name) for item in fields(EngineConfig)}
        )


def config_path(flags: Mapping[str, Any]) -> Path | None:
    """The file of options that `flags` or the environment name."""
    path = flags.get("config") or os.environ.get(f"{ENV_PREFIX}CONFIG")
    return Path(path) if path else None


def load_settings(flags: Mapping[str, Any]) -> Settings:
    """The options from `flags` (those given, by option name), the environment and the file.

    Raises:
        SettingsError: one line that names the option and the way out.
    """
    path = config_path(flags)
    given = {name: value for name, value in flags.items() if name != "config"}
    from_file = read_config_file(path) if path else {}
    _refuse_unknown(from_file)
    redis_url = os.environ.get("REDIS_URL")
    has_file = "redis_url_file" in {*given, *from_file} or os.environ.get(URL_FILE_VARIABLE)
    fallback = {"redis_url": redis_url} if redis_url and not has_file else {}

    class Sourced(Settings):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (
                init_settings,
                env_settings,
                InitSettingsSource(settings_cls, from_file),
                InitSettingsSource(settings_cls, fallback),
            )

    try:
        return Sourced(**given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        option = f"{first['loc'][0]}: " if first["loc"] else ""
        raise SettingsError(option + first["msg"].removeprefix("Value error, ")) from None
    except (ConfigError, ConfigurationError) as error:
        raise SettingsError(str(error)) from None


def _refuse_unknown(from_file: Mapping[str, Any]) -> None:
    """Also a variable that is almost an option: others with our prefix may belong to others."""
    known = {*Settings.model_fields, "config"}
    elsewhere = {name.lower() for name in READ_ELSEWHERE}
    unknown = [name for name in from_file if name not in known]
    for variable in os.environ:
        name = variable.removeprefix(ENV_PREFIX).lower()
        if variable.startswith(ENV_PREFIX) and name not in known | elsewhere:
            if get_close_matches(name, known, cutoff=0.85):
                unknown.append(variable)
            else:
                logger.warning("the variable %s is no option of a worker", variable)
    if unknown:
        raise SettingsError(
            f"unknown option {', '.join(sorted(unknown))}; the options are: "
            + ", ".join(sorted(known))
        )

"""Read a transformers model: safetensors only; what cannot be read is refused in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from .config import EngineConfig
from .errors import ConfigError, ModelLoadError, UnsupportedModel
from .model_check import check_config, check_model

Progress = Callable[[str], None]

_auto_model: Any = AutoModelForCausalLM  # not annotated there

_PICKLE_SUFFIXES = {".bin", ".pt", ".pth", ".ckpt", ".pkl"}


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in evaluation mode on its device; `notes` tell what was decided on the way."""

    model: PreTrainedModel
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def hf_config(self) -> PreTrainedConfig:
        return self.model.config


def load_model(config: EngineConfig, on_progress: Progress | None = None) -> LoadedModel:
    """Read the model that `config.model` names: a folder, or an id on the Hugging Face hub.

    Raises `ModelLoadError` for a folder that is missing, incomplete or unsafe, `UnsupportedModel`
    for an architecture that cannot be served exactly, `ConfigError` for options that do not fit.
    """
    report = on_progress or (lambda _: None)
    source = _source(config.model)
    device = _device(config)
    dtype = _dtype(config, device)
    report(f"reading the configuration ({config.model})")
    hf_config = _load_config(config, source)
    check_config(hf_config)
    report(f"checking the architecture ({hf_config.model_type})")
    check_model(_model_without_weights(config, hf_config))
    report("reading the weights")
    model: Any = _load_weights(config, source, hf_config, dtype, device)
    notes = []
    if config.dtype == "auto" and device.type == "cpu" and _is_slow_on_cpu(model.dtype):
        name = str(model.dtype).removeprefix("torch.")
        notes.append(f"the weights are {name}, which this CPU computes slowly: float32 is used")
        model = model.float()
    model.eval().requires_grad_(False)
    return LoadedModel(model, tuple(notes))


def _source(name: str) -> str:
    """The folder, if `name` is one, else the hub id. Checks what a folder must hold."""
    path = Path(name).expanduser()
    if path.is_dir():
        _check_folder(path)
        return str(path)
    if path.exists():
        raise ModelLoadError(f"{name} is a file; give the folder of a Hugging Face model")
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelLoadError(f"there is no folder {name}; check the path")
    return name


def _check_folder(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    suffixes = {Path(name).suffix for name in names}
    if "config.json" not in names:
        raise ModelLoadError(f"{path} has no config.json; give the folder of a Hugging Face model")
    if ".safetensors" in suffixes:
        return
    if suffixes & _PICKLE_SUFFIXES:
        raise ModelLoadError(
            f"{path} has its weights as a pickle only, which can run code when it is read; "
            "convert them to safetensors"
        )
    raise ModelLoadError(f"{path} holds no weights; copy its *.safetensors files there")


def _device(config: EngineConfig) -> torch.device:
    if config.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", "is cuda, but torch finds no CUDA device; use cpu or auto")
    return torch.device(config.device)


def _dtype(config: EngineConfig, device: torch.device) -> torch.dtype | str:
    if config.dtype == "float16" and device.type == "cpu":
        raise ConfigError("dtype", "float16 is not offered on CPU; use bfloat16 or float32")
    return "auto" if config.dtype == "auto" else getattr(torch, config.dtype)


def _is_slow_on_cpu(dtype: torch.dtype) -> bool:
    """Whether matrix products in `dtype` miss oneDNN's kernels.

    Then they run at a tenth of float32's speed and lose its precision as well: 9 against 74 GFLOP/s
    on one AVX2 core, while AVX512-BF16 and AMX reach 400 in bfloat16.
    """
    if dtype == torch.bfloat16:
        supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
        return supported is None or not supported()
    return dtype == torch.float16


def _load_config(config: EngineConfig, source: str) -> PreTrainedConfig:
    with _foreign_errors(config, "its configuration cannot be read"):
        hf_config: PreTrainedConfig = AutoConfig.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    return hf_config


def _model_without_weights(config: EngineConfig, hf_config: PreTrainedConfig) -> PreTrainedModel:
    with _foreign_errors(config, "its architecture cannot be built"), torch.device("meta"):
        model: PreTrainedModel = _auto_model.from_config(
            hf_config, trust_remote_code=config.trust_remote_code, attn_implementation="eager"
        )
    return model


def _load_weights(
    config: EngineConfig,
    source: str,
    hf_config: PreTrainedConfig,
    dtype: torch.dtype | str,
    device: torch.device,
) -> PreTrainedModel:
    with _foreign_errors(config, "its weights cannot be read"), _no_progress_bars():
        model, loading = _auto_model.from_pretrained(
            source,
            config=hf_config,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            dtype=dtype,
            device_map=None if device.type == "cpu" else {"": device},
            use_safetensors=True,  # never unpickle
            attn_implementation="eager",  # some classes have nothing else; replaced later
            output_loading_info=True,
        )
    # transformers would draw what is missing at random and only warn.
    if missing := sorted(loading["missing_keys"]):
        raise ModelLoadError(
            f"{config.model} lacks {len(missing)} tensors of its architecture, among them "
            f"{missing[0]}; download it again"
        )
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _foreign_errors(config: EngineConfig, what: str) -> Iterator[None]:
    """Whatever transformers, the hub or a model's own code raises becomes one line of ours."""
    try:
        yield
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        if "trust_remote_code" in text:
            raise ModelLoadError(
                f"{config.model} runs code of its own; review that code, then set trust_remote_code"
            ) from error
        kind = UnsupportedModel if "Unrecognized configuration class" in text else ModelLoadError
        raise kind(f"{config.model}: {what}: {text.splitlines()[0]}") from error


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """Progress goes to `on_progress`; bars would spoil a worker's log."""
    bars: Any = transformers_logging
    enabled = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            bars.enable_progress_bar()

"""Which models can be served exactly, judged by class and configuration, before weights are read.

What this cannot see, the probe (masks, K/V sizes) and the self-test (numbers) find afterwards.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from .errors import UnsupportedModel

#: Layers whose only state is the K/V of their tokens. The names are those of `config.layer_types`.
_PAGED_LAYERS = {"full_attention", "attention", "sliding_attention", "chunked_attention"}


def check_config(config: PreTrainedConfig) -> None:
    """Raises `UnsupportedModel` for what the configuration alone rules out."""
    name = f"model type {config.model_type!r}"
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"{name} is an encoder-decoder model; only decoder-only models can be served"
        )
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = _field(quantization, "quant_method")
        raise UnsupportedModel(
            f"the weights are quantized ({method}), which this engine does not compute; "
            "use the folder of the unquantized model"
        )


def check_model(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` for what the model's class rules out; the meta device is enough."""
    check_config(model.config)
    model_class = type(model)
    name = f"{model_class.__name__} (model type {model.config.model_type!r})"
    if not model_class.can_generate():
        raise UnsupportedModel(f"{name} is not a text generation model")
    text_config = model.config.get_text_config(decoder=True)
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if other := layer_types - _PAGED_LAYERS:
        raise UnsupportedModel(
            f"{name} has layers without a paged KV cache: {', '.join(sorted(other))}"
        )
    # Where the layers are listed, the list decides: some hybrids have variants of attention only.
    if model._is_stateful and not layer_types:
        raise UnsupportedModel(
            f"{name} keeps a recurrent state, which a paged KV cache cannot hold"
        )
    if not model_class._can_set_attn_implementation():
        raise UnsupportedModel(f"{name} does not use the transformers attention interface")
    parameters = inspect.signature(model.forward).parameters
    for required in ("position_ids", "logits_to_keep"):
        if required not in parameters:
            raise UnsupportedModel(f"{name}: its forward() takes no {required}")


@dataclass(frozen=True, slots=True)
class ExactLimits:
    """Below these, no result depends on the other requests of a batch. None: no such limit."""

    sequence_tokens: int | None = None
    step_tokens: int | None = None
    reasons: tuple[str, ...] = ()

    @staticmethod
    def of(model: PreTrainedModel) -> ExactLimits:
        """The tightest limits over all modules, with the reasons."""
        found = list(dict.fromkeys(_module_limits(model)))
        sequences = [limit.sequence_tokens for limit in found if limit.sequence_tokens is not None]
        steps = [limit.step_tokens for limit in found if limit.step_tokens is not None]
        return ExactLimits(
            sequence_tokens=min(sequences, default=None),
            step_tokens=min(steps, default=None),
            reasons=tuple(reason for limit in found for reason in limit.reasons),
        )


def _module_limits(model: PreTrainedModel) -> Iterator[ExactLimits]:
    module: Any  # torch types the attributes of a module as tensors or modules
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False):
            # The scale comes from a row's number in the batch, not from its position; it is 1 for
            # all numbers below floor_scale.
            limit = int(module.floor_scale) - 1
            yield ExactLimits(
                limit, limit, (f"attention temperature tuning counts rows from {limit + 1} on",)
            )
        rope_type = getattr(module, "rope_type", None)
        rope_types = rope_type.values() if isinstance(rope_type, dict) else [rope_type]
        # The module's type, not the configuration's, which calls the fixed "ntk_alpha" dynamic.
        if any(kind is not None and "dynamic" in kind for kind in rope_types):
            limit = int(module.original_max_seq_len)
            yield ExactLimits(
                limit, None, (f"dynamic RoPE depends on the whole batch beyond {limit} tokens",)
            )


def max_positions(config: PreTrainedConfig) -> int | None:
    """Longest sequence that the model was made for, None if its configuration does not say."""
    limit = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def _field(settings: object, name: str) -> object:
    if isinstance(settings, dict):
        return settings.get(name, "unknown method")
    return getattr(settings, name, "unknown method")

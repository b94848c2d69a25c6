"""LongRoPE, exact in a batch: short or long rotary frequencies chosen per row.

transformers picks the frequencies of a forward from its longest position, so one long request would
change the others in a ragged batch. Here each row follows its own request: long once the request
holds more than `original_max_position_embeddings` tokens. As in transformers' `generate`, a request
that grows past this switch has to be computed again from its first token; the scheduler does that.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .attention import current_context
from .errors import UnsupportedModel

RopeForward = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def install_long_rope(model: PreTrainedModel) -> int | None:
    """Make LongRoPE modules choose per row when they run inside the engine.

    Returns the switch point in tokens, None if the model has no LongRoPE.
    Raises `UnsupportedModel` where its modules differ in the switch point or mix RoPE types.
    """
    switches = set()
    module: Any  # torch types the attributes of a module as tensors or modules
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, dict) and "longrope" in rope_type.values():
            raise UnsupportedModel(f"{type(model).__name__} uses LongRoPE in some layers only")
        if rope_type == "longrope":
            switches.add(int(module.config.rope_parameters["original_max_position_embeddings"]))
            module.forward = _per_row_forward(module, max(switches))
    if len(switches) > 1:
        raise UnsupportedModel(f"{type(model).__name__} has several LongRoPE switch points")
    return switches.pop() if switches else None


def _per_row_forward(module: Any, switch_tokens: int) -> RopeForward:
    by_transformers: RopeForward = module.forward
    rotate: RopeForward = inspect.unwrap(type(module).forward)  # without the choice of frequencies
    device = module.inv_freq.device
    short = module.original_inv_freq.to(device)
    long, _ = ROPE_INIT_FUNCTIONS["longrope"](module.config, device, seq_len=switch_tokens + 1)

    def with_frequencies(
        frequencies: torch.Tensor, x: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Put back afterwards: transformers' own choice overwrites the buffer in place.
        buffer, module.inv_freq = module.inv_freq, frequencies
        try:
            return rotate(module, x, position_ids)
        finally:
            module.inv_freq = buffer

    def forward(
        x: torch.Tensor, position_ids: torch.Tensor, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        context = current_context()
        if context is None:
            return by_transformers(x, position_ids, **kwargs)
        short_cos, short_sin = with_frequencies(short, x, position_ids)
        if context.long_rows is None:
            return short_cos, short_sin
        long_cos, long_sin = with_frequencies(long, x, position_ids)
        return (
            torch.where(context.long_rows, long_cos, short_cos),
            torch.where(context.long_rows, long_sin, short_sin),
        )

    return forward

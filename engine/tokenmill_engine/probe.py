"""Find out, in one forward of four tokens, what every attention call of a model needs.

Where a model keeps its window, and whether it passes it on, differs between architectures. So
nothing is read from the configuration: under the implementation `PROBE` transformers builds its
mask through `_probe_mask`, which keeps the mask *function* it was given, and each attention call
identifies its mask by the storage it receives. The function is then compared with the rules that
the paged attention can apply; what matches none of them is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np
import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .attention import AttentionRule, AttentionSpec, CallCounter, CallKey
from .errors import UnsupportedModel

PROBE = "tokenmill_probe"

NUM_PROBE_TOKENS = 4

_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux"}
#: Passed along by many models and without a bearing on attention in a plain forward.
_HARMLESS = {
    "cache_position", "dropout", "is_causal", "layer_idx", "logits_to_keep", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_ids", "return_dict", "use_cache",
}  # fmt: skip

#: transformers' mask functions: (batch, head, query position, key position) to "may attend"
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class ProbeResult:
    specs: dict[CallKey, AttentionSpec]
    vocab_size: int  # width of the logits, which may exceed the tokenizer's vocabulary


@dataclass(slots=True)
class _Mask:
    tensor: torch.Tensor  # kept alive, so that its address stays its own
    function: MaskFunction
    size: int | None  # of the window or chunk


@dataclass(slots=True)
class _Record:
    masks: dict[int, _Mask] = field(default_factory=dict)  # by address of the storage
    specs: dict[CallKey, AttentionSpec] = field(default_factory=dict)
    calls: CallCounter = field(default_factory=CallCounter)


_record: ContextVar[_Record] = ContextVar("tokenmill_probe")


@torch.inference_mode()
def probe(model: PreTrainedModel) -> ProbeResult:
    """Learn the rule and the K/V sizes of every attention call.

    Raises `UnsupportedModel` with the reason when the paged attention could not give the same
    result as the model's own. Leaves the model under the probe's attention implementation.
    """
    name = type(model).__name__
    switch_attention(model, PROBE)
    token_ids = torch.arange(NUM_PROBE_TOKENS, device=model.device)[None]
    with _recording() as record:
        try:
            output = model(
                input_ids=token_ids,
                position_ids=token_ids.clone(),
                attention_mask=None,
                use_cache=False,
                logits_to_keep=1,
            )
        except UnsupportedModel:
            raise
        except Exception as error:  # whatever a model's own code may raise
            raise UnsupportedModel(
                f"{name} cannot run without a cache object of its own: "
                f"{type(error).__name__}: {error}"
            ) from error
    if not record.specs:
        raise UnsupportedModel(f"{name}: no layer calls the transformers attention interface")
    return ProbeResult(specs=record.specs, vocab_size=output.logits.shape[-1])


def switch_attention(model: PreTrainedModel, implementation: str) -> None:
    """Set the attention implementation or raise `UnsupportedModel`; transformers only warns."""
    model.set_attn_implementation(implementation)
    text_config = model.config.get_text_config(decoder=True)
    if text_config._attn_implementation != implementation:
        raise UnsupportedModel(
            f"{type(model).__name__} does not let its attention implementation be changed"
        )


@contextmanager
def _recording() -> Iterator[_Record]:
    record = _Record()
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskFunction,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **_: object,
) -> torch.Tensor:
    mask = torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool, device=device).tril()
    address = mask.untyped_storage().data_ptr()
    _record.get().masks[address] = _Mask(mask, mask_function, local_size)
    return mask


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Record the call; the output only has to have the right shape."""
    record = _record.get()
    rule = _mask_rule(module, attention_mask, kwargs, record, query.device)
    record.specs[record.calls.next_key(module)] = AttentionSpec(
        window=rule.window,
        chunk=rule.chunk,
        num_kv_heads=key.shape[1],
        key_dim=key.shape[3],
        value_dim=value.shape[3],
        dtype=key.dtype,
    )
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _mask_rule(
    module: torch.nn.Module,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, object],
    record: _Record,
    device: torch.device,
) -> AttentionRule:
    name = type(module).__name__
    given = {keyword for keyword, argument in kwargs.items() if argument is not None}
    if unknown := given - _UNDERSTOOD - _HARMLESS:
        raise UnsupportedModel(
            f"{name} passes attention arguments of unknown meaning: {', '.join(sorted(unknown))}"
        )
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{name} is not causal: its tokens see later tokens")
    if attention_mask is None:
        raise UnsupportedModel(f"{name} gets no mask from the transformers mask interface")
    mask = record.masks.get(attention_mask.untyped_storage().data_ptr())
    if mask is None:
        raise UnsupportedModel(f"{name} builds an attention mask of its own")
    rule = _matching_rule(mask, device)
    if rule is None:
        raise UnsupportedModel(
            f"{name} has an attention pattern other than causal, sliding window or chunked"
        )
    if kwargs.get("sliding_window") not in (None, rule.window):
        raise UnsupportedModel(
            f"{name} passes a window of {kwargs['sliding_window']} tokens, "
            f"but its mask has {rule.window or 'none'}"
        )
    return rule


def _matching_rule(mask: _Mask, device: torch.device) -> AttentionRule | None:
    """The rule that agrees with the mask function on boundary and random pairs of positions."""
    size = mask.size or 64
    around = (0, size, 2 * size, 3 * size + 1, 7 * size)
    borders = {max(point + distance, 0) for point in around for distance in range(-2, 3)}
    others = np.random.default_rng(0).integers(0, 8 * size, 64).tolist()
    positions = np.array(sorted(borders | set(others)))
    points = torch.from_numpy(positions).to(device)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    truth = mask.function(zero, zero, points.view(1, 1, -1, 1), points.view(1, 1, 1, -1))
    allowed = truth.expand(1, 1, len(points), len(points))[0, 0].cpu().numpy()
    candidates = [AttentionRule(1.0)]
    if mask.size is not None:
        candidates[:0] = [AttentionRule(1.0, window=size), AttentionRule(1.0, chunk=size)]
    for rule in candidates:
        queries, keys = positions[:, None], positions[None, :]
        if np.array_equal(allowed, (keys <= queries) & (keys >= rule.first_visible(queries))):
            return rule
    return None


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, _probe_mask)

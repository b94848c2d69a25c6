"""Replacing the forwards of a model's modules by fused ones, each checked on random tokens first.

Nothing is known of architectures here: a fused one stays only where it gives what was recorded of
the module that it replaces (`fusion_check.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from .attention import AttentionSpec, CallKey
from .fused_modules import AttentionCall, Fused, FusedAttention, FusedLayer, FusedMLP, FusedNorm
from .fused_operations import Norm, Operations, PreparingBackend
from .fused_stack import InTurn, StackRest, StackStart, chains, whole_record
from .fusion_check import Record, RecordedStep

logger = logging.getLogger(__name__)


@torch.inference_mode()
def fuse_modules(
    model: PreTrainedModel,
    backend: PreparingBackend,
    specs: Mapping[CallKey, AttentionSpec],
    operations: Operations,
    *,
    max_model_len: int,
) -> dict[str, int]:
    """Fuses what can be fused, in place; returns how many of each kind, which is also logged.

    Fused modules compute the same at positions below `max_model_len`, in tokens.
    """
    step = RecordedStep(model, backend, specs, operations, max_model_len)
    records = step.record(_candidates(model, operations))
    counts = {"norms": 0, "MLPs": 0, "attentions": 0, "layers": 0, "stacks": 0}
    for module, record in records.items():
        for norm in FusedNorm.variants(module, operations):
            if step.agrees(norm, record):
                _install(module, norm)
                counts["norms"] += 1
                break
    for module, record in records.items():
        mlp = FusedMLP.of(module, operations)
        if mlp is not None and record.may_be_fused and step.agrees(mlp, record):
            _install(module, mlp, mlp.parts)
            counts["MLPs"] += 1
        counts["attentions"] += _fuse_attention(module, record, step)
    for module, record in records.items():
        layer = FusedLayer.of(module, operations)
        if layer is not None and record.may_be_fused and step.agrees(layer, record):
            _install(module, layer)
            counts["layers"] += 1
    for chain in chains(records):
        counts["stacks"] += _fuse_stack(chain, records, step)
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


def _fuse_attention(module: nn.Module, record: Record, step: RecordedStep) -> int:
    if not FusedAttention.fits(module) or len(record.calls) != 1 or not record.may_be_fused:
        return 0
    call = record.calls[0]
    spec = step.specs[call.key]
    query_norm, key_norm = (_head_norm(module, name, spec) for name in ("q_norm", "k_norm"))
    for rotates in (True, False):
        fused = FusedAttention(
            module,
            AttentionCall(call.key, spec, call.rule),
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


def _fuse_stack(
    chain: Sequence[nn.Module], records: Mapping[nn.Module, Record], step: RecordedStep
) -> int:
    layers: list[FusedLayer] = [module.__dict__["forward"] for module in chain]
    stack = step.operations.stack(layers) if len(layers) > 1 else None
    if stack is None:
        return 0
    start, record = StackStart(layers, stack), whole_record([records[module] for module in chain])
    # Its layers were right one by one, and their errors add up.
    given, expected = (step.output_of(each, record) for each in (start, InTurn(layers)))
    if not torch.equal(given, expected) or not step.agrees(start, record, share=len(layers) ** 0.5):
        return 0
    _install(chain[0], start)
    for module, layer in zip(chain[1:], layers[1:], strict=True):
        _install(module, StackRest(start, layer, is_last=module is chain[-1]))
    return 1


def _install(module: nn.Module, fused: Fused, parts: Mapping[str, nn.Module] = {}) -> None:
    for name, part in parts.items():
        setattr(module, name, part)
    # On the instance: the class, its attributes and hooks stay what architectures expect.
    module.__dict__["forward"] = fused

"""Which operations of a model's forward a CUDA graph cannot hold, found by watching one forward.

A graph repeats the same launches. What asks the device for a number, makes a tensor whose shape
depends on numbers, or sends numbers from the host, fails to be captured; models that do so at some
place run without graphs. The watched forward may run on a CPU, where all of this works.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from .attention import (
    AttentionMetadata,
    AttentionRule,
    AttentionSpec,
    CallKey,
    ForwardContext,
    LayerCache,
    forward_context,
)
from .fused_operations import HeadPreparation

#: Beside what torch itself marks: composite operations that end in one of those it marks, and
#: tensors made from Python numbers, which are born on the host.
_OPERATIONS = frozenset({"aten::is_nonzero", "aten::item", "aten::lift_fresh", "aten::allclose"})
_TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_MASKS = (torch.bool, torch.uint8)
_POSITIONS = (0, 1, 2, 3, 0, 1, 7, 5)


@dataclass(frozen=True, slots=True)
class Hazard:
    """An operation that keeps a forward out of a graph."""

    operation: str
    place: str  # file and line of the model's code

    def __str__(self) -> str:
        return f"{self.operation} at {self.place}"


@torch.inference_mode()
def capture_hazards(
    model: PreTrainedModel, specs: Mapping[CallKey, AttentionSpec], *, has_long_rope: bool = False
) -> tuple[Hazard, ...]:
    """What in a forward of `model` cannot be captured, each place once; empty if it can be.

    Attention, which is ours, is left out. The model must run under the engine's attention already.
    """
    device = model.device
    rows = len(_POSITIONS)
    nothing = LayerCache(torch.empty(0, device=device), torch.empty(0, device=device))
    context = ForwardContext(
        backend=_Echo(),
        specs=specs,
        layers=dict.fromkeys(specs, nothing),
        metadata=_empty_metadata(device),
        long_rows=torch.arange(rows, device=device)[None, :, None] > 4 if has_long_rope else None,
    )
    input_ids = torch.arange(rows, device=device)[None]
    position_ids = torch.tensor([_POSITIONS], device=device)
    logits_rows = torch.arange(0, rows, 3, device=device)
    watch = _Watch()
    with forward_context(context), watch:
        model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=None,
            use_cache=False,
            logits_to_keep=logits_rows,
        )
    return tuple(dict.fromkeys(watch.hazards))


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets everything through and notes what a graph could not hold."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.hazards: list[Hazard] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if _is_hazard(func, args, (args, kwargs, result)):
            self.hazards.append(Hazard(func._schema.name, _place()))
        return result


def _is_hazard(func: Any, args: tuple[Any, ...], everything: object) -> bool:
    name = func._schema.name
    if name == "aten::index":  # marked for what a mask would do
        if any(index is not None and index.dtype in _MASKS for index in args[1]):
            return True
    elif name in _OPERATIONS or not _TAGS.isdisjoint(func.tags):
        # With a number instead of a tensor of repeats the shape is known.
        return not (name == "aten::repeat_interleave" and "self_int" in func._overloadname)
    # A number of no dimension may stay on the host: it becomes an argument of the launch.
    devices = {
        leaf.device.type
        for leaf in tree_leaves(everything)
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0
    }
    return len(devices) > 1


def _place() -> str:
    """The innermost line outside torch and outside this module."""
    for path, line in _frames():
        parts = path.parts
        if "torch" not in parts and path.name != "capture_lint.py":
            package = parts.index("transformers") if "transformers" in parts else len(parts) - 1
            return f"{'/'.join(parts[package:])}:{line}"
    return "unknown"


def _frames() -> Iterator[tuple[PurePath, int]]:
    frame = sys._getframe(1)
    while frame is not None:
        yield PurePath(frame.f_code.co_filename), frame.f_lineno
        if frame.f_back is None:
            return
        frame = frame.f_back


class _Echo:
    """A `PreparingBackend` that launches next to nothing: queries or values out of shape."""

    prepares_heads = True  # so that fused modules are watched as they will run

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return (0,), (0,)

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
        *,
        heads: HeadPreparation | None = None,
    ) -> torch.Tensor:
        return query.new_zeros(len(query), query.shape[1], value.shape[-1])


def _empty_metadata(device: torch.device) -> AttentionMetadata:
    nowhere = torch.empty(0, dtype=torch.int64, device=device)
    none = np.zeros(0, np.int64)
    return AttentionMetadata(
        block_size=1,
        cu_rows=np.zeros(1, np.int64),
        kv_lens=none,
        block_ids=none,
        cu_blocks=np.zeros(1, np.int64),
        slot_blocks=nowhere,
        slot_offsets=nowhere,
    )


def describe(hazards: Sequence[Hazard]) -> str:
    """For a log line: the first few."""
    shown = ", ".join(map(str, hazards[:3]))
    return shown if len(hazards) <= 3 else f"{shown} and {len(hazards) - 3} more"

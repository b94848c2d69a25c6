"""The seam between transformers' models and the paged KV cache.

A model served by Tokenmill runs under the attention implementation named `IMPLEMENTATION`. Each
of its attention calls lands in `_attend_for_transformers`, which finds the K/V cache and the mask
rule of the call in the `ForwardContext` of the running step and hands the work to an
`AttentionBackend`.

No mask function is registered under this name, on purpose: for a name it does not know,
transformers skips mask building altogether, so a `[T, T]` mask is never made. The context travels
beside the model and not through its keyword arguments, which some architectures drop or refuse.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface

#: Must not begin with "paged|" nor contain "/": transformers gives both a meaning of their own.
IMPLEMENTATION = "tokenmill"

#: (layer index, n-th attention call of that layer in one forward). Some architectures attend twice
#: in a layer, others run their layers in a loop; each call needs a cache of its own.
CallKey = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What one attention call needs, found by the probe: its mask rule and the size of its K/V."""

    window: int | None  # a query sees this many keys, itself included
    chunk: int | None  # a query sees the keys of its own chunk of absolute positions only
    num_kv_heads: int
    key_dim: int
    value_dim: int  # may differ from key_dim (multi-head latent attention)
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionRule:
    """How the scores of one attention call become weights.

    `softmax(softcap(scaling · q·k))` over the keys at positions `first_visible(q) … q`; `sinks` are
    further logits of the softmax that have no value.
    """

    scaling: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None  # applied before the mask
    sinks: torch.Tensor | None = field(default=None, compare=False)  # [H]

    def first_visible(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Position of the first key that a query at each of `positions` may see."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.chunk is not None:
            first = np.maximum(first, positions // self.chunk * self.chunk)
        return first


@dataclass(frozen=True, slots=True)
class LayerCache:
    """K and V of one attention call; the backend that reads them decides the layout."""

    key: torch.Tensor
    value: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class AttentionMetadata:
    """Where the rows of one step belong. Rows of a sequence are adjacent and in position order.

    The arrays on the host serve to plan the work, the tensors on the device to do it. `block_ids`
    holds the block tables back to back, as far as this step needs them: those of sequence `i` are
    `block_ids[cu_blocks[i]:cu_blocks[i + 1]]`.
    """

    block_size: int
    cu_rows: NDArray[np.int64]  # [S + 1] the rows of sequence i are cu_rows[i]:cu_rows[i + 1]
    kv_lens: NDArray[np.int64]  # [S] tokens in the cache after this step
    block_ids: NDArray[np.int64]
    cu_blocks: NDArray[np.int64]  # [S + 1]
    slot_blocks: torch.Tensor  # [T] int64: the block that takes each row's K/V
    slot_offsets: torch.Tensor  # [T] int64: and the place in it


class AttentionBackend(Protocol):
    """Stores K/V in the paged cache and attends over it; one instance belongs to one runner."""

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of K and V, block first; a block takes `block_size * spec.bytes_per_token`."""

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
    ) -> torch.Tensor:
        """`[T, H, D]`, `[T, Hkv, D]`, `[T, Hkv, Dv]` (any strides) to `[T, H, Dv]`."""


@dataclass(slots=True)
class ForwardContext:
    """Of one forward: which cache and which rule belong to each attention call."""

    backend: AttentionBackend
    specs: Mapping[CallKey, AttentionSpec]
    layers: Mapping[CallKey, LayerCache]
    metadata: AttentionMetadata
    long_rows: torch.Tensor | None = None  # [1, T, 1] bool: rows under LongRoPE's long frequencies
    calls: CallCounter = field(default_factory=lambda: CallCounter())


class CallCounter:
    """Names the attention calls of one forward."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def next_key(self, module: torch.nn.Module) -> CallKey:
        layer_idx = getattr(module, "layer_idx", None)
        layer = layer_idx if isinstance(layer_idx, int) else id(module)
        n = self._counts.get(layer, 0)
        self._counts[layer] = n + 1
        return layer, n


_context: ContextVar[ForwardContext | None] = ContextVar("tokenmill_forward", default=None)


def current_context() -> ForwardContext | None:
    """The context of the forward that this thread is running, None outside the engine."""
    return _context.get()


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the current one, for this thread only: engines in one process do not meet."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def _attend_for_transformers(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """q `[1, H, T, D]`, k `[1, Hkv, T, D]`, v `[1, Hkv, T, Dv]` to `[1, T, H, Dv]`.

    The remaining keywords were judged by the probe. `sliding_window` among them is not read: some
    models put their window into the mask only, so windows come from the probe as well.
    """
    context = _context.get()
    if context is None:
        raise RuntimeError("this model belongs to a Tokenmill engine; call it through the engine")
    if attention_mask is not None:
        raise RuntimeError("an attention mask was built for a paged forward")
    call = context.calls.next_key(module)
    spec = context.specs[call]
    rule = AttentionRule(
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=spec.window,
        chunk=spec.chunk,
        softcap=softcap,
        sinks=s_aux,
    )
    output = context.backend.write_and_attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        context.layers[call],
        context.metadata,
        rule,
    )
    return output.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, _attend_for_transformers)

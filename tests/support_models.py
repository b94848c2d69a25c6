"""Builders for tests of the tensor half: tiny models, steps made by hand, caches full of NaN."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from tokenmill_engine.attention import AttentionBackend, AttentionSpec, LayerCache
from tokenmill_engine.outputs import ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams


def make_step(
    parts: Iterable[tuple[Sequence[int], int, int, Sequence[int]]],
) -> SchedulerOutput:
    """A step of requests given as (token ids, start, end, block table)."""
    scheduled = []
    for number, (token_ids, start, end, block_ids) in enumerate(parts):
        request = Request(f"r{number}", token_ids, SamplingParams())
        request.block_ids = list(block_ids)
        scheduled.append(ScheduledRequest(request, start, end - start))
    return SchedulerOutput(tuple(scheduled), sum(item.num_tokens for item in scheduled))


def nan_filled_cache(
    backend: AttentionBackend, spec: AttentionSpec, num_blocks: int, block_size: int
) -> LayerCache:
    """Of one attention call. Whoever reads a slot that was never written gets NaN."""
    key_shape, value_shape = backend.cache_shapes(spec, num_blocks, block_size)
    return LayerCache(
        torch.full(key_shape, float("nan"), dtype=spec.dtype),
        torch.full(value_shape, float("nan"), dtype=spec.dtype),
    )

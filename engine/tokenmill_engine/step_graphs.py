"""Steps as CUDA graphs: one launch instead of thousands, one copy to the device for all inputs.

A step is padded to its bucket and its inputs are written to where the bucket's graph reads them.
The first step of a bucket runs without a graph, which compiles kernels; the second is recorded, so
a size that occurs once costs no capture. Whatever does not fit runs as before.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from .attention import AttentionMetadata, AttentionSpec, CallKey, ForwardContext, forward_context
from .cuda_graphs import Computation, GraphDriver
from .graph_buckets import Bucket, Buckets, StepLimits
from .graph_plans import NotedPlans, StaticPlans, pad_metadata
from .kv_cache import KVCache
from .last_samples import LastSamples
from .model_runner import ComputedStep
from .outputs import SchedulerOutput
from .packed_settings import NUM_SETTINGS, pack_settings
from .static_arrays import HostArrays, Layout, StaticArrays
from .step_inputs import NO_SOURCE, StepInputs, build_step_inputs
from .triton_attention import TritonPagedAttention

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class GraphedModel:
    """What a captured step computes with.

    The cache has one block more than `num_blocks`: padding rows are stored there.
    """

    model: PreTrainedModel
    specs: Mapping[CallKey, AttentionSpec]
    kv_cache: KVCache
    backend: TritonPagedAttention
    last_samples: LastSamples
    vocab_size: int
    rope_switch_tokens: int | None = None


class StepGraphs:
    """Runs steps through graphs, which it records as their sizes come up.

    The first step after it is built goes without: it shows which work lists the attention needs.
    """

    def __init__(self, graphed: GraphedModel, limits: StepLimits, driver: GraphDriver) -> None:
        self._graphed = graphed
        self._buckets = Buckets(limits)
        self._driver = driver
        self._steps: dict[Bucket, _BucketStep] = {}
        self._logits = torch.empty(
            limits.max_seqs, graphed.vocab_size, dtype=torch.float32, device=graphed.model.device
        )
        graphed.last_samples.reserve(limits.max_seqs)
        self._notes = NotedPlans(graphed.backend.plans)
        graphed.backend.plans = self._notes
        self._is_on = True

    @property
    def num_graphs(self) -> int:
        return sum(step.is_captured for step in self._steps.values())

    @torch.inference_mode()
    def run(self, output: SchedulerOutput) -> ComputedStep | None:
        """Compute a step; None if it must be computed without a graph, and nothing was done."""
        num_rows = sum(item.num_tokens for item in output.scheduled)
        bucket = self._buckets.choose(num_rows, len(output.scheduled))
        if bucket is None or not (self._is_on and self._notes.keys):
            return None
        if bucket not in self._steps:
            plans = StaticPlans(bucket, self._buckets, self._notes.keys)
            self._steps[bucket] = _BucketStep(
                self._graphed, bucket, plans, self._logits[: self._buckets.num_sampling(bucket)]
            )
        step = self._steps[bucket]
        if not step.fill(output):
            return None
        try:
            step.prepare(self._driver)
        except RuntimeError as why:
            # Also for want of memory: a forward without a graph needs less.
            logger.warning("no CUDA graphs from here on: a step could not be recorded: %s", why)
            self._is_on = False
            self._steps.clear()
            return None
        step.run()
        num_sampling = len(output.sampling)
        return ComputedStep(self._logits[:num_sampling], step.settings[:, :num_sampling])


class _BucketStep:
    """The inputs of one bucket and, from its second step on, the graph that reads them."""

    def __init__(
        self, graphed: GraphedModel, bucket: Bucket, plans: StaticPlans, logits: torch.Tensor
    ) -> None:
        self._graphed = graphed
        self._bucket = bucket
        self._plans = plans
        self._logits = logits  # [sampling, vocab], shared by all buckets
        layouts = _input_layouts(bucket.num_rows, len(logits)) | plans.layouts()
        self._arrays = StaticArrays(layouts, graphed.model.device)
        plans.attach(self._arrays.tensors)
        self._replay: Computation | None = None
        self._is_warm = False

    @property
    def is_captured(self) -> bool:
        return self._replay is not None

    @property
    def settings(self) -> torch.Tensor:
        return self._arrays.tensors["settings"]

    def fill(self, output: SchedulerOutput) -> bool:
        """Write the inputs of a step on the host; False if there is no room for its plan."""
        graphed, host = self._graphed, self._arrays.host()
        inputs = build_step_inputs(
            output,
            block_size=graphed.kv_cache.block_size,
            device=_CPU,
            rope_switch_tokens=graphed.rope_switch_tokens,
        )
        if not self._plans.fill(pad_metadata(inputs.metadata, self._bucket), host):
            return False
        _fill_inputs(host, inputs, spare_block=graphed.kv_cache.num_blocks)
        settings = pack_settings([item.request for item in output.sampling])
        host["settings"][:, : settings.shape[1]] = settings
        return True

    def prepare(self, driver: GraphDriver) -> None:
        """Record the graph if this is the time to. Raises RuntimeError if that fails."""
        if self._is_warm and self._replay is None:
            self._replay = driver.capture(self._compute)

    def run(self) -> None:
        """Compute what `fill` wrote."""
        self._arrays.send()
        (self._replay or self._compute)()
        self._is_warm = True

    def _compute(self) -> None:
        graphed, tensors = self._graphed, self._arrays.tensors
        input_ids = graphed.last_samples.fill_in(tensors["input_ids"], tensors["sources"])
        has_switch = graphed.rope_switch_tokens is not None
        context = ForwardContext(
            backend=graphed.backend,
            specs=graphed.specs,
            layers=graphed.kv_cache.layers,
            metadata=_metadata_on_device(tensors, graphed.kv_cache.block_size),
            long_rows=tensors["long_rows"][None, :, None] if has_switch else None,
        )
        before, graphed.backend.plans = graphed.backend.plans, self._plans
        try:
            with forward_context(context):
                result = graphed.model(
                    input_ids=input_ids[None],
                    position_ids=tensors["position_ids"][None],
                    attention_mask=None,
                    use_cache=False,
                    logits_to_keep=tensors["logits_rows"],
                )
        finally:
            graphed.backend.plans = before
        self._logits.copy_(result.logits[0])


def _input_layouts(num_rows: int, num_sampling: int) -> dict[str, Layout]:
    rows = ("input_ids", "sources", "position_ids", "slot_blocks", "slot_offsets")
    return {
        **{name: Layout((num_rows,), np.int64) for name in rows},
        "logits_rows": Layout((num_sampling,), np.int64),
        "settings": Layout((NUM_SETTINGS, num_sampling), np.int64),
        "long_rows": Layout((num_rows,), np.bool_),
    }


def _fill_inputs(host: HostArrays, inputs: StepInputs, *, spare_block: int) -> None:
    """All but the plan. Rows that pad the batch are token 0 at position 0, stored in the spare."""
    arrays = {
        "input_ids": inputs.input_ids[0],
        "position_ids": inputs.position_ids[0],
        "slot_blocks": inputs.metadata.slot_blocks,
        "slot_offsets": inputs.metadata.slot_offsets,
        "logits_rows": inputs.logits_rows,
    }
    if inputs.sources is not None:
        arrays["sources"] = inputs.sources
    if inputs.long_rows is not None:
        arrays["long_rows"] = inputs.long_rows[0, :, 0]
    host["long_rows"].fill(False)
    host["sources"].fill(NO_SOURCE)
    padding = {"slot_blocks": spare_block, "sources": NO_SOURCE}
    for name, values in arrays.items():
        host[name][: len(values)] = values.numpy()
        host[name][len(values) :] = padding.get(name, 0)


def _metadata_on_device(tensors: Mapping[str, torch.Tensor], block_size: int) -> AttentionMetadata:
    """Without what the host knows of the step: a graph would keep it for all steps to come."""
    nothing = np.zeros(0, np.int64)
    return AttentionMetadata(
        block_size=block_size,
        cu_rows=nothing,
        kv_lens=nothing,
        block_ids=nothing,
        cu_blocks=nothing,
        slot_blocks=tensors["slot_blocks"],
        slot_offsets=tensors["slot_offsets"],
    )

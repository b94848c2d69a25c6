"""Whether a model's steps run as CUDA graphs, and where their tokens are chosen."""

from __future__ import annotations

import logging

from .capture_lint import capture_hazards, describe
from .cuda_graphs import CudaGraphs
from .device_sampling import choose_on_device, warm_up
from .graph_buckets import StepLimits
from .model_runner import ModelRunner
from .sampler import TokenChooser, choose_by_torch
from .step_graphs import GraphedModel, StepGraphs
from .triton_attention import TritonPagedAttention

logger = logging.getLogger(__name__)

#: Blocks behind those of requests; one takes what padding rows store.
NUM_SPARE_BLOCKS = 1


def choose_graphs(
    runner: ModelRunner, limits: StepLimits, *, vocab_size: int, enforce_eager: bool
) -> StepGraphs | None:
    """Graphs for the steps of a model on a GPU, None where they cannot be had; logs the choice."""
    backend = runner.backend
    if runner.device.type != "cuda":
        return None
    if enforce_eager:
        logger.info("CUDA graphs: off, as asked for")
        return None
    if not isinstance(backend, TritonPagedAttention):
        logger.info("CUDA graphs: off, for only our own attention can be recorded")
        return None
    has_long_rope = runner.rope_switch_tokens is not None
    hazards = capture_hazards(runner.model, runner.specs, has_long_rope=has_long_rope)
    if hazards:
        logger.info("CUDA graphs: off, for the model cannot be recorded: %s", describe(hazards))
        return None
    logger.info("CUDA graphs: on, recorded as step sizes come up")
    graphed = GraphedModel(
        model=runner.model,
        specs=runner.specs,
        kv_cache=runner.kv_cache,
        backend=backend,
        vocab_size=vocab_size,
        rope_switch_tokens=runner.rope_switch_tokens,
    )
    return StepGraphs(graphed, limits, CudaGraphs())


def choose_sampling(runner: ModelRunner, vocab_size: int) -> TokenChooser:
    """Our kernel where the attention is Triton's too, which has proved that it runs there."""
    if not isinstance(runner.backend, TritonPagedAttention):
        return choose_by_torch
    warm_up(runner.device, vocab_size)
    return choose_on_device

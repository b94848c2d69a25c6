"""Whether a model's steps run as CUDA graphs."""

from __future__ import annotations

import logging

from .capture_lint import capture_hazards, describe
from .cuda_graphs import CudaGraphs
from .graph_buckets import StepLimits
from .model_runner import ModelRunner
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
        last_samples=runner.last_samples,
        vocab_size=vocab_size,
        rope_switch_tokens=runner.rope_switch_tokens,
    )
    return StepGraphs(graphed, limits, CudaGraphs())

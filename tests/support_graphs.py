"""What stands for a GPU in tests of the graphs: a driver that calls again what it was shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from support_models import BLOCK_SIZE, MAX_ROWS, NUM_BLOCKS
from tokenmill_engine.cuda_graphs import Computation
from tokenmill_engine.graph_buckets import StepLimits
from tokenmill_engine.kv_cache import allocate_kv_cache
from tokenmill_engine.long_rope import install_long_rope
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.outputs import SchedulerOutput
from tokenmill_engine.probe import probe
from tokenmill_engine.step_graphs import GraphedModel, StepGraphs
from tokenmill_engine.triton_attention import TritonPagedAttention

MAX_SEQS = 6


class CallAgain:
    """A "graph" is the computation itself: it may find its inputs in static memory only.

    Like a capture, `capture` computes nothing.
    """

    def __init__(self) -> None:
        self.captured: list[Computation] = []
        self.num_replays = 0

    def capture(self, compute: Computation) -> Computation:
        self.captured.append(compute)

        def replay() -> None:
            self.num_replays += 1
            compute()

        return replay


class Refuses:
    """A driver that fails as torch does when something cannot be captured."""

    def capture(self, compute: Computation) -> Computation:
        raise RuntimeError("operation not permitted when stream is capturing")


def graph_runner(
    model: PreTrainedModel, driver: CallAgain | Refuses, *, split_tokens: int = 8
) -> ModelRunner:
    """A runner whose attention is Triton's, in the interpreter, over a cache full of NaN."""
    specs = probe(model).specs
    backend = TritonPagedAttention(specs.values(), model.device, split_tokens=split_tokens)
    kv_cache = allocate_kv_cache(
        specs,
        backend,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        device=model.device,
        num_spare_blocks=1,
    )
    kv_cache.fill(float("nan"))
    switch = install_long_rope(model)
    runner = ModelRunner(model, specs, kv_cache, backend, rope_switch_tokens=switch)
    limits = StepLimits(
        max_rows=MAX_ROWS,
        max_seqs=MAX_SEQS,
        max_model_len=64,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
    )
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    graphed = GraphedModel(model, specs, kv_cache, backend, runner.last_samples, vocab_size, switch)
    runner.graphs = StepGraphs(graphed, limits, driver)
    return runner


class GraphsFirst:
    """As `run_batched` wants a runner: graphs where they can, a copy of the logits to keep."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_graphed = 0
        self.num_steps = 0

    def compute_logits(self, output: SchedulerOutput) -> torch.Tensor:
        assert self.runner.graphs is not None
        self.num_steps += 1
        graphed = self.runner.graphs.run(output)
        if graphed is None:
            return self.runner.compute_logits(output)
        self.num_graphed += 1
        return graphed.logits.clone()


def worst(got: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> float:
    return max(float((g - w).abs().max()) for g, w in zip(got, wanted, strict=True))

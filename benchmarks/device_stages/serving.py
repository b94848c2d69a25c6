"""Random models of real shapes, and an engine around them without tokenizer and queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import transformers
from transformers import PreTrainedModel

from tokenmill_engine.checkpoint import LoadedModel
from tokenmill_engine.config import EngineConfig, SchedulerConfig
from tokenmill_engine.device_sampling import choose_on_device
from tokenmill_engine.generation_defaults import GenerationRules
from tokenmill_engine.graph_buckets import StepLimits
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.model_loader import ModelFacts, build_runner
from tokenmill_engine.model_runner import ModelRunner
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_graphs import GraphedModel, StepGraphs
from tokenmill_engine.triton_attention import TritonPagedAttention

from .context import Bench

SHAPES: dict[str, tuple[str, dict[str, object]]] = {
    "Qwen3-0.6B": (
        "qwen3",
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
            "tie_word_embeddings": True,
        },
    ),
    "Llama-3.1-8B": (
        "llama",
        {
            "vocab_size": 128_256,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
        },
    ),
}
TINY: dict[str, object] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}
NO_SPECIAL = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}


def random_model(
    bench: Bench, model_type: str, settings: dict[str, object], dtype: torch.dtype
) -> PreTrainedModel:
    """Drawn where it will run: nothing is read from a disk."""
    config = transformers.AutoConfig.for_model(model_type, **NO_SPECIAL, **settings)
    torch.manual_seed(0)
    with bench.device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


@dataclass
class Serving:
    """A model behind scheduler, runner and sampler."""

    runner: ModelRunner
    facts: ModelFacts
    graphs: StepGraphs | None

    @classmethod
    def of(cls, bench: Bench, model: PreTrainedModel, **options: object) -> Serving:
        """`options` of `EngineConfig`. On a CPU the kernels run in Triton's interpreter."""
        defaults = {"max_num_batched_tokens": 2048, "skip_self_test": bench.is_cuda is False}
        config = EngineConfig(model="device check", **defaults | options)
        backend = None if bench.is_cuda else TritonPagedAttention([], bench.device)
        runner, facts = build_runner(LoadedModel(model), config, backend=backend)
        if not bench.is_cuda and not config.enforce_eager:
            facts = replace(facts, num_blocks=facts.num_blocks - 1)  # the last one is the spare
            runner.graphs = _graphs_on_cpu(bench, runner, facts)
        graphs = runner.graphs if isinstance(runner.graphs, StepGraphs) else None
        return cls(runner, facts, graphs)

    def new_sampler(self) -> Sampler:
        return Sampler(
            rules=GenerationRules(), encode_bad_words=lambda _: (), choose=choose_on_device
        )

    def generate(self, requests: Sequence[Request]) -> int:
        """Compute all of them to their ends; returns how often one was preempted."""
        facts = self.facts
        config = SchedulerConfig(
            max_num_seqs=facts.max_num_seqs,
            max_num_batched_tokens=facts.max_num_batched_tokens,
            max_model_len=facts.max_model_len,
        )
        kv = KVCacheManager(facts.num_blocks, facts.block_size, enable_prefix_caching=False)
        scheduler, sampler = Scheduler(config, kv), self.new_sampler()
        for request in requests:
            scheduler.add(request)
        while scheduler.has_unfinished_requests:
            output = scheduler.schedule()
            scheduler.update_from_output(output, self.runner.execute(output, sampler))
        return scheduler.stats.preemptions_total


def _graphs_on_cpu(bench: Bench, runner: ModelRunner, facts: ModelFacts) -> StepGraphs:
    backend = runner.backend
    assert isinstance(backend, TritonPagedAttention)
    graphed = GraphedModel(
        model=runner.model,
        specs=runner.specs,
        kv_cache=replace(runner.kv_cache, num_blocks=facts.num_blocks),
        backend=backend,
        vocab_size=facts.vocab_size,
    )
    limits = StepLimits(
        max_rows=facts.max_num_batched_tokens,
        max_seqs=facts.max_num_seqs,
        max_model_len=facts.max_model_len,
        num_blocks=facts.num_blocks,
        block_size=facts.block_size,
    )
    return StepGraphs(graphed, limits, bench.graph_driver())

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
from tokenmill_engine.outputs import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler
from tokenmill_engine.step_graphs import GraphedModel, StepGraphs
from tokenmill_engine.step_recovery import StepRecovery
from tokenmill_engine.steps_in_flight import StepsInFlight
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


@torch.no_grad()
def widen(model: PreTrainedModel) -> None:
    """With weights as small as transformers draws them, attention hardly changes a token."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.mul_(3.0)
        elif "sink" in name:
            parameter.normal_()


@dataclass
class Serving:
    """A model behind scheduler, runner and sampler."""

    runner: ModelRunner
    facts: ModelFacts
    graphs: StepGraphs | None

    @classmethod
    def of(
        cls, bench: Bench, model: PreTrainedModel, *, fused: bool = True, **options: object
    ) -> Serving:
        """`options` of `EngineConfig`. On a CPU the kernels run in Triton's interpreter.

        `fused`: with the fused modules that an engine has; else with its attention alone.
        """
        defaults = {"max_num_batched_tokens": 2048, "skip_self_test": bench.is_cuda is False}
        kernels = {} if fused else {"kernels": "torch"}
        config = EngineConfig(model="device check", **defaults | options | kernels)
        given = not (bench.is_cuda and fused)
        backend = TritonPagedAttention([], bench.device) if given else None
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

    def prompt_logits(self, token_ids: list[int]) -> torch.Tensor:
        """Of the last row of a prompt, `[vocab]` float32."""
        request = Request("prompt", token_ids, SamplingParams())
        request.block_ids = list(range(-(-len(token_ids) // self.facts.block_size)))
        scheduled = (ScheduledRequest(request, 0, len(token_ids)),)
        return self.runner.compute_logits(SchedulerOutput(scheduled, len(token_ids)))[0]

    def generate(self, requests: Sequence[Request], *, ahead: bool = False) -> int:
        """Compute all of them to their ends; returns how often one was preempted.

        `ahead`: each step is launched before the tokens of the one before are read.
        """
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
        steps = self._steps_ahead(scheduler, sampler)
        while scheduler.has_unfinished_requests or len(steps):
            if ahead:
                for result in steps.run():
                    scheduler.update_from_output(result.plan, result.output)
            else:
                output = scheduler.schedule()
                scheduler.update_from_output(output, self.runner.execute(output, sampler))
        return scheduler.stats.preemptions_total

    def _steps_ahead(self, scheduler: Scheduler, sampler: Sampler) -> StepsInFlight:
        """None of them may fail: the engine would do it again, and nobody would notice."""

        def compute(plan: SchedulerOutput) -> ModelRunnerOutput:
            raise RuntimeError(f"a step of {plan.num_batched_tokens} rows failed")

        recovery = StepRecovery(
            scheduler, scheduler.kv, compute=compute, is_out_of_memory=lambda _: False
        )
        return StepsInFlight(scheduler, recovery, lambda plan: self.runner.launch(plan, sampler))


def _graphs_on_cpu(bench: Bench, runner: ModelRunner, facts: ModelFacts) -> StepGraphs:
    backend = runner.backend
    assert isinstance(backend, TritonPagedAttention)
    graphed = GraphedModel(
        model=runner.model,
        specs=runner.specs,
        kv_cache=replace(runner.kv_cache, num_blocks=facts.num_blocks),
        backend=backend,
        last_samples=runner.last_samples,
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

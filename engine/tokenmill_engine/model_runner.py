"""Computes scheduled steps: one forward over a ragged batch, over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from transformers import PreTrainedModel

from .attention import (
    IMPLEMENTATION,
    AttentionBackend,
    AttentionSpec,
    CallKey,
    ForwardContext,
    forward_context,
)
from .kv_cache import KVCache
from .last_samples import LastSamples
from .launched_step import LaunchedStep
from .outputs import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from .probe import switch_attention
from .request import Request
from .sampler import Drawn
from .sampling_params import SamplingParams
from .step_inputs import build_step_inputs


class SamplerLike(Protocol):
    """Logits `[num_sampling, vocab]` float32 and their requests to one token each."""

    def __call__(
        self,
        logits: torch.Tensor,
        requests: tuple[ScheduledRequest, ...],
        /,
        *,
        settings: torch.Tensor | None = None,
    ) -> tuple[SampledToken, ...]:
        """`settings`: what `pack_settings` says of the requests, if the device has it already."""


class Drawing(Protocol):
    """Chooses tokens without reading them: `Sampler`."""

    def draw(
        self,
        logits: torch.Tensor,
        scheduled: tuple[ScheduledRequest, ...],
        *,
        settings: torch.Tensor | None = None,
    ) -> Drawn:
        """As `SamplerLike`, with the tokens left on the device."""


class GraphsLike(Protocol):
    """Computes steps by other means, where it can: `StepGraphs`."""

    def run(self, output: SchedulerOutput) -> ComputedStep | None:
        """None for a step that must be computed in the usual way."""


@dataclass(frozen=True, slots=True, eq=False)
class ComputedStep:
    """What a step left on the device; valid until the next step."""

    logits: torch.Tensor  # [num_sampling, vocab] float32, or of the model's own type
    settings: torch.Tensor | None = None  # [NUM_SETTINGS, num_sampling] int64: `pack_settings`


class ModelRunner:
    """Owns the model and its KV cache; holds no state of a request but the last step's tokens.

    `on_logits`, when set, sees the logits of every step, in float32, before the sampler does.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        specs: dict[CallKey, AttentionSpec],
        kv_cache: KVCache,
        backend: AttentionBackend,
        *,
        rope_switch_tokens: int | None = None,
    ) -> None:
        switch_attention(model, IMPLEMENTATION)
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        self.device = model.device
        self.on_logits: Callable[[SchedulerOutput, torch.Tensor], None] | None = None
        self.graphs: GraphsLike | None = None
        self.last_samples = LastSamples(self.device)
        self.specs = specs
        self.rope_switch_tokens = rope_switch_tokens

    def execute(self, output: SchedulerOutput, sampler: SamplerLike) -> ModelRunnerOutput:
        """Compute the step and sample a token for each request that reached its newest token."""
        computed = self._compute(output)
        if not output.sampling:
            return ModelRunnerOutput()
        return ModelRunnerOutput(
            sampler(computed.logits, output.sampling, settings=computed.settings)
        )

    def launch(self, output: SchedulerOutput, sampler: Drawing) -> LaunchedStep:
        """The same without waiting for the tokens, which also stay where the next step finds them.

        On a CPU all is computed at once.
        """
        step = LaunchedStep(self.device)
        computed = self._compute(output)
        drawn: Drawn | None = None
        if output.sampling:
            drawn = sampler.draw(computed.logits, output.sampling, settings=computed.settings)
            self.last_samples.keep(drawn.token_ids)
        step.is_launched(drawn)
        return step

    def _compute(self, output: SchedulerOutput) -> ComputedStep:
        graphed = self._run_graph(output)
        return ComputedStep(self.compute_logits(output)) if graphed is None else graphed

    @torch.inference_mode()
    def _run_graph(self, output: SchedulerOutput) -> ComputedStep | None:
        graphed = self.graphs.run(output) if self.graphs is not None else None
        if graphed is not None and self.on_logits is not None:
            self.on_logits(output, graphed.logits)
        return graphed

    @torch.inference_mode()
    def compute_logits(self, output: SchedulerOutput) -> torch.Tensor:
        """Write the K/V of all rows and return the logits `[num_sampling, vocab]`, as computed."""
        inputs = build_step_inputs(
            output,
            block_size=self.kv_cache.block_size,
            device=self.device,
            rope_switch_tokens=self.rope_switch_tokens,
        )
        num_sampling = len(inputs.logits_rows)
        # The model's own head computes the logits, since what surrounds it (soft cap, scale)
        # differs from model to model. It needs at least one row.
        rows = inputs.logits_rows if num_sampling else inputs.logits_rows.new_zeros(1)
        context = ForwardContext(
            backend=self.backend,
            specs=self.specs,
            layers=self.kv_cache.layers,
            metadata=inputs.metadata,
            long_rows=inputs.long_rows,
        )
        input_ids = inputs.input_ids
        if inputs.sources is not None:
            input_ids = self.last_samples.fill_in(input_ids[0], inputs.sources)[None]
        with forward_context(context):
            result = self.model(
                input_ids=input_ids,
                position_ids=inputs.position_ids,
                attention_mask=None,
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: torch.Tensor = result.logits[0, :num_sampling]
        if self.on_logits is not None:
            self.on_logits(output, logits.float())
        return logits

    def warm_up(self, num_tokens: int = 8) -> None:
        """Run a prompt and a decode through the model, so that the first request need not wait.

        Writes into the first blocks of the cache: call it before any request.
        """
        block_size = self.kv_cache.block_size
        num_tokens = min(num_tokens, self.kv_cache.num_blocks * block_size - 1)
        request = Request("warm-up", [0] * (num_tokens + 1), SamplingParams())
        request.block_ids = list(range(-(-(num_tokens + 1) // block_size)))
        for start, count in ((0, num_tokens), (num_tokens, 1)):
            if count:
                self.compute_logits(SchedulerOutput((ScheduledRequest(request, start, count),)))

    def profile(self, num_rows: int, num_seqs: int, max_model_len: int) -> None:
        """Run the largest step there can be: `num_rows` rows of new prompts, `num_seqs` sampled.

        New prompts attend to rows of the step itself, so one block serves as every block.
        """
        scheduled = []
        num_seqs = min(num_seqs, num_rows)
        for number in range(num_seqs):
            share = num_rows // num_seqs + (number < num_rows % num_seqs)
            length = min(share, max_model_len)
            request = Request(f"profile-{number}", [0] * length, SamplingParams())
            request.block_ids = [0] * -(-length // self.kv_cache.block_size)
            scheduled.append(ScheduledRequest(request, 0, length))
        self.compute_logits(SchedulerOutput(tuple(scheduled), num_rows))

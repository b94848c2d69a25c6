"""The engine: requests in, token and text deltas out, one step at a time.

Synchronous and free of threads: whoever owns an engine calls `step()` in a loop, and adds or aborts
requests between steps.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence

from .config import EngineConfig, SchedulerConfig
from .draw import NO_TOKEN
from .errors import DuplicateRequest
from .generation_defaults import GenerationDefaults
from .input_checks import check_prompt_token_ids, check_token_ids, validate_params
from .kernel_choice import choose_async_scheduling, choose_sampling
from .kv_cache_manager import KVCacheManager
from .model_loader import ModelFacts, load_runner
from .model_runner import ModelRunner
from .out_of_memory import is_out_of_memory
from .outputs import EngineStats, ModelRunnerOutput, RequestOutput, SampledToken, SchedulerOutput
from .request import FinishReason, Request
from .sampler import Sampler
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .sequence_text import SequenceText
from .step_recovery import StepRecovery, StepResult
from .steps_in_flight import LaunchedStep, StepsInFlight
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLMEngine:
    """Continuous batching over one model. Build it with `LLMEngine.load(config)`."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        scheduler: Scheduler,
        *,
        tokenizer: Tokenizer,
        defaults: GenerationDefaults,
        vocab_size: int,
        model_name: str = "",
        seed: int = 0,
        text_later: bool = False,
        async_scheduling: bool = False,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.defaults = defaults
        self.vocab_size = vocab_size
        self.runner = runner
        self.scheduler = scheduler
        self._sampler = sampler
        self._recovery = StepRecovery(
            scheduler, scheduler.kv, compute=self._compute, is_out_of_memory=is_out_of_memory
        )
        self._in_flight = StepsInFlight(
            scheduler, self._recovery, self._launch, on_landed=self._observe
        )
        self.is_async = async_scheduling  # steps are launched one ahead
        self._seed = seed
        self._text_later = text_later
        self._texts: dict[str, SequenceText] = {}
        self._replayed: list[
            SequenceText
        ] = []  # resumed requests that had all their tokens already

    @classmethod
    def load(
        cls,
        config: EngineConfig,
        on_progress: Callable[[str], None] | None = None,
        *,
        text_later: bool = False,
    ) -> LLMEngine:
        """Loads, probes, self-tests and warms up the model.

        With `text_later`, outputs of requests without stop strings come without their text: it is
        made by `RequestOutput.read`, on another thread while the next step is computed.

        Raises ConfigError for options that do not fit, ModelLoadError when there is nothing usable
        to load, UnsupportedModel when the model cannot be served exactly.
        """
        tokenizer = Tokenizer.load(
            config.tokenizer or config.model,
            revision=config.revision if config.tokenizer is None else None,
            trust_remote_code=config.trust_remote_code,
        )
        runner, facts = load_runner(config, on_progress)
        kv = KVCacheManager(
            facts.num_blocks, facts.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        defaults = GenerationDefaults.from_model(
            runner.model.generation_config, runner.model.config, tokenizer.eos_token_id
        )
        for note in (*facts.notes, *defaults.notes):
            logger.warning("%s", note)
        choose = choose_sampling(
            config.kernels, runner.device, runner.backend, vocab_size=facts.vocab_size
        )
        return cls(
            runner,
            Sampler(rules=defaults.rules, encode_bad_words=tokenizer.bad_word_ids, choose=choose),
            Scheduler(_scheduler_config(config, facts), kv),
            tokenizer=tokenizer,
            defaults=defaults,
            vocab_size=facts.vocab_size,
            model_name=config.model,
            seed=config.seed,
            text_later=text_later,
            async_scheduling=choose_async_scheduling(config.async_scheduling, choose),
        )

    @property
    def max_model_len(self) -> int:
        return self.scheduler.config.max_model_len

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether `step` has something to do: also while a step is in flight that nobody needs."""
        return bool(
            self.scheduler.has_unfinished_requests or self._replayed or len(self._in_flight)
        )

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        emitted_chars: int | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        alone: bool = False,
    ) -> None:
        """Queues a request; its outputs come from `step()`. A suspect is prefilled `alone`.

        A successor of a lost worker passes the tokens already published as `output_token_ids` and
        the length of the text that went with them as `emitted_chars`: the request continues behind
        them, and its first text delta starts there.

        Raises InvalidRequest and its subclasses, DuplicateRequest, ResumeMismatch; then nothing has
        changed.
        """
        if request_id in self._texts:
            raise DuplicateRequest(f"request {request_id} is already waiting or running")
        check_prompt_token_ids(prompt_token_ids, self.vocab_size)
        check_token_ids("output_token_ids", output_token_ids, self.vocab_size)
        validate_params(params, self.vocab_size, self.tokenizer.bad_word_ids)
        request = Request(
            request_id,
            prompt_token_ids,
            params,
            output_token_ids=output_token_ids,
            eos_token_ids=self.defaults.eos_token_ids,
            seed=params.seed if params.seed is not None else derive_seed(self._seed, request_id),
            priority=priority,
            cache_salt=cache_salt,
            alone=alone,
        )
        text = SequenceText(request, self.tokenizer)
        text.replay(self.scheduler.config, emitted_chars)
        if request.finish_reason is None:
            self.scheduler.add(request)
        else:
            self._replayed.append(text)
        self._texts[request_id] = text

    def abort_request(self, request_id: str) -> None:
        """Ends a request at once, between steps; it gives no further output."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self.scheduler.abort(request_id)
            self._replayed = [other for other in self._replayed if other is not text]
            self._sampler.forget(request_id)

    def step(self) -> list[RequestOutput]:
        """Computes one step; returns what it added to each request that got a token or ended.

        With asynchronous scheduling, launches one step and returns what the one before added.

        A request that the model cannot compute ends with `StepFailed`. Raises what the model raised
        when that is not the fault of single requests (see `step_recovery`).
        """
        replayed, self._replayed = self._replayed, []
        outputs = [self._report(text, None) for text in replayed]
        results = self._in_flight.run() if self.is_async else [self._recovery.run()]
        for result in results:
            outputs.extend(self._book(result))
        return outputs

    def _compute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        began_s = time.monotonic()
        output = self.runner.execute(plan, self._sampler)
        self._observe(plan, time.monotonic() - began_s)
        return output

    def _launch(self, plan: SchedulerOutput) -> LaunchedStep:
        return self.runner.launch(plan, self._sampler)

    def _observe(self, plan: SchedulerOutput, seconds: float) -> None:
        num_decodes = sum(item.num_tokens == 1 for item in plan.scheduled)
        self.scheduler.pacer.observe(
            num_decodes=num_decodes,
            num_chunk_tokens=plan.num_batched_tokens - num_decodes,
            seconds=seconds,
        )

    def _book(self, result: StepResult) -> list[RequestOutput]:
        tokens = {
            item.request.request_id: token
            for item, token in zip(result.plan.sampling, result.output.sampled, strict=True)
            if not item.request.is_finished  # else it ended while the step was in flight
        }
        for error in result.failures:
            tokens[error.request_id] = SampledToken(NO_TOKEN, error=error)
        failed = [request_id for request_id, token in tokens.items() if token.error is not None]
        for request_id in failed:
            # Before the update, which then passes over the request and its token.
            self.scheduler.finish(self._texts[request_id].request, FinishReason.ERROR)
        if result.plan.scheduled:
            self.scheduler.update_from_output(result.plan, result.output)
        return [
            self._report(self._texts[request_id], token) for request_id, token in tokens.items()
        ]

    def _report(self, text: SequenceText, token: SampledToken | None) -> RequestOutput:
        output = text.advance(token, text_later=self._text_later)
        if output.finish_reason is not None:
            request = text.request
            if token is not None and not request.is_finished:  # ended by a stop string
                self.scheduler.finish(request, output.finish_reason, output.stop_reason)
            del self._texts[request.request_id]
            self._sampler.forget(request.request_id)
        return output

    def stats(self) -> EngineStats:
        return self.scheduler.engine_stats()

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree."""
        self.scheduler.check_invariants()


def _scheduler_config(config: EngineConfig, facts: ModelFacts) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=facts.max_num_seqs,
        max_num_batched_tokens=facts.max_num_batched_tokens,
        max_model_len=facts.max_model_len,
        policy=config.scheduling_policy,
        itl_target_ms=config.itl_target_ms,
        rope_switch_tokens=facts.rope_switch_tokens,
    )


def derive_seed(engine_seed: int, request_id: str) -> int:
    """The seed of a request that brings none: fixed by the engine's seed and the request's id."""
    digest = hashlib.blake2b(
        request_id.encode(), key=engine_seed.to_bytes(8, "big"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "big") >> 1  # 63 bits, the range of an explicit seed

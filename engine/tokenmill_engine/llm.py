"""The engine alone, without Redis: `LLM(model=…).generate(prompts, sampling_params)`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .config import EngineConfig
from .errors import InvalidRequest
from .llm_engine import LLMEngine
from .outputs import RequestOutput, TokenLogprobs
from .request import FinishReason
from .sampling_params import SamplingParams

__all__ = ["LLM", "Generation", "GenerationMetrics", "SamplingParams"]

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


@dataclass(slots=True)
class GenerationMetrics:
    """Times in seconds since `generate` was called; None while it has not happened."""

    first_token_s: float | None = None
    finished_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass(slots=True)
class Generation:
    """The answer to one prompt. `logprobs[i]` belongs to `token_ids[i]`; None unless asked for."""

    request_id: str
    prompt_token_ids: list[int]
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    metrics: GenerationMetrics = field(default_factory=GenerationMetrics)

    def fold(self, output: RequestOutput, elapsed_s: float) -> None:
        """Adds what a step gave."""
        if output.new_token_ids and self.metrics.first_token_s is None:
            self.metrics.first_token_s = elapsed_s
        self.text += output.text
        self.token_ids.extend(output.new_token_ids)
        if self.logprobs is not None:
            self.logprobs.extend(output.logprobs)
        self.metrics.num_cached_tokens = output.num_cached_tokens
        self.metrics.num_preemptions = output.num_preemptions
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stop_reason = output.stop_reason
            self.metrics.finished_s = elapsed_s


class LLM:
    """Loads a model once and answers batches of prompts.

    Options are those of `EngineConfig`, under vLLM's names. Raises ConfigError, ModelLoadError or
    UnsupportedModel. `on_progress` is called with a sentence at each phase of loading.
    """

    def __init__(
        self, model: str, *, on_progress: Callable[[str], None] | None = None, **options: Any
    ) -> None:
        config = EngineConfig(model=model, **options)
        self.engine = LLMEngine.load(config, on_progress)
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Answers all prompts, batched continuously; the results are in the order of the prompts.

        A prompt is a text or a list of token ids. `sampling_params` is one for all, one per prompt,
        or None for the model's own defaults. Raises InvalidRequest before anything runs if one of
        them is wrong.
        """
        token_ids = [self._encode(prompt) for prompt in _as_list(prompts)]
        return self._run(token_ids, sampling_params)

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[Generation]:
        """Like `generate`, over messages `{"role": …, "content": …}` and the chat template."""
        many = [conversations] if isinstance(conversations[0], Mapping) else conversations
        render = self.engine.tokenizer.render_chat
        token_ids = [
            render(list(messages), chat_template_kwargs=chat_template_kwargs)  # type: ignore[arg-type]
            for messages in many
        ]
        return self._run(token_ids, sampling_params)

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.engine.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _run(
        self,
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Generation]:
        started = time.perf_counter()
        generations: dict[str, Generation] = {}
        try:
            for prompt, params in zip(
                prompts, self._spread(sampling_params, len(prompts)), strict=True
            ):
                request_id = f"llm-{self._num_requests}"
                self._num_requests += 1
                self.engine.add_request(request_id, prompt, params)
                logprobs: list[TokenLogprobs] | None = None if params.logprobs is None else []
                generations[request_id] = Generation(request_id, prompt, logprobs=logprobs)
            while self.engine.has_unfinished_requests:
                for output in self.engine.step():
                    elapsed_s = time.perf_counter() - started
                    generations[output.request_id].fold(output, elapsed_s)
        except BaseException:
            # A wrong prompt, Ctrl-C or a failed step must not leave the others running.
            for request_id in generations:
                self.engine.abort_request(request_id)
            raise
        return list(generations.values())

    def _spread(
        self, sampling_params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if sampling_params is None:
            return [self.engine.defaults.apply({})] * count
        if isinstance(sampling_params, SamplingParams):
            return [sampling_params] * count
        if len(sampling_params) != count:
            raise InvalidRequest(
                "sampling_params",
                f"give one, or one per prompt: {count}, not {len(sampling_params)}",
            )
        return list(sampling_params)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many: a text or a list of ids is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    items: Iterable[Any] = prompts
    items = list(items)
    if items and all(isinstance(item, int) for item in items):
        return [items]
    return items

"""What the worker needs of an engine. `tokenmill_engine.llm_engine.LLMEngine` is one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from tokenmill_engine.outputs import EngineStats, RequestOutput
from tokenmill_engine.sampling_params import SamplingParams


class Tokenizer(Protocol):
    """Safe to call from several threads."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render_chat(
        self,
        messages: list[dict[str, object]],
        *,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]: ...


class GenerationDefaults(Protocol):
    """The model's own generation config."""

    def apply(self, explicit: Mapping[str, object]) -> SamplingParams: ...


class Engine(Protocol):
    """Everything but `tokenizer` and `defaults` belongs to the engine thread."""

    @property
    def tokenizer(self) -> Tokenizer: ...

    @property
    def defaults(self) -> GenerationDefaults: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def model_name(self) -> str: ...

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
    ) -> None: ...

    def abort_request(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    @property
    def has_unfinished_requests(self) -> bool: ...

    def stats(self) -> EngineStats: ...


#: Builds the engine; called on the engine thread. It reports each phase of loading by name.
EngineFactory = Callable[[Callable[[str], None]], Engine]

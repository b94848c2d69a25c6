"""The wire: what producers put into Redis and what they get back, as pydantic models.

A request body is the JSON of `GenerateRequest`; an event is the JSON of one of `StartEvent`,
`TokenEvent`, `EndEvent`, with one- and two-letter names because one is written per token. Requests
forbid unknown fields; events ignore them, so that old clients read new workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from . import limits

FinishReason = Literal["stop", "length", "abort", "error"]
State = Literal[
    "held", "queued", "delayed", "leased", "done", "failed", "cancelled", "expired", "dead"
]
TERMINAL_STATES: frozenset[str] = frozenset({"done", "failed", "cancelled", "expired", "dead"})
ErrorCode = Literal[
    "invalid_request", "unsupported", "too_long", "queue_full", "tenant_full",
    "deadline_exceeded", "cancelled", "worker_crash", "too_many_attempts", "undeliverable",
    "retries_exhausted", "model_changed", "resume_mismatch", "internal",
]  # fmt: skip

TokenId = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID)]
# JSON knows only string keys: "5" must mean 5 here, and nowhere else.
TokenIdKey = Annotated[int, Field(ge=0, le=limits.MAX_TOKEN_ID, strict=False)]
StopText = Annotated[str, Field(min_length=1, max_length=limits.MAX_STOP_CHARS)]


class SamplingParams(BaseModel):
    """vLLM's names and defaults, except `max_tokens` (256).

    Only what was set explicitly travels: what is left out is taken from the model's generation
    config, then from these defaults. `temperature` 0 is greedy.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    n: Literal[1] = 1
    temperature: float = Field(1.0, ge=0, le=100)
    top_k: int = Field(0, ge=-1, le=limits.MAX_TOKEN_ID)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, gt=0, le=100)
    logit_bias: dict[TokenIdKey, Annotated[float, Field(ge=-100, le=100)]] = Field(
        default_factory=dict, max_length=limits.MAX_LOGIT_BIAS
    )
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1)
    bad_words: list[StopText] = Field(default_factory=list, max_length=limits.MAX_BAD_WORDS)
    seed: int | None = Field(None, ge=0, le=limits.MAX_SEED)
    max_tokens: int = Field(256, ge=1, le=limits.MAX_TOKENS)
    min_tokens: int = Field(0, ge=0, le=limits.MAX_TOKENS)
    stop: list[StopText] = Field(default_factory=list, max_length=limits.MAX_STOP_STRINGS)
    stop_token_ids: list[TokenId] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = Field(None, ge=0, le=limits.MAX_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _one_stop_text_is_a_list(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("stop"), str):
            return {**data, "stop": [data["stop"]]}
        return data

    @model_validator(mode="after")
    def _min_within_max(self) -> SamplingParams:
        if self.min_tokens > self.max_tokens:
            raise ValueError("min_tokens must be at most max_tokens")
        return self


class TextPart(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message; `content` is text, or a list of `{"type": "text", "text": …}` parts."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = Field(None, max_length=64)


class GenerateRequest(SamplingParams):
    """A request body: one of `prompt`, `prompt_token_ids`, `messages`, and sampling fields."""

    v: Literal[1] = 1
    model: str | None = Field(None, min_length=1, max_length=256)
    prompt: str | None = Field(None, min_length=1)
    prompt_token_ids: list[TokenId] | None = Field(None, min_length=1)
    messages: list[Message] | None = Field(None, min_length=1, max_length=limits.MAX_MESSAGES)
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    cache_salt: str | None = Field(None, min_length=1, max_length=64)
    meta: dict[str, Any] | None = None  # echoed in the end event, never logged

    @model_validator(mode="after")
    def _exactly_one_prompt(self) -> GenerateRequest:
        given = [self.prompt, self.prompt_token_ids, self.messages]
        if sum(item is not None for item in given) != 1:
            raise ValueError("give exactly one of prompt, prompt_token_ids and messages")
        return self

    def to_body(self) -> str:
        """The JSON that travels: only what was set."""
        return self.model_dump_json(exclude_unset=True)


class _Event(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)

    seq: int = Field(alias="e", ge=1)  # dense from 1; also the entry's id in the log
    attempt: int = Field(0, alias="a", ge=0)  # of the writer; counts leases


class StartEvent(_Event):
    """An attempt begins; `index` tokens are already in the log."""

    type: Literal["start"] = Field("start", alias="ev")
    index: int = Field(0, alias="i", ge=0)
    worker: str = Field("", alias="w")


class TokenLogprob(BaseModel):
    """One alternative at one position."""

    model_config = ConfigDict(frozen=True)

    token_id: int
    logprob: float
    rank: int
    text: str


class TokenEvent(_Event):
    """Tokens `index … index + len(token_ids) - 1`. `text` is a delta that may lag the tokens."""

    type: Literal["token"] = Field("token", alias="ev")
    index: int = Field(alias="i", ge=0)
    token_ids: list[int] = Field(alias="k")
    text: str = Field("", alias="t")
    #: Per token: the sampled one first, then the alternatives, each `[id, logprob, rank, text]`.
    logprobs: list[list[tuple[int, float, int, str]]] | None = Field(None, alias="lp")


class Usage(BaseModel):
    """Tokens of one request. `cached_tokens` are prompt tokens found in the prefix cache."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    cached_tokens: int = 0


class EndEvent(_Event):
    """The one terminal event, always the last."""

    type: Literal["end"] = Field("end", alias="ev")
    status: Literal["done", "failed", "cancelled", "expired", "dead"] = Field(alias="st")
    finish_reason: FinishReason | None = Field(None, alias="fin")
    stop_reason: int | str | None = Field(None, alias="sr")
    num_tokens: int | None = Field(None, alias="n")
    text: str = Field("", alias="t")  # what the detokenizer still held back
    usage: Usage | None = None
    code: str | None = None
    message: str | None = Field(None, alias="msg")
    meta: dict[str, Any] | None = None


class RewindEvent(BaseModel):
    """Made by the SDK, never on the wire: tokens from `index` on are withdrawn."""

    model_config = ConfigDict(frozen=True)

    type: Literal["rewind"] = "rewind"
    index: int


Event = StartEvent | TokenEvent | EndEvent | RewindEvent


class Completion(BaseModel):
    """The whole answer."""

    model_config = ConfigDict(frozen=True)

    id: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    usage: Usage = Usage()
    logprobs: list[list[TokenLogprob]] | None = None
    attempts: int = 1  # 2 or more: a worker was lost or drained, and another continued
    meta: dict[str, Any] | None = None

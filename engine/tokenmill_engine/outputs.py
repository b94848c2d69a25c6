"""What the parts of the engine hand to each other in a step. Imports no torch.

`Scheduler.schedule() -> SchedulerOutput`, the runner computes it and gives `ModelRunnerOutput`,
`Scheduler.update_from_output()` books it, and `LLMEngine.step()` returns `RequestOutput`s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .errors import EngineError
from .request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Compute `request.token_ids[start:start + num_tokens]` in this step.

    The last of these tokens may be unread: then it is on the device only.
    """

    request: Request
    start: int  # position of the first row; everything before it is in the cache by then
    num_tokens: int
    #: Whether the last row reaches the newest token, so that the next one can be sampled.
    samples: bool = field(init=False)
    #: Which sample of the step before the last row takes as its token; None: the host knows it.
    source: int | None = field(init=False)

    def __post_init__(self) -> None:
        request = self.request  # as it is now: its tokens may be read before the step is booked
        object.__setattr__(self, "samples", self.end == request.planned_length)
        is_unread = self.end > request.num_tokens
        object.__setattr__(self, "source", request.unread_place if is_unread else None)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step. `scheduled` holds the decoding requests first, then prompt chunks."""

    scheduled: tuple[ScheduledRequest, ...] = ()
    num_batched_tokens: int = 0
    preempted: tuple[Request, ...] = ()

    @property
    def sampling(self) -> tuple[ScheduledRequest, ...]:
        """Those that get a token in this step, in the order of `ModelRunnerOutput.sampled`."""
        return tuple(item for item in self.scheduled if item.samples)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the raw logits, before any penalty, bias or filter.

    `token_ids[0]` is the sampled token, whatever its rank (1 = most likely); the alternatives
    follow, most likely first. All three have the same length.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One row's next token. With an `error`, `token_id` is -1 and the request ends with it."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """`sampled[i]` belongs to `SchedulerOutput.sampling[i]`."""

    sampled: tuple[SampledToken, ...] = ()


@dataclass(slots=True)
class RequestOutput:
    """What one step added to one request. `text` is a delta; concatenated, the deltas are the text.

    The counts are totals so far. `finish_reason` is set on the last output of a request, once.

    While `unread` is set, `text` is still to be made from the tokens: `read` does it, on one thread
    for all outputs of a request and in their order.
    """

    request_id: str
    new_token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_preemptions: int = 0
    num_prefill_chunks: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: EngineError | None = None  # why, when `finish_reason` is ERROR
    unread: Callable[[RequestOutput], None] | None = field(default=None, repr=False, compare=False)

    def read(self) -> RequestOutput:
        """This output, with its text."""
        if self.unread is not None:
            make, self.unread = self.unread, None
            make(self)
        return self


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """One that is not running (any more), as it stands in the queue."""

    request_id: str
    num_tokens: int  # known ones: what needs blocks before it starts
    is_blocked: bool  # there were no blocks for it when it was last tried
    overtakes_left: int  # so many others may still start before it


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot after a step; the `*_total` fields only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0  # includes cached blocks that nobody references
    block_size: int = 1  # tokens
    step_tokens: int = 0  # rows that a step may have at present
    num_prefill_blocks: int = 0  # those of running requests that are still being prefilled
    reserve_blocks: int = 0  # must stay free when another request starts
    waiting: tuple[WaitingRequest, ...] = ()  # the first of the queue
    num_batched_tokens: int = 0  # rows of the last step
    steps_total: int = 0
    prompt_tokens_total: int = 0  # computed, so without prefix cache hits
    generation_tokens_total: int = 0
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    prefix_cache_queries_total: int = 0  # in tokens, as vLLM counts them
    prefix_cache_hits_total: int = 0
    oom_retries_total: int = 0  # steps done again, smaller, because memory ran out
    isolated_failures_total: int = 0  # requests that ended because they failed a step even alone
    extra: dict[str, float] = field(default_factory=dict)

    @property
    def kv_cache_usage(self) -> float:
        """Share of blocks referenced by some request, 0 to 1."""
        return 1 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0

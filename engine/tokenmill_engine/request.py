"""One request inside the engine: its tokens, how far they are computed, and how it ended."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, StrEnum

from .sampling_params import SamplingParams


class RequestStatus(Enum):
    """WAITING → RUNNING → FINISHED; RUNNING → PREEMPTED → RUNNING when blocks run out."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """`stop`: end of sequence, stop token or string; `length`: a limit; `abort`: the caller."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Request:
    """Bookkeeping of one sequence. Mutable; owned by the scheduler between `add` and the finish.

    `token_ids` is prompt + output; `num_computed_tokens` of them have their K/V in the cache.
    There is no prefill phase and no decode phase: a step computes
    `token_ids[num_computed_tokens:...]`, and a token is sampled when the computed tokens catch up
    with the known ones.

    While steps are in flight (see `steps_in_flight`), the request has *rows in flight* behind the
    computed ones, and *unread tokens* behind the known ones: sampled, but still on the device.
    Plans begin behind both. `token_ids` never holds anything but tokens that were read.
    """

    __slots__ = (
        "alone",
        "arrival",
        "block_hashes",
        "block_ids",
        "cache_salt",
        "eos_token_ids",
        "finish_reason",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_overtaken",
        "num_preemptions",
        "num_prefill_chunks",
        "num_prompt_tokens",
        "num_rows_in_flight",
        "num_unread_tokens",
        "params",
        "peak_computed_tokens",
        "prefill_end",
        "priority",
        "request_id",
        "rope_regime",
        "seed",
        "status",
        "stop_reason",
        "token_ids",
        "unread_place",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        output_token_ids: Sequence[int] = (),
        eos_token_ids: frozenset[int] = frozenset(),
        seed: int = 0,
        priority: int = 0,
        cache_salt: str | None = None,
        alone: bool = False,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.token_ids: list[int] = [*prompt_token_ids, *output_token_ids]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.eos_token_ids = eos_token_ids
        self.seed = seed  # always set: params.seed, or one that the engine derived
        self.priority = priority  # lower runs first, as in vLLM
        self.cache_salt = cache_salt
        self.alone = alone  # a suspect, see `quarantine`
        self.arrival = 0  # set by Scheduler.add: a counter, not a clock
        self.status = RequestStatus.WAITING
        self.num_computed_tokens = 0
        self.num_rows_in_flight = 0  # launched, not booked: they may still be written to
        self.num_unread_tokens = 0
        self.unread_place = 0  # of the newest unread token, among the samples of its step
        self.peak_computed_tokens = 0  # how far they ever were, before preemptions
        self.num_cached_tokens = 0  # prompt tokens found in the prefix cache at the first admission
        self.prefill_end = 0  # how many tokens were known at the last admission
        self.num_prefill_chunks = 0  # steps that computed some of those, over all admissions
        self.num_preemptions = 0
        self.num_overtaken = 0  # later requests that were admitted first, for want of blocks
        self.block_ids: list[int] = []  # the block table, in position order
        self.rope_regime = ""  # set by the scheduler: "short" or "long" if the model is LongRoPE
        self.block_hashes: list[bytes] = []  # of the full blocks, as far as they were hashed
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None  # the stop token id or stop string, None for EOS

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def planned_start(self) -> int:
        """The first token that is neither computed nor in flight."""
        return self.num_computed_tokens + self.num_rows_in_flight

    @property
    def planned_length(self) -> int:
        """Known and unread tokens."""
        return len(self.token_ids) + self.num_unread_tokens

    @property
    def next_output_index(self) -> int:
        """Which token of the output is the next to be sampled, unread ones counted; from 0."""
        return self.planned_length - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """Of a running request: whether tokens it was admitted with are still to be computed."""
        return self.num_computed_tokens < self.prefill_end

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )

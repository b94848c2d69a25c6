"""When a request has all its tokens, as a pure function of its newest one.

Stop strings are not here: only the detokenizer sees text. It ends a request through
`Scheduler.finish`.
"""

from __future__ import annotations

from typing import NamedTuple

from .config import SchedulerConfig
from .request import FinishReason, Request


class Stop(NamedTuple):
    """`stop_reason` is the token id for `stop_token_ids`; None for end-of-sequence and lengths."""

    finish_reason: FinishReason
    stop_reason: int | None = None


def check_stop(request: Request, config: SchedulerConfig) -> Stop | None:
    """Whether the newest output token ends the request. Before `min_tokens` only lengths do.

    For a request resumed with output tokens, call it once before adding the request: its last known
    token may be the final one.
    """
    params, num_output = request.params, request.num_output_tokens
    if num_output == 0:
        return None
    if num_output >= params.min_tokens:
        token_id = request.token_ids[-1]
        if token_id in request.eos_token_ids and not params.ignore_eos:
            return Stop(FinishReason.STOP)
        if token_id in params.stop_token_ids:
            return Stop(FinishReason.STOP, token_id)
    if _is_full(request, config, request.num_tokens):
        return Stop(FinishReason.LENGTH)
    return None


def ends_with_unread(request: Request, config: SchedulerConfig) -> bool:
    """Whether the unread tokens are the last ones, whatever they are."""
    return request.num_unread_tokens > 0 and _is_full(request, config, request.planned_length)


def _is_full(request: Request, config: SchedulerConfig, num_tokens: int) -> bool:
    num_output = num_tokens - request.num_prompt_tokens
    return num_output >= request.params.max_tokens or num_tokens >= config.max_model_len

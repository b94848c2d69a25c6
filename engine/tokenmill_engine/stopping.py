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
    if num_output >= params.max_tokens or request.num_tokens >= config.max_model_len:
        return Stop(FinishReason.LENGTH)
    return None

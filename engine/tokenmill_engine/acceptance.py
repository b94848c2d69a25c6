"""What the scheduler refuses at the door, so that whatever it accepts can be served to the end."""

from __future__ import annotations

from .config import SchedulerConfig
from .errors import InvalidRequest, PromptTooLong, RequestTooLarge, ResumeMismatch
from .kv_cache_manager import KVCacheManager
from .request import Request
from .stopping import check_stop


def check_acceptable(request: Request, config: SchedulerConfig, kv: KVCacheManager) -> None:
    """Raises InvalidRequest (empty prompt), PromptTooLong or RequestTooLarge; ResumeMismatch if the
    output tokens that the request came with already end it.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise InvalidRequest("prompt_token_ids", "must hold at least one token")
    if num_prompt >= config.max_model_len:
        raise PromptTooLong(
            "prompt_token_ids",
            f"has {num_prompt} tokens and max_model_len is {config.max_model_len}, which leaves no "
            f"room for an output token; shorten it to {config.max_model_len - 1} or less",
        )
    most = min(num_prompt + request.params.max_tokens, config.max_model_len)
    if not kv.can_ever_fit(most):
        raise RequestTooLarge(
            "max_tokens",
            f"prompt and output may reach {most} tokens and the KV cache holds "
            f"{kv.num_blocks * kv.block_size}; lower max_tokens, shorten the prompt or enlarge the "
            "cache",
        )
    if check_stop(request, config) is not None:
        raise ResumeMismatch(
            f"request {request.request_id} is complete: the output tokens it came with end it"
        )

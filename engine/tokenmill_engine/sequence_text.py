"""The text side of one request: tokens in, deltas and stop strings out."""

from __future__ import annotations

from .config import SchedulerConfig
from .detokenizer import Detokenizer
from .errors import ResumeMismatch
from .outputs import RequestOutput, SampledToken, TokenLogprobs
from .request import FinishReason, Request
from .stopping import check_stop
from .tokenizer import Tokenizer


class SequenceText:
    """Follows a request's output tokens. Everything in here is a function of the token ids alone,
    so that a successor rebuilds it by replaying what was published. (What sampling remembers is
    rebuilt from the same ids, see `TokenCounts.update`.)

    A stop string found here shows in the output as its `finish_reason` (in a replay: on the
    request); ending the request is left to whoever owns the scheduler.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self._detokenizer = Detokenizer(tokenizer, request.params)
        self._unread = ""  # text that the replayed tokens gave, but nobody published

    def replay(self, config: SchedulerConfig, emitted_chars: int | None) -> None:
        """Feeds the output tokens a request comes with; notes if they are all it needs.

        Raises ResumeMismatch if they cannot have come from this request: a stop before their end,
        or less text than the `emitted_chars` characters that were published with them.
        """
        request = self.request
        published = request.output_token_ids
        stop = check_stop(request, config)
        if stop is not None:
            request.finish_reason, request.stop_reason = stop
        for index, token_id in enumerate(published):
            is_last = index == len(published) - 1
            by_token = is_last and request.finish_reason is FinishReason.STOP
            delta = self._detokenizer.push((token_id,), stop_token=by_token)
            self._unread += delta.text
            if delta.stop_string is not None:
                request.finish_reason, request.stop_reason = FinishReason.STOP, delta.stop_string
            if isinstance(request.stop_reason, str) and not is_last:
                raise ResumeMismatch(
                    f"request {request.request_id}: tokens were published behind a stop string"
                )
        if emitted_chars is not None:
            if emitted_chars > len(self._unread):
                raise ResumeMismatch(
                    f"request {request.request_id}: {len(published)} published tokens give "
                    f"{len(self._unread)} characters, but {emitted_chars} were published"
                )
            self._unread = self._unread[emitted_chars:]

    def advance(
        self, sampled: SampledToken | None = None, *, text_later: bool = False
    ) -> RequestOutput:
        """What a step added; `sampled` is the newest token, None if a request ends without one.

        With `text_later`, whoever gets the output `read`s it, on a thread of his own, unless stop
        strings make the text a matter of the engine's.
        """
        request = self.request
        token_ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        if sampled is not None and sampled.error is None:
            token_ids = (sampled.token_id,)
            logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        output = RequestOutput(
            request_id=request.request_id,
            new_token_ids=token_ids,
            logprobs=logprobs,
            num_prompt_tokens=request.num_prompt_tokens,
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=request.num_output_tokens,
            num_preemptions=request.num_preemptions,
            num_prefill_chunks=request.num_prefill_chunks,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            error=None if sampled is None else sampled.error,
            unread=self._read,
        )
        return output if text_later and not request.params.stop_strings else output.read()

    def _read(self, output: RequestOutput) -> None:
        """Make the text of an output; perhaps a stop string ends the request with it.

        Goes by the output alone: the request may be some tokens ahead.
        """
        text, self._unread = self._unread, ""
        for token_id in output.new_token_ids:
            by_token = output.finish_reason is FinishReason.STOP
            delta = self._detokenizer.push((token_id,), stop_token=by_token)
            text += delta.text
            if delta.stop_string is not None:
                # It wins over a limit reached by the same token, as in vLLM.
                output.finish_reason, output.stop_reason = FinishReason.STOP, delta.stop_string
        if output.finish_reason is not None:
            text += self._detokenizer.finish()
        output.text = text

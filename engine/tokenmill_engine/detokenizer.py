"""The text of one request as it grows: whole characters, stop strings held back and cut.

The text is the decoded output, so a leading space that a tokenizer drops at the start of a text is
dropped at the start of the output. A stop token's own text is left out unless
`include_stop_str_in_output` is set, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from .sampling_params import SamplingParams
from .stop_strings import StopStrings
from .text_stream import TextStream


class TextDelta(NamedTuple):
    """Text to append, and the stop string that has just ended the request."""

    text: str
    stop_string: str | None = None


class TextStreamFactory(Protocol):
    """What is needed of `Tokenizer`."""

    def text_stream(self, *, skip_special_tokens: bool) -> TextStream: ...


class Detokenizer:
    """A function of the parameters and output ids only: to resume, build it with the ids so far.

    `output_token_ids` are fed through the same code as the tokens to come; their text counts as
    emitted and is not returned. A stop string that they complete shows in `stop_string`.

    Stop strings count from the token after `min_tokens` on: a match must end in its text or later,
    but may begin earlier, as in vLLM.
    """

    __slots__ = (
        "_include_stop",
        "_min_tokens",
        "_stops",
        "_stream",
        "emitted_chars",
        "num_tokens",
        "stop_string",
    )

    def __init__(
        self,
        tokenizer: TextStreamFactory,
        params: SamplingParams,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        self._stream = tokenizer.text_stream(skip_special_tokens=params.skip_special_tokens)
        self._include_stop = params.include_stop_str_in_output
        self._stops = StopStrings(params.stop_strings, include=self._include_stop)
        self._min_tokens = params.min_tokens
        self.num_tokens = 0
        self.emitted_chars = 0  # characters (code points) in all deltas so far
        self.stop_string: str | None = None
        self.push(output_token_ids)

    def push(self, token_ids: Sequence[int], *, stop_token: bool = False) -> TextDelta:
        """The text that `token_ids` release; `stop_token`: the last of them ended the request.

        Tokens after the one that completes a stop string have no text.
        """
        silent = len(token_ids) - 1 if stop_token and not self._include_stop else len(token_ids)
        pieces = []
        for index, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if index < silent and self.stop_string is None:
                pieces.append(self._scan(self._stream.push(token_id)))
        return TextDelta(self._emit(pieces), self.stop_string)

    def finish(self) -> str:
        """The text still held back, once no token follows; empty after a stop string."""
        if self.stop_string is not None:
            return ""
        pieces = [self._scan(self._stream.finish())]
        if self.stop_string is None:
            pieces.append(self._stops.flush())
        return self._emit(pieces)

    def _scan(self, text: str) -> str:
        armed = self.num_tokens > self._min_tokens
        released, self.stop_string = self._stops.push(text, armed=armed)
        return released

    def _emit(self, pieces: Sequence[str]) -> str:
        text = "".join(pieces)
        self.emitted_chars += len(text)
        return text

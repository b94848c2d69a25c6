"""Folds a stream's events into the answer they make up."""

from __future__ import annotations

from .protocol import (
    Completion,
    EndEvent,
    Event,
    RewindEvent,
    StartEvent,
    TokenEvent,
    TokenLogprob,
    Usage,
)

#: What the wire carries for one token: `[id, logprob, rank, text]`, the sampled token first.
WireLogprobs = list[tuple[int, float, int, str]]


class Accumulator:
    """The answer so far. Feed every event to `fold`, in order, each once."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.token_ids: list[int] = []
        self.attempts = 0
        self.rewinds = 0
        self.end: EndEvent | None = None
        self._chunks: list[str] = []
        self._logprobs: list[WireLogprobs] = []
        # (tokens, characters) after each token event: text can only be cut where an event ended.
        self._marks: list[tuple[int, int]] = [(0, 0)]

    @property
    def num_chars(self) -> int:
        return self._marks[-1][1]

    @property
    def text(self) -> str:
        """All text deltas in a row, with the tail of the end event."""
        if len(self._chunks) > 1:
            self._chunks = ["".join(self._chunks)]
        return "".join(self._chunks) + (self.end.text if self.end else "")

    def fold(self, event: Event) -> None:
        if isinstance(event, TokenEvent):
            self._add(event)
        elif isinstance(event, StartEvent):
            self.attempts = max(self.attempts, event.attempt)
        elif isinstance(event, RewindEvent):
            self._rewind(event.index)
        else:
            self.end = event

    def boundary(self, num_tokens: int, text: str) -> tuple[int, int]:
        """The last (tokens, characters) mark within `num_tokens` whose text is how `text` begins.

        Up to there nothing has to be withdrawn when the true text turns out to be `text`.
        """
        mine = self.text
        for tokens, chars in reversed(self._marks):
            if tokens <= num_tokens and mine[:chars] == text[:chars]:
                return tokens, chars
        return 0, 0

    def logprobs_until(self, index: int) -> list[WireLogprobs]:
        """As on the wire, of the tokens before `index`; empty if none were asked for."""
        return self._logprobs[:index]

    def replay(self, seq: int) -> list[Event]:
        """What to tell a caller who has to start again from token 0; `seq` numbers it."""
        self.rewinds += 1
        text = self.text.removesuffix(self.end.text if self.end else "")
        tokens = TokenEvent(
            seq=max(seq, 1),
            attempt=self.attempts,
            index=0,
            token_ids=list(self.token_ids),
            text=text,
            logprobs=self._logprobs or None,
        )
        return [RewindEvent(index=0), tokens, *([self.end] if self.end else [])]

    def completion(self) -> Completion:
        end = self.end
        logprobs = None
        if self._logprobs:
            logprobs = [
                [
                    TokenLogprob(token_id=token_id, logprob=logprob, rank=rank, text=text)
                    for token_id, logprob, rank, text in alternatives
                ]
                for alternatives in self._logprobs
            ]
        return Completion(
            id=self.request_id,
            text=self.text,
            token_ids=list(self.token_ids),
            finish_reason=end.finish_reason if end else None,
            stop_reason=end.stop_reason if end else None,
            usage=(end.usage if end else None) or Usage(completion_tokens=len(self.token_ids)),
            logprobs=logprobs,
            attempts=self.attempts,
            meta=end.meta if end else None,
        )

    def _add(self, event: TokenEvent) -> None:
        self.token_ids += event.token_ids
        self._chunks.append(event.text)
        if event.logprobs is not None:
            self._logprobs += event.logprobs
        self._marks.append((len(self.token_ids), self.num_chars + len(event.text)))

    def _rewind(self, index: int) -> None:
        self.rewinds += 1
        text = self.text
        while self._marks[-1][0] > index:
            self._marks.pop()
        del self.token_ids[index:]
        del self._logprobs[index:]
        self._chunks = [text[: self.num_chars]]

"""One reading of an event log from its first entry, held against what was already delivered."""

from __future__ import annotations

from ._accumulator import Accumulator, WireLogprobs
from ._events import WireEvent
from .protocol import EndEvent, Event, RewindEvent, StartEvent, TokenEvent


class LogRewritten(Exception):
    """The event does not continue the log as it was read so far."""


class LogReading:
    """Turns log events into events to deliver.

    The first reading delivers everything. A later one (the log was rewritten after a loss of data)
    delivers only what is new, and withdraws what differs; the text is compared by position, since
    another attempt may cut the same text into other deltas.
    """

    def __init__(self, delivered: Accumulator, starts: set[tuple[int, int]]) -> None:
        self._delivered = delivered
        self._starts = starts  # (attempt, index) of the start events already delivered
        self.attempt = 0
        self._tokens = 0
        self._chars = 0

    def accept(self, event: WireEvent) -> list[Event]:
        """Fold the next event; returns what of it to deliver. Raises `LogRewritten`."""
        if isinstance(event, TokenEvent):
            out = self._accept_tokens(event)
        elif isinstance(event, StartEvent):
            out = self._accept_start(event)
        else:
            out = self._accept_end(event)
        for item in out:
            self._delivered.fold(item)
        return out

    def contradicts(self, event: WireEvent | None) -> bool:
        """Whether an event numbered like one already read says something else."""
        if isinstance(event, StartEvent):
            return (event.attempt, event.index) not in self._starts
        if isinstance(event, TokenEvent):
            stop = event.index + len(event.token_ids)
            return self._delivered.token_ids[event.index : stop] != event.token_ids
        return event is not None  # an end, but no end was read

    def _accept_start(self, event: StartEvent) -> list[Event]:
        if event.attempt < self.attempt or event.index != self._tokens:
            raise LogRewritten
        self.attempt = event.attempt
        key = (event.attempt, event.index)
        if key in self._starts:
            return []
        self._starts.add(key)
        return [event]

    def _accept_tokens(self, event: TokenEvent) -> list[Event]:
        # An attempt without its start: the start has a number that counts as read already.
        if event.attempt != self.attempt or event.index != self._tokens:
            raise LogRewritten
        delivered = self._delivered
        at_the_tip = len(delivered.token_ids) == self._tokens and delivered.num_chars == self._chars
        out: list[Event] = [event] if at_the_tip else self._compare_tokens(event)
        self._tokens += len(event.token_ids)
        self._chars += len(event.text)
        return out

    def _compare_tokens(self, event: TokenEvent) -> list[Event]:
        delivered, ids, start = self._delivered, event.token_ids, self._tokens
        known = delivered.token_ids[start : start + len(ids)]
        same = _common_prefix(ids, known)
        shown = delivered.text
        text = shown[: self._chars] + event.text
        if same == len(known) and shown[: len(text)] == text[: len(shown)]:
            new_text = text[len(shown) :]
            if same == len(ids) and not new_text:
                return []
            logprobs = None if event.logprobs is None else event.logprobs[same:]
            return [_with(event, start + same, ids[same:], new_text, logprobs)]
        index, chars = delivered.boundary(start + same, text)
        logprobs = _joined(delivered.logprobs_until(start), event.logprobs, index)
        new_ids = (delivered.token_ids[:start] + ids)[index:]
        return [RewindEvent(index=index), _with(event, index, new_ids, text[chars:], logprobs)]

    def _accept_end(self, event: EndEvent) -> list[Event]:
        delivered, shown = self._delivered, self._delivered.text
        text = shown[: self._chars] + event.text
        if len(delivered.token_ids) == self._tokens and text.startswith(shown):
            return [event.model_copy(update={"text": text[len(shown) :]})]
        index, chars = delivered.boundary(self._tokens, text)
        out: list[Event] = [RewindEvent(index=index)]
        kept = delivered.token_ids[index : self._tokens]
        if kept:
            logprobs = _joined(delivered.logprobs_until(self._tokens), None, index)
            again = TokenEvent(
                seq=event.seq, attempt=self.attempt, index=index, token_ids=kept, logprobs=logprobs
            )
            out.append(again)
        return [*out, event.model_copy(update={"text": text[chars:]})]


def _with(
    event: TokenEvent, index: int, ids: list[int], text: str, logprobs: list[WireLogprobs] | None
) -> TokenEvent:
    return event.model_copy(
        update={"index": index, "token_ids": ids, "text": text, "logprobs": logprobs}
    )


def _common_prefix(left: list[int], right: list[int]) -> int:
    pairs = zip(left, right, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(left), len(right)))


def _joined(
    earlier: list[WireLogprobs], later: list[WireLogprobs] | None, index: int
) -> list[WireLogprobs] | None:
    """Log probabilities of the tokens from `index` on; None if the request has none."""
    return [*earlier, *(later or [])][index:] or None

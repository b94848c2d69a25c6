"""Choosing the next token of every request of a step, the whole batch at once.

The token of a row depends on that row's logits, its request's parameters, token ids and seed: never
on the other rows, on its place among them or on what was sampled before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from .draw import NO_TOKEN, DrawSettings, argmax, draw
from .errors import SamplingFailed
from .generation_defaults import GenerationRules
from .input_checks import BadWordEncoder
from .logits_processing import RequestAdjustments, adjust_logits
from .logprobs import gather_logprobs
from .noise import uniform
from .outputs import SampledToken, ScheduledRequest, TokenLogprobs
from .request import Request

_CHOICE = 0  # `n` is 1: every request has one continuation


class TokenChooser(Protocol):
    """Chooses by temperature, filters and seed, or the most likely token for greedy requests.

    `choose_by_torch`, `NativeSampling` on a CPU, `choose_on_device` on a GPU.
    """

    def __call__(
        self, logits: Tensor, requests: Sequence[Request], settings: Tensor | None
    ) -> Tensor:
        """Token ids [N] (int64), `NO_TOKEN` for an unusable row, as chosen from float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """The tokens of a step, not yet read."""

    token_ids: Tensor  # [N] int64, where the logits were; `NO_TOKEN` for an unusable row
    requests: Sequence[Request]
    by_host: bool = False  # penalties, bans or logprobs: the host took part, and waited
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)  # by row

    def report(self, token_ids: Sequence[int]) -> tuple[SampledToken, ...]:
        """`token_ids` [N]: what the host read of them."""
        return tuple(
            SampledToken(token_id, self.logprobs.get(index))
            if token_id != NO_TOKEN
            else SampledToken(NO_TOKEN, error=SamplingFailed(request.request_id))
            for index, (token_id, request) in enumerate(zip(token_ids, self.requests, strict=True))
        )


class Sampler:
    """Greedy and random sampling with vLLM's parameters, in vLLM's order.

    `rules` are what the model's generation config imposes on every request; `encode_bad_words`
    turns the strings of `bad_words` into token sequences (`Tokenizer.bad_word_ids`); `choose` has
    the last word.
    """

    def __init__(
        self,
        *,
        rules: GenerationRules,
        encode_bad_words: BadWordEncoder,
        choose: TokenChooser | None = None,
    ) -> None:
        self._rules = rules
        self._encode_bad_words = encode_bad_words
        self._choose = choose or choose_by_torch
        self._requests: dict[str, RequestAdjustments] = {}

    def __call__(
        self,
        logits: Tensor,
        scheduled: Sequence[ScheduledRequest],
        *,
        settings: Tensor | None = None,
    ) -> tuple[SampledToken, ...]:
        """One token for each row of `logits` [N, V] (read only; meant as float32).

        `settings` are those of the rows for a chooser on the device, if they are there already.
        A row without a finite maximum (NaN, infinite or all masked) yields a `SampledToken` whose
        `error` is set; the other rows are not affected.
        """
        drawn = self.draw(logits, scheduled, settings=settings)
        return drawn.report(drawn.token_ids.tolist())

    def draw(
        self,
        logits: Tensor,
        scheduled: Sequence[ScheduledRequest],
        *,
        settings: Tensor | None = None,
    ) -> Drawn:
        """The same, with the tokens left where the logits are; waits for nothing on a GPU unless
        the host takes part."""
        rows = [self._adjustments(item.request) for item in scheduled]
        requests = [row.request for row in rows]
        if all(row.is_plain for row in rows):
            return Drawn(self._choose(logits, requests, settings), requests)
        logits = logits.float()
        token_ids = self._choose(adjust_logits(logits, rows), requests, settings)
        return Drawn(token_ids, requests, True, _logprobs(logits, token_ids, rows))

    def __len__(self) -> int:
        """How many requests are remembered."""
        return len(self._requests)

    def forget(self, request_id: str) -> None:
        """Drop what is remembered of a finished request; unknown ids are fine."""
        self._requests.pop(request_id, None)

    def _adjustments(self, request: Request) -> RequestAdjustments:
        known = self._requests.get(request.request_id)
        if known is None or known.request is not request:
            bad_words = tuple(request.params.bad_words)
            bad_word_ids = self._encode_bad_words(bad_words) if bad_words else ()
            known = RequestAdjustments(request, self._rules, bad_word_ids)
            self._requests[request.request_id] = known
        return known


def choose_by_torch(
    logits: Tensor, requests: Sequence[Request], settings: Tensor | None = None
) -> Tensor:
    """Token ids [N] (int64), on any device; `settings` are taken from the requests."""
    logits = logits.float()
    drawn = [index for index, request in enumerate(requests) if not request.params.is_greedy]
    if not drawn:
        return argmax(logits)
    chosen = [requests[index] for index in drawn]
    uniforms = uniform(
        [request.seed for request in chosen],
        [request.next_output_index for request in chosen],
        [_CHOICE] * len(chosen),
    )
    filters = [
        DrawSettings(params.temperature, params.min_p, params.top_k, params.top_p)
        for params in (request.params for request in chosen)
    ]
    if len(drawn) == len(requests):
        return draw(logits, filters, uniforms)
    where = torch.tensor(drawn, device=logits.device)
    return argmax(logits).index_copy_(0, where, draw(logits[where], filters, uniforms))


def _logprobs(
    logits: Tensor, token_ids: Tensor, rows: Sequence[RequestAdjustments]
) -> dict[int, TokenLogprobs]:
    """By row, for those that ask; a failed row gets the numbers of token 0, which nobody reads."""
    counts = {
        index: count
        for index, row in enumerate(rows)
        if (count := row.request.params.logprobs) is not None
    }
    if not counts:
        return {}
    where = torch.tensor(list(counts), device=logits.device)
    found = gather_logprobs(logits[where], token_ids[where].clamp(min=0), tuple(counts.values()))
    return dict(zip(counts, found, strict=True))

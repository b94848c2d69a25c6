"""Everything that changes logits before temperature: masks, biases and penalties.

What is remembered of a request derives from its parameters and token ids only, so preemption,
restart and resume change nothing. In a step, numpy builds (row, token) index arrays over the whole
batch, and each kind of change is one gather and one scatter, however many requests ask for it.

Order: allowed tokens, bias, repetition penalty (over prompt and output, as in transformers),
frequency and presence penalty (over the output only, OpenAI's formula), then all that is banned.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from .generation_defaults import GenerationRules
from .request import Request
from .token_counts import IdArray, TokenCounts


class RequestAdjustments:
    """The changes that one request, or the model's generation config, asks for."""

    __slots__ = (
        "_begin_bans", "_is_plain", "_sequences", "_static_bans", "_stop_ids", "_token_bans",
        "allowed", "bias_ids", "biases", "counts", "request",
    )  # fmt: skip

    def __init__(
        self, request: Request, rules: GenerationRules, bad_word_ids: Iterable[Sequence[int]] = ()
    ) -> None:
        params = request.params
        sequences = [*rules.bad_word_ids, *bad_word_ids]
        self.request = request
        self.counts = TokenCounts() if params.has_penalties else None
        self.allowed = _ids(params.allowed_token_ids or ())
        self.bias_ids = _ids(params.logit_bias)
        self.biases = np.fromiter(params.logit_bias.values(), dtype=np.float32)
        self._static_bans = _ids(
            [*rules.suppress_token_ids, *(words[0] for words in sequences if len(words) == 1)]
        )
        self._sequences = _by_last_prefix_token(sequences)
        self._begin_bans = rules.begin_suppress_token_ids
        self._stop_ids = (*request.eos_token_ids, *params.stop_token_ids)
        self._is_plain = (
            params.logprobs is None
            and self.counts is None
            and not self._sequences
            and not any(map(len, (self.allowed, self.bias_ids, self._static_bans)))
        )

    @property
    def is_plain(self) -> bool:
        """Whether the next token depends on logits, temperature, filters and noise alone."""
        return self._is_plain and not self._passing_bans()

    def banned(self) -> IdArray:
        """Tokens that must not come next."""
        passing = [*self._passing_bans(), *self._completions()]
        return np.concatenate([self._static_bans, _ids(passing)]) if passing else self._static_bans

    def _passing_bans(self) -> Sequence[int]:
        """Those that end as the output grows."""
        index = self.request.next_output_index
        stops = self._stop_ids if index < self.request.params.min_tokens else ()
        return stops if index else (*self._begin_bans, *stops)

    def _completions(self) -> list[int]:
        """Last tokens of the bad words whose other tokens stand at the end, prompt included."""
        token_ids = self.request.token_ids
        candidates = self._sequences.get(token_ids[-1], ())
        return [last for prefix, last in candidates if token_ids[-len(prefix) :] == prefix]


def adjust_logits(logits: Tensor, rows: Sequence[RequestAdjustments]) -> Tensor:
    """The logits [N, V] (float32) that tokens are chosen from: a copy when anything changes."""
    allowed = {index: row.allowed for index, row in enumerate(rows) if len(row.allowed)}
    biased = {index: row for index, row in enumerate(rows) if len(row.bias_ids)}
    penalized = {index: row for index, row in enumerate(rows) if row.counts is not None}
    banned = {index: ids for index, row in enumerate(rows) if len(ids := row.banned())}
    if not (allowed or biased or penalized or banned):
        return logits
    logits = logits.clone()
    if allowed:
        where = _where(allowed, logits.device)
        kept = logits[where]
        logits[torch.tensor(list(allowed), device=logits.device)] = -math.inf
        logits[where] = kept
    if biased:
        _add_biases(logits, biased)
    if penalized:
        _penalize(logits, penalized)
    if banned:
        logits[_where(banned, logits.device)] = -math.inf
    return logits


def _add_biases(logits: Tensor, rows: Mapping[int, RequestAdjustments]) -> None:
    where = _where({index: row.bias_ids for index, row in rows.items()}, logits.device)
    biases = np.concatenate([row.biases for row in rows.values()])
    logits[where] += torch.from_numpy(biases).to(logits.device)


def _penalize(logits: Tensor, rows: Mapping[int, RequestAdjustments]) -> None:
    counted = {index: row.counts for index, row in rows.items() if row.counts is not None}
    for index, counts in counted.items():
        counts.update(rows[index].request)
    per_row = [
        (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        for params in (row.request.params for row in rows.values())
    ]
    sizes = [len(counts.ids) for counts in counted.values()]
    per_token = np.repeat(np.array(per_row, dtype=np.float32).T, sizes, axis=1)
    output_counts = np.concatenate([counts.output_counts for counts in counted.values()])
    packed = np.concatenate([per_token, output_counts[None].astype(np.float32)])
    repetition, frequency, presence, occurrences = torch.from_numpy(packed).to(logits.device)
    where = _where({index: counts.ids for index, counts in counted.items()}, logits.device)
    values = logits[where]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * occurrences
    values -= presence * (occurrences > 0)
    logits[where] = values


def _where(ids_by_row: Mapping[int, IdArray], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and token indices of every entry, in a single transfer."""
    rows = np.repeat(list(ids_by_row), [len(ids) for ids in ids_by_row.values()])
    row_ids, token_ids = torch.from_numpy(
        np.stack([rows, np.concatenate(list(ids_by_row.values()))])
    ).to(device)
    return row_ids, token_ids


def _by_last_prefix_token(
    sequences: Iterable[Sequence[int]],
) -> dict[int, list[tuple[list[int], int]]]:
    """Bad words of several tokens as (all but the last, last), by the token before the last."""
    found: dict[int, list[tuple[list[int], int]]] = {}
    for *prefix, last in sequences:
        if prefix:
            found.setdefault(prefix[-1], []).append((prefix, last))
    return found


def _ids(token_ids: Iterable[int]) -> IdArray:
    """Distinct, in order."""
    return np.fromiter(dict.fromkeys(token_ids), dtype=np.int64)

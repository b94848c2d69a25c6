"""How one request is sampled: vLLM's names and defaults, except `max_tokens`. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import InvalidRequest, UnsupportedParameter

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Validated on construction; raises `InvalidRequest` naming the field and its limit.

    `temperature` 0 means greedy. A `seed` of None lets the engine derive one from its own seed.
    `logprobs` is the number of alternatives reported beside the sampled token (0 to 20).
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: all tokens
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] = ()
    seed: int | None = None
    max_tokens: int = 256
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None

    def __post_init__(self) -> None:
        set_ = object.__setattr__  # frozen to callers; normalised once, here
        set_(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()))
        set_(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        set_(self, "bad_words", tuple(self.bad_words or ()))
        set_(self, "logit_bias", dict(self.logit_bias or {}))
        if self.allowed_token_ids is not None:
            set_(self, "allowed_token_ids", tuple(self.allowed_token_ids))
        if self.top_k == -1:
            set_(self, "top_k", 0)
        self._check_numbers()
        self._check_lists()

    def _check_numbers(self) -> None:
        if self.n != 1:
            raise UnsupportedParameter("n", "only 1 is supported; send one request per choice")
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _integer("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _integer("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**63 - 1)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        _strings("stop", self.stop, MAX_STOP_STRINGS)
        _strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        for token_id in self.stop_token_ids:
            _integer("stop_token_ids", token_id, 0, 2**31 - 1)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise InvalidRequest("allowed_token_ids", "must not be empty; leave it out instead")
            for token_id in self.allowed_token_ids:
                _integer("allowed_token_ids", token_id, 0, 2**31 - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequest("logit_bias", f"must have at most {MAX_LOGIT_BIAS} entries")
        for token_id, bias in self.logit_bias.items():
            _integer("logit_bias", token_id, 0, 2**31 - 1)
            _number("logit_bias", bias, -100.0, 100.0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        return penalties != (0.0, 0.0, 1.0)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is stored: always a tuple."""
        return tuple(self.stop)


def _number(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not ok or value > high or value < low or (open_low and value == low):
        bound = f"above {low:g}" if open_low else f"at least {low:g}"
        raise InvalidRequest(name, f"must be a finite number {bound} and at most {high:g}")


def _integer(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequest(name, f"must be a whole number between {low} and {high}")


def _strings(name: str, values: Sequence[str], most: int) -> None:
    if len(values) > most:
        raise InvalidRequest(name, f"must have at most {most} entries")
    for value in values:
        if not isinstance(value, str) or not 0 < len(value) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                name, f"each entry must be a text of 1 to {MAX_STOP_CHARS} characters"
            )

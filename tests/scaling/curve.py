"""The load that is replayed: when requests come, and how large they are. The same every time."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

#: (minutes, requests per second at their end): nothing, a rise, a burst, a fall, an hour of few but
#: large requests, a trickle, nothing.
CURVE = ((10, 0.0), (10, 8.0), (20, 8.0), (1, 18.0), (3, 18.0), (1, 8.0), (10, 8.0), (10, 0.4),
         (40, 0.4), (5, 0.05), (25, 0.05), (0, 0.0), (45, 0.0))  # fmt: skip
#: Between these seconds each request is a document and its summary.
LARGE_S = (65 * 60, 105 * 60)
LARGE_PROMPT_TOKENS = 10_000
MEAN_PROMPT_TOKENS = 400
MEDIAN_ANSWER_TOKENS = 220
#: What clients ask for as `max_tokens`: the smallest of these that the answer fits into.
LIMITS = (256, 512, 1024, 2048, 65_536)
#: One request with a very long answer, alone at the end of the day.
LONG_ANSWER_AT_S = 135.5 * 60
LONG_ANSWER_TOKENS = 48_000


@dataclass(slots=True)
class Request:
    """`answer_tokens` is known to nobody before it ends; `limit_tokens` is its `max_tokens`."""

    arrives_s: float
    prompt_tokens: int
    answer_tokens: int
    limit_tokens: int
    done_tokens: float = 0.0  # of prompt and answer
    first_token_s: float | None = None
    ended_s: float | None = None
    handovers: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @property
    def promised_tokens(self) -> float:
        """What is left at most, which is what the queue knows."""
        return self.prompt_tokens + self.limit_tokens - self.done_tokens


def rate_at(second: float) -> float:
    """Requests per second, linear between the points of the curve."""
    began_s, before = 0.0, 0.0
    for minutes, rate in CURVE:
        ended_s = began_s + minutes * 60
        if second < ended_s:
            return before + (rate - before) * (second - began_s) / (ended_s - began_s)
        began_s, before = ended_s, rate
    return 0.0


def duration_s() -> float:
    return sum(minutes for minutes, _ in CURVE) * 60


def arrivals(seed: int = 1, scale: float = 1.0) -> list[Request]:
    """A Poisson process along the curve, with answers of log-normal length."""
    draw = random.Random(seed)
    requests = []
    for second in range(int(duration_s())):
        requests += [_request(draw, second) for _ in range(_poisson(draw, rate_at(second) * scale))]
    requests.append(Request(LONG_ANSWER_AT_S, MEAN_PROMPT_TOKENS, LONG_ANSWER_TOKENS, LIMITS[-1]))
    return sorted(requests, key=lambda request: request.arrives_s)


def _request(draw: random.Random, second: float) -> Request:
    is_large = LARGE_S[0] <= second < LARGE_S[1]
    mean = LARGE_PROMPT_TOKENS if is_large else MEAN_PROMPT_TOKENS
    prompt = max(int(draw.expovariate(1 / mean)), 8)
    answer = min(max(int(MEDIAN_ANSWER_TOKENS * draw.lognormvariate(0, 0.8)), 1), 2048)
    limit = next(limit for limit in LIMITS if answer <= limit)
    return Request(second + draw.random(), prompt, answer, limit)


def _poisson(draw: random.Random, mean: float) -> int:
    """Knuth's method."""
    number, product, bound = 0, draw.random(), math.exp(-mean)
    while product > bound:
        number += 1
        product *= draw.random()
    return number

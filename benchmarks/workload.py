"""Deterministic workloads: prompts of random token ids, greedy decoding to a fixed length.

Standard library only, because the peers' own interpreters import it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

#: Below 100 lie the special tokens of most vocabularies; 49,000 fits the 49,152 of SmolLM2.
LOWEST_TOKEN_ID = 100
VOCABULARY = 49_000


@dataclass(frozen=True, slots=True)
class Request:
    """`max_tokens` are always produced: the end-of-sequence token is ignored."""

    prompt_token_ids: list[int]
    max_tokens: int


def make(
    num_requests: int,
    *,
    prompt_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    seed: int = 0,
) -> list[Request]:
    """Requests whose lengths are drawn evenly from two inclusive ranges, in tokens.

    The order of the draws is part of the definition: figures of different days are of the same
    prompts only while it stays as it is.
    """
    draw = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        length = draw.randint(*prompt_tokens)
        prompt = [draw.randrange(LOWEST_TOKEN_ID, VOCABULARY) for _ in range(length)]
        requests.append(Request(prompt, draw.randint(*output_tokens)))
    return requests


def mixed(num_requests: int = 64) -> list[Request]:
    """`mixed64`: 10,010 prompt tokens and 5,105 output tokens at 64 requests."""
    return make(num_requests, prompt_tokens=(32, 256), output_tokens=(32, 128))


def uniform(num_requests: int, prompt_tokens: int, output_tokens: int) -> list[Request]:
    """Requests of one length each, to tell prefill from decode."""
    return make(
        num_requests,
        prompt_tokens=(prompt_tokens, prompt_tokens),
        output_tokens=(output_tokens, output_tokens),
    )


def with_shared_prefix(
    num_requests: int,
    *,
    shared_tokens: int,
    own_tokens: tuple[int, int],
    output_tokens: tuple[int, int],
    seed: int = 0,
) -> list[Request]:
    """Requests that begin alike, as under one system prompt."""
    draw = random.Random(f"shared prefix {seed}")
    shared = [draw.randrange(LOWEST_TOKEN_ID, VOCABULARY) for _ in range(shared_tokens)]
    own = make(num_requests, prompt_tokens=own_tokens, output_tokens=output_tokens, seed=seed)
    return [Request(shared + each.prompt_token_ids, each.max_tokens) for each in own]


def renamed(requests: Sequence[Request], run: int) -> list[Request]:
    """The same lengths over other token ids in every run, so that no prefix cache knows them."""
    span = VOCABULARY - LOWEST_TOKEN_ID
    offset = run * 7_919 % span

    def rename(token_id: int) -> int:
        return LOWEST_TOKEN_ID + (token_id - LOWEST_TOKEN_ID + offset) % span

    return [Request([*map(rename, each.prompt_token_ids)], each.max_tokens) for each in requests]


def total_prompt_tokens(requests: Sequence[Request]) -> int:
    return sum(len(request.prompt_token_ids) for request in requests)


def total_output_tokens(requests: Sequence[Request]) -> int:
    return sum(request.max_tokens for request in requests)

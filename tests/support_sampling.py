"""Builders for the sampler's tests: requests with outputs, and one call over a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenmill_engine.generation_defaults import GenerationRules
from tokenmill_engine.outputs import SampledToken, ScheduledRequest
from tokenmill_engine.request import Request
from tokenmill_engine.sampler import Sampler
from tokenmill_engine.sampling_params import SamplingParams

EOS = 2
NO_RULES = GenerationRules()


def make_request(
    request_id: str = "r0",
    prompt: Sequence[int] = (3, 4, 5),
    output: Sequence[int] = (),
    *,
    seed: int = 0,
    **params: Any,
) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(**params),
        output_token_ids=output,
        eos_token_ids=frozenset({EOS}),
        seed=seed,
    )


def make_sampler(
    rules: GenerationRules = NO_RULES, bad_words: Sequence[Sequence[int]] = ()
) -> Sampler:
    """`bad_words` are the token sequences that any `bad_words` text of a request stands for."""
    return Sampler(rules=rules, encode_bad_words=lambda words: bad_words)


def schedule(*requests: Request) -> tuple[ScheduledRequest, ...]:
    return tuple(ScheduledRequest(request, request.num_tokens - 1, 1) for request in requests)


def sample(sampler: Sampler, logits: torch.Tensor, *requests: Request) -> tuple[SampledToken, ...]:
    return sampler(logits, schedule(*requests))


def token_ids(sampled: Sequence[SampledToken]) -> list[int]:
    return [item.token_id for item in sampled]


def random_logits(rows: int, vocab: int, *, seed: int, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, vocab, generator=generator) * scale

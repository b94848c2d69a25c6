"""A numeric test on the real weights at start-up: ragged, chunked and paged against plain forwards.

It catches what no flag of a model tells: recurrent layers, positions counted from a cache object,
state that survives between calls. Its prompts are shorter than any real window; windows rest on the
probe.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .attention import IMPLEMENTATION
from .errors import UnsupportedModel
from .model_runner import ModelRunner
from .outputs import ScheduledRequest, SchedulerOutput
from .probe import switch_attention
from .request import Request
from .sampling_params import SamplingParams

PROMPT_TOKENS = (23, 9, 14)
ROWS_PER_STEP = 16
BLOCK_SIZE = 4
NUM_BLOCKS = len(PROMPT_TOKENS) * -(-(max(PROMPT_TOKENS) + 2) // BLOCK_SIZE)

#: Root mean square of the logit differences as a share of the logits' standard deviation; with an
#: architecture that does not fit it is about 1. In float32, 0.005 means that the largest difference
#: of a row is about 2 % of the spread. SmolLM2 in bfloat16 shows 0.03 (at worst 0.05 in 30 rows)
#: while single logits out of its 49,152 are off by up to 0.4: hence no tolerance for the largest.
TOLERANCES = {torch.float32: 0.005, torch.bfloat16: 0.15, torch.float16: 0.03}


@torch.inference_mode()
def self_test(runner: ModelRunner, *, longest: int, max_step_tokens: int) -> None:
    """Compare the prompt's last row and one decode of three prompts; `longest` bounds them.

    `runner` needs a KV cache of its own with `NUM_BLOCKS` blocks of `BLOCK_SIZE`.
    Raises `UnsupportedModel` where batched and single results differ by more than rounding.
    """
    requests = _requests(runner, longest)
    batched: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    for output in _steps(requests, min(ROWS_PER_STEP, max_step_tokens)):
        sampling = output.sampling
        for item, logits in zip(sampling, runner.compute_logits(output), strict=True):
            batched[item.request.request_id].append(logits)
            item.request.token_ids.append(int(logits.argmax()))
    switch_attention(runner.model, "eager")
    try:
        for request in requests:
            expected = _plain_logits(runner, request.token_ids[:-1])
            _compare(runner, batched[request.request_id], expected)
    finally:
        switch_attention(runner.model, IMPLEMENTATION)


def _requests(runner: ModelRunner, longest: int) -> list[Request]:
    rng = random.Random(1)
    embeddings: Any = runner.model.get_input_embeddings()
    vocab_size = len(embeddings.weight)
    requests = []
    for number, length in enumerate(PROMPT_TOKENS):
        prompt = [rng.randrange(vocab_size) for _ in range(max(1, min(length, longest - 2)))]
        request = Request(f"self-test-{number}", prompt, SamplingParams(max_tokens=2))
        num_blocks = -(-(len(prompt) + 2) // BLOCK_SIZE)
        # Interleaved and backwards, so that a wrong block table cannot go unnoticed.
        request.block_ids = [
            NUM_BLOCKS - 1 - number - len(PROMPT_TOKENS) * block for block in range(num_blocks)
        ]
        requests.append(request)
    return requests


def _steps(requests: Sequence[Request], max_rows: int) -> Iterator[SchedulerOutput]:
    """Up to nine rows of each request, until each has been sampled twice."""
    while True:
        scheduled: list[ScheduledRequest] = []
        room = max_rows
        for request in requests:
            left = request.num_tokens - request.num_computed_tokens
            if request.num_output_tokens == 2 or not room:
                continue
            count = min(left, 9, room)
            scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count))
            request.num_computed_tokens += count
            room -= count
        if not scheduled:
            return
        yield SchedulerOutput(tuple(scheduled), max_rows - room)


def _plain_logits(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """Of the last two rows, `[2, vocab]` float32, by the model's own eager attention."""
    ids = torch.tensor([token_ids], device=runner.device)
    positions = torch.arange(len(token_ids), device=runner.device)[None]
    result = runner.model(input_ids=ids, position_ids=positions, use_cache=False)
    logits: torch.Tensor = result.logits[0, -2:].float()
    return logits


def _compare(runner: ModelRunner, batched: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[runner.model.dtype]
    for got, want in zip(batched, expected, strict=True):
        difference, spread = float((got - want).square().mean().sqrt()), float(want.std())
        if not difference <= tolerance * spread:  # NaN fails as well
            raise UnsupportedModel(
                f"{type(runner.model).__name__} gives other results in a batch than alone: "
                f"logits differ by {difference:.3g} where their spread is {spread:.3g}"
            )

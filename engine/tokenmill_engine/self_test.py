"""A numeric test on the real weights at start-up: ragged, chunked and paged against plain forwards.

What is expected is computed first, by the model as transformers made it; what is tested has our
attention, fused modules and packed weights. It catches what no flag of a model tells: recurrent
layers, positions counted from a cache object, state that survives between calls. Its prompts are
shorter than any real window; windows rest on the probe.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

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


@dataclass(frozen=True, slots=True, eq=False)
class PlainResult:
    """A prompt and one more token, and the logits `[2, vocab]` of its last two rows, float32."""

    token_ids: list[int]
    logits: torch.Tensor


@torch.inference_mode()
def plain_results(model: PreTrainedModel, *, longest: int) -> list[PlainResult]:
    """Of three random prompts of at most `longest` tokens, each alone, by the model's own modules.

    Leaves the model under its own eager attention.
    """
    switch_attention(model, "eager")
    rng = random.Random(1)
    embeddings: Any = model.get_input_embeddings()
    vocab_size = len(embeddings.weight)
    results = []
    for length in PROMPT_TOKENS:
        count = max(1, min(length, longest - 2)) + 1
        token_ids = [rng.randrange(vocab_size) for _ in range(count)]
        ids = torch.tensor([token_ids], device=model.device)
        positions = torch.arange(count, device=model.device)[None]
        output = model(input_ids=ids, position_ids=positions, use_cache=False)
        results.append(PlainResult(token_ids, output.logits[0, -2:].float()))
    return results


@torch.inference_mode()
def self_test(
    runner: ModelRunner, expected: Sequence[PlainResult], *, max_step_tokens: int
) -> None:
    """Compare the last row of each prompt, and the decode of one more token, in mixed batches.

    `runner` needs a KV cache of its own with `NUM_BLOCKS` blocks of `BLOCK_SIZE`.
    Raises `UnsupportedModel` where batched and single results differ by more than rounding.
    """
    requests = [_request(number, plain) for number, plain in enumerate(expected)]
    last = {
        request.request_id: plain.token_ids[-1]
        for request, plain in zip(requests, expected, strict=True)
    }
    batched: dict[str, list[torch.Tensor]] = {request.request_id: [] for request in requests}
    for output in _steps(requests, min(ROWS_PER_STEP, max_step_tokens)):
        sampling = output.sampling
        for item, logits in zip(sampling, runner.compute_logits(output).float(), strict=True):
            batched[item.request.request_id].append(logits)
            # Whatever is the likeliest: the expected logits are those after this token.
            item.request.token_ids.append(last[item.request.request_id])
    for request, plain in zip(requests, expected, strict=True):
        _compare(runner, batched[request.request_id], plain.logits)


def _request(number: int, plain: PlainResult) -> Request:
    prompt = plain.token_ids[:-1]
    request = Request(f"self-test-{number}", prompt, SamplingParams(max_tokens=2))
    num_blocks = -(-(len(prompt) + 2) // BLOCK_SIZE)
    # Interleaved and backwards, so that a wrong block table cannot go unnoticed.
    request.block_ids = [
        NUM_BLOCKS - 1 - number - len(PROMPT_TOKENS) * block for block in range(num_blocks)
    ]
    return request


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


def _compare(runner: ModelRunner, batched: Sequence[torch.Tensor], expected: torch.Tensor) -> None:
    tolerance = TOLERANCES[runner.model.dtype]
    for got, want in zip(batched, expected, strict=True):
        difference, spread = float((got - want).square().mean().sqrt()), float(want.std())
        if not difference <= tolerance * spread:  # NaN fails as well
            raise UnsupportedModel(
                f"{type(runner.model).__name__} gives other results in a batch than alone: "
                f"logits differ by {difference:.3g} where their spread is {spread:.3g}"
            )

"""Log-probabilities of sampled tokens and their most likely alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .outputs import TokenLogprobs

_LOW_BITS = 32


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """What `TokenLogprobs` reports for R rows of raw float32 `logits` [R, V].

    `token_ids` [R] are the sampled tokens, `counts[i]` the number of alternatives of row i. The
    sampled token comes first and comes again among the alternatives when it is one of them, as in
    vLLM. Among equal logits the lower id ranks first, whatever the batch.
    """
    logprobs = logits.log_softmax(-1)
    keys = _ordering(logits)
    sampled = token_ids[:, None]
    ranks = (keys > keys.gather(-1, sampled)).sum(-1, keepdim=True) + 1
    vocab = logits.shape[-1]
    top = keys.topk(min(max(counts), vocab), dim=-1).values
    top_ids = vocab - 1 - (top & (2**_LOW_BITS - 1))
    ids = torch.cat([sampled, top_ids], dim=-1)
    values = logprobs.gather(-1, ids).tolist()
    return [
        TokenLogprobs(
            token_ids=tuple(row_ids[: count + 1]),
            logprobs=tuple(row_values[: count + 1]),
            ranks=(rank, *range(1, min(count, vocab) + 1)),
        )
        for row_ids, row_values, (rank,), count in zip(
            ids.tolist(), values, ranks.tolist(), counts, strict=True
        )
    ]


def _ordering(logits: Tensor) -> Tensor:
    """Distinct int64 keys [R, V] that order tokens by logit, then by falling id.

    The bits of a positive float rise with its value; those of a negative one fall, so all but the
    sign are flipped.
    """
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ids = torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)
    return (bits << _LOW_BITS) | ids

"""Log-probabilities of sampled tokens and their most likely alternatives."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .draw import top_values
from .outputs import TokenLogprobs


def gather_logprobs(
    logits: Tensor, token_ids: Tensor, counts: Sequence[int]
) -> list[TokenLogprobs]:
    """What `TokenLogprobs` reports for R rows of raw float32 `logits` [R, V].

    `token_ids` [R] are the sampled tokens, `counts[i]` the number of alternatives of row i. The
    sampled token comes first, and once more among the alternatives when it is one of them, as in
    vLLM. Among equal logits the lower id ranks first, whatever the batch.
    """
    if logits.amax().isnan():  # ranks below everything else
        logits = logits.masked_fill(logits.isnan(), -math.inf)
    sampled = token_ids[:, None]
    most = min(max(counts), logits.shape[-1])
    ids = torch.cat([sampled, _most_likely(logits, most)], dim=-1)
    values = logits.log_softmax(-1).gather(-1, ids).tolist()
    ranks = _ranks(logits, sampled).tolist()
    return [
        TokenLogprobs(
            token_ids=tuple(row_ids[: count + 1]),
            logprobs=tuple(row_values[: count + 1]),
            ranks=(rank, *range(1, min(count, most) + 1)),
        )
        for row_ids, row_values, rank, count in zip(
            ids.tolist(), values, ranks, counts, strict=True
        )
    ]


def _ranks(logits: Tensor, sampled: Tensor) -> Tensor:
    """Ranks [R] of the sampled tokens [R, 1], from 1."""
    chosen = logits.gather(-1, sampled)
    found = torch.empty_like(logits)  # comparing into floats is much faster than into booleans
    likelier = torch.gt(logits, chosen, out=found).sum(-1)
    before = torch.arange(logits.shape[-1], device=logits.device) < sampled
    tied = torch.eq(logits, chosen, out=found).mul_(before).sum(-1)
    return (likelier + tied).long() + 1


def _most_likely(logits: Tensor, count: int) -> Tensor:
    """The ids [R, count] of the largest logits, in order; the lower id first among ties.

    Selecting by value and breaking ties afterwards is exact; which of the tied tokens a top-k
    returns may depend on k, and k on the batch.
    """
    if count == 0:
        return torch.empty(len(logits), 0, dtype=torch.int64, device=logits.device)
    lowest = top_values(logits, count)[:, -1:]
    selected = torch.ge(logits, lowest, out=torch.empty_like(logits))
    candidates = selected.nonzero(as_tuple=True)
    rows, ids = (index.cpu().numpy() for index in candidates)
    order = np.lexsort((ids, -logits[candidates].cpu().numpy(), rows))
    firsts: npt.NDArray[np.int64] = np.searchsorted(rows, np.arange(len(logits)))
    best = ids[order[firsts[:, None] + np.arange(count)]]
    return torch.from_numpy(best).to(logits.device)

"""Drawing one token per row: temperature, min-p, top-k, top-p, then inversion of the distribution.

Two choices make the drawn token a function of its own row, bit for bit, whatever the batch:

* Probabilities become integers (`exp(z) * 2**40`, rounded down). Integer sums do not depend on the
  order of addition, floating-point sums do, and the order depends on the shape of the batch.
* Every filter is a lower bound on the scaled logit. Tokens tied with the last one that a filter
  keeps are kept too, so no sort has to break a tie; logits computed in 16 bits are full of ties.

The filters apply in vLLM's order: min-p, then top-k, then top-p among what is left.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_TOKEN = -1  # the row's logits are NaN, infinite or all masked
_SCALE = 2.0**40  # leaves 2**22 vocabulary entries of head room in 63 bits


@dataclass(frozen=True, slots=True)
class DrawParams:
    """The sampling parameters of R rows, each of shape [R] and float64, on the logits' device."""

    temperature: Tensor
    log_min_p: Tensor  # -inf: off
    top_k: Tensor  # 0: off
    top_p: Tensor  # 1: off
    uniform: Tensor  # in (0, 1)
    has_min_p: bool
    has_top_k: bool
    has_top_p: bool

    @classmethod
    def build(
        cls,
        rows: Sequence[tuple[float, float, int, float]],
        uniforms: npt.NDArray[np.float64],
        device: torch.device,
    ) -> DrawParams:
        """From one (temperature, min_p, top_k, top_p) for each row, in a single transfer."""
        table = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        logs = [math.log(value) if value > 0 else -math.inf for value in table[1]]
        packed = torch.from_numpy(np.stack([table[0], logs, table[2], table[3], uniforms]))
        temperature, log_min_p, top_k, top_p, uniform = packed.to(device)
        return cls(
            temperature=temperature,
            log_min_p=log_min_p,
            top_k=top_k,
            top_p=top_p,
            uniform=uniform,
            has_min_p=bool((table[1] > 0).any()),
            has_top_k=bool((table[2] > 0).any()),
            has_top_p=bool((table[3] < 1).any()),
        )


def draw(logits: Tensor, params: DrawParams) -> Tensor:
    """Token ids [R] (int64) drawn from float32 `logits` [R, V]; `NO_TOKEN` for an unusable row."""
    peak = logits.amax(-1, keepdim=True)
    # The peak goes first: a tiny temperature then overflows to -inf, never to inf - inf.
    temperature = params.temperature.float().clamp_(min=1e-30)
    scaled = (logits - peak).div_(temperature[:, None])
    weights = _weigh(scaled)
    if params.has_min_p:
        _drop_below(params.log_min_p, scaled, weights)
    if params.has_top_k or params.has_top_p:
        _keep_top(scaled, weights, params)
    token_ids = _invert(weights, params.uniform)
    return torch.where(torch.isfinite(peak[:, 0]), token_ids, NO_TOKEN)


def argmax(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id among ties; `NO_TOKEN` as in `draw`."""
    if logits.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's here
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))
    else:
        token_ids = logits.argmax(-1)
    peak = logits.gather(-1, token_ids[:, None])[:, 0]
    return torch.where(torch.isfinite(peak), token_ids, NO_TOKEN)


def _weigh(scaled: Tensor) -> Tensor:
    return scaled.exp().mul_(_SCALE).to(torch.int64)


def _drop_below(floor: Tensor, scaled: Tensor, weights: Tensor) -> None:
    weights.masked_fill_(scaled < floor[:, None].to(scaled.dtype), 0)


def _keep_top(scaled: Tensor, weights: Tensor, params: DrawParams) -> None:
    """Zero the weights outside top-k and top-p; `weights` already lack what min-p removed."""
    vocab = scaled.shape[-1]
    top_k = torch.where(params.top_k > 0, params.top_k, vocab).clamp_(max=vocab).long()
    needed = torch.where(params.top_k > 0, top_k, 1)
    if params.has_top_p:
        nucleus = _nucleus_bound(weights, params.top_p)
        needed = torch.where(params.top_p < 1, torch.minimum(nucleus, top_k), needed)
    values = _top_values(scaled, int(needed.max()))
    floor = torch.full_like(params.top_p, -math.inf, dtype=scaled.dtype)
    if params.has_top_k:
        kth = values.gather(-1, (top_k - 1).clamp_(max=values.shape[-1] - 1)[:, None])[:, 0]
        floor = torch.where(params.top_k > 0, kth, floor)
    if params.has_top_p:
        _drop_below(floor, scaled, weights)
        floor = torch.maximum(floor, _nucleus_floor(values, weights, params, floor))
    _drop_below(floor, scaled, weights)


def _nucleus_bound(weights: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens the nucleus has at most, [R].

    Tokens of at most (1 - p) / V of the mass hold at most 1 - p of it together, so the nucleus ends
    before them. On the peaked distributions of a language model this is a small part of V.
    """
    share = (1 - top_p) * weights.sum(-1) / weights.shape[-1]
    return ((weights > share[:, None]).sum(-1) + 1).clamp_(max=weights.shape[-1])


def _nucleus_floor(values: Tensor, weights: Tensor, params: DrawParams, floor: Tensor) -> Tensor:
    """The scaled logit of the token that crosses top_p of the remaining mass, [R].

    `values` are the largest scaled logits, descending; `weights` hold the mass left by min-p and
    top-k. With ties at the k-th value the mass may be crossed only beyond `values`: then the last
    value stands, and all those tied with it stay.
    """
    lowest = torch.maximum(floor, params.log_min_p.to(values.dtype))
    mass = _weigh(values).masked_fill_(values < lowest[:, None], 0).cumsum(-1)
    target = (params.top_p * weights.sum(-1)).ceil_().long().clamp_(min=1)
    crossing = torch.searchsorted(mass, target[:, None]).clamp_(max=values.shape[-1] - 1)
    crossed = values.gather(-1, crossing)[:, 0]
    return torch.where(params.top_p < 1, crossed, -math.inf)


def _top_values(scaled: Tensor, count: int) -> Tensor:
    """The `count` largest entries of each row, descending."""
    if scaled.device.type != "cpu":
        return torch.topk(scaled, count, dim=-1).values
    # numpy's partition and sort use vector instructions: 7 and 19 times as fast as torch's here.
    table, vocab = scaled.numpy(), scaled.shape[-1]
    largest = table if count == vocab else np.partition(table, vocab - count)[:, vocab - count :]
    return torch.from_numpy(np.sort(largest)[:, ::-1].copy())


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose cumulative weight exceeds uniform × total."""
    cumulative = weights.cumsum_(-1)
    total = cumulative[:, -1]
    target = torch.minimum((uniform * total).long(), total - 1)  # the product may round up to total
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return token_ids.clamp_(max=weights.shape[-1] - 1)

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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NO_TOKEN = -1  # the row's logits are NaN, infinite or all masked
_CPU_ROWS = 8
_SCALE = 2.0**40  # leaves 2**22 vocabulary entries of head room in 63 bits


class DrawSettings(NamedTuple):
    """How one row is drawn; the defaults filter nothing."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


def draw(
    logits: Tensor, settings: Sequence[DrawSettings], uniforms: npt.NDArray[np.float64]
) -> Tensor:
    """Token ids [R] (int64) drawn from float32 `logits` [R, V]; `NO_TOKEN` for an unusable row.

    `uniforms` [R] are float64 in the open interval (0, 1).
    """
    # On a CPU a few rows at a time stay in its cache.
    size = _CPU_ROWS if logits.device.type == "cpu" else len(settings)
    drawn = []
    for start in range(0, len(settings), size):
        rows = slice(start, start + size)
        columns = _Columns.build(settings[rows], uniforms[rows], logits.device)
        drawn.append(_draw(logits[rows], columns))
    return torch.cat(drawn)


def argmax(logits: Tensor) -> Tensor:
    """The most likely token of each row, the lowest id among ties; `NO_TOKEN` as in `draw`."""
    if logits.device.type == "cpu":  # numpy's argmax is ten times as fast as torch's here
        token_ids = torch.from_numpy(logits.numpy().argmax(-1))
    else:
        token_ids = logits.argmax(-1)
    peak = logits.gather(-1, token_ids[:, None])[:, 0]
    return torch.where(torch.isfinite(peak), token_ids, NO_TOKEN)


def top_values(values: Tensor, count: int) -> Tensor:
    """The `count` largest entries of each row, descending."""
    if values.device.type != "cpu":
        return torch.topk(values, count, dim=-1).values
    # numpy's partition and sort use vector instructions: 7 and 19 times as fast as torch's here.
    table, vocab = values.numpy(), values.shape[-1]
    largest = table if count == vocab else np.partition(table, vocab - count)[:, vocab - count :]
    return torch.from_numpy(np.sort(largest)[:, ::-1].copy())


@dataclass(frozen=True, slots=True)
class _Columns:
    """The settings of R rows as float64 tensors [R] on the logits' device."""

    temperature: Tensor
    log_min_p: Tensor  # -inf: off
    top_k: Tensor  # 0: off
    top_p: Tensor  # 1: off
    uniform: Tensor
    has_min_p: bool
    has_top_k: bool
    has_top_p: bool

    @classmethod
    def build(
        cls,
        settings: Sequence[DrawSettings],
        uniforms: npt.NDArray[np.float64],
        device: torch.device,
    ) -> _Columns:
        table = [
            [row.temperature for row in settings],
            [math.log(row.min_p) if row.min_p else -math.inf for row in settings],
            [row.top_k for row in settings],
            [row.top_p for row in settings],
            uniforms,
        ]
        columns = torch.from_numpy(np.array(table, dtype=np.float64)).to(device)  # one transfer
        temperature, log_min_p, top_k, top_p, uniform = columns
        return cls(
            temperature=temperature,
            log_min_p=log_min_p,
            top_k=top_k,
            top_p=top_p,
            uniform=uniform,
            has_min_p=any(row.min_p for row in settings),
            has_top_k=any(row.top_k for row in settings),
            has_top_p=any(row.top_p < 1 for row in settings),
        )


def _draw(logits: Tensor, columns: _Columns) -> Tensor:
    peak = logits.amax(-1, keepdim=True)
    # The peak goes first: a tiny temperature then overflows to -inf, never to inf - inf.
    temperature = columns.temperature.float().clamp_(min=1e-30)
    scaled = (logits - peak).div_(temperature[:, None])
    shares = _shares(scaled)
    if columns.has_min_p:
        _keep_from(columns.log_min_p, scaled, shares)
    if columns.has_top_k or columns.has_top_p:
        _keep_top(scaled, shares, columns)
    token_ids = _invert(shares.to(torch.int64), columns.uniform)
    return torch.where(torch.isfinite(peak[:, 0]), token_ids, NO_TOKEN)


def _shares(scaled: Tensor) -> Tensor:
    """Unnormalised probabilities that become integers by dropping their fraction."""
    return scaled.exp().mul_(_SCALE)


def _keep_from(floor: Tensor, scaled: Tensor, shares: Tensor) -> None:
    """Zero the shares of tokens whose scaled logit is below `floor` [R]."""
    # Comparing into floats and multiplying takes a tenth of the time of masking by booleans.
    keep = torch.empty_like(shares)
    shares.mul_(torch.ge(scaled, floor[:, None].to(scaled.dtype), out=keep))


def _keep_top(scaled: Tensor, shares: Tensor, columns: _Columns) -> None:
    """Zero the shares outside top-k and top-p; `shares` already lack what min-p removed."""
    vocab = scaled.shape[-1]
    top_k = torch.where(columns.top_k > 0, columns.top_k, vocab).clamp_(max=vocab).long()
    needed = torch.where(columns.top_k > 0, top_k, 1)
    if columns.has_top_p:
        # Beside top-k the nucleus is a share of what the k tokens hold: then all k are needed.
        nucleus = _nucleus_bound(shares, columns.top_p)
        needed = torch.where((columns.top_p < 1) & (columns.top_k == 0), nucleus, needed)
    values = top_values(scaled, int(needed.max()))
    floor = columns.log_min_p.to(scaled.dtype)
    if columns.has_top_k:
        kth = values.gather(-1, (top_k - 1).clamp_(max=values.shape[-1] - 1)[:, None])[:, 0]
        floor = torch.where(columns.top_k > 0, torch.maximum(floor, kth), floor)
        _keep_from(floor, scaled, shares)
    if columns.has_top_p:
        total = shares.to(torch.int64).sum(-1)
        crossing = _nucleus_floor(values, total, columns.top_p, floor)
        _keep_from(torch.where(columns.top_p < 1, crossing, floor), scaled, shares)


def _nucleus_bound(shares: Tensor, top_p: Tensor) -> Tensor:
    """How many tokens the nucleus has at most, [R].

    Tokens of at most (1 - p) / V of the mass hold at most 1 - p of it together, so the nucleus ends
    before them. On the peaked distributions of a language model this is a small part of V.
    """
    vocab = shares.shape[-1]
    # A little less, so that rounding only ever lengthens the bound.
    negligible = (0.999 * (1 - top_p) / vocab * shares.to(torch.int64).sum(-1)).to(shares.dtype)
    count = torch.gt(shares, negligible[:, None], out=torch.empty_like(shares)).sum(-1)
    return (count.long() + 1).clamp_(min=1, max=vocab)


def _nucleus_floor(values: Tensor, total: Tensor, top_p: Tensor, floor: Tensor) -> Tensor:
    """The scaled logit of the token that crosses top_p of the remaining mass `total`, [R].

    `values` are the largest scaled logits, descending. With ties at the k-th of them the mass may
    be crossed only beyond `values`: then the last one stands, and all those tied with it stay.
    """
    shares = _shares(values)
    _keep_from(floor, values, shares)
    mass = shares.to(torch.int64).cumsum(-1)
    target = (top_p * total).ceil_().long().clamp_(min=1)
    crossing = torch.searchsorted(mass, target[:, None]).clamp_(max=values.shape[-1] - 1)
    return torch.maximum(values.gather(-1, crossing)[:, 0], floor)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in vocabulary order, whose cumulative weight exceeds uniform × total."""
    cumulative = weights.cumsum_(-1)
    total = cumulative[:, -1]
    target = torch.minimum((uniform * total).long(), total - 1)  # the product may round up to total
    token_ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return token_ids.clamp_(max=weights.shape[-1] - 1)

"""Drawing one token per row: temperature, min-p, top-k, top-p, then inversion of the distribution.

Two choices make the drawn token a function of its own row, bit for bit, whatever the batch:

* Probabilities become integers (`exp(z) * 2**40`, rounded down, see `shares`). Integer sums do not
  depend on the order of addition, floating-point sums do, and the order depends on the shape of the
  batch.
* Every filter is a lower bound on the scaled logit. Tokens tied with the last one that a filter
  keeps are kept too, so no sort has to break a tie; logits computed in 16 bits are full of ties.

The filters apply in vLLM's order: min-p, then top-k, then top-p among what is left.

Most of a vocabulary is out of the question before anything is known of it exactly: below min-p,
behind more than k others, or so unlikely that its integer is zero. Those tokens are dropped by a
comparison first, and what is expensive (`exp`, sorting) is done for the rest.

This is plain numpy and torch: the kernels that choose the very same tokens are tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .shares import LOWEST, FloatArray, IntArray, Shares

NO_TOKEN = -1  # the row's logits are NaN, infinite or all masked
_ROWS = 8  # so many stay in the cache of a CPU
_NUM_LANES = 768  # of which the largest entries are known
_NUCLEUS = 512  # tokens that a nucleus rarely exceeds
_FEW = 0.25  # share of the vocabulary up to which picking entries pays
_SAMPLE_STEP = 16  # every so many entries tell about how large that share is
_RUN = 256  # shares that are added up at once


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

    `uniforms` [R] are float64 in the open interval (0, 1). Works on the host; logits on another
    device are copied there.
    """
    drawn: list[int] = []
    draw_row = _RowDrawer(logits.shape[-1])
    for start in range(0, len(settings), _ROWS):
        block = slice(start, start + _ROWS)
        peak, scaled = _scaled(logits[block].cpu(), settings[block])
        for index, is_usable in enumerate(torch.isfinite(peak)[:, 0].tolist(), start):
            uniform = float(uniforms[index])
            row = scaled[index - start]
            drawn.append(draw_row(row, settings[index], uniform) if is_usable else NO_TOKEN)
    return torch.tensor(drawn, dtype=torch.int64, device=logits.device)


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


def _scaled(logits: Tensor, settings: Sequence[DrawSettings]) -> tuple[Tensor, FloatArray]:
    """The peaks [R, 1], and the logits by their temperatures with the peak at 0."""
    peak = logits.amax(-1, keepdim=True)
    temperature = torch.tensor([[row.temperature] for row in settings]).clamp_(min=1e-30)
    # The peak goes first: a tiny temperature then overflows to -inf, never to inf - inf.
    return peak, (logits - peak).div_(temperature).numpy()


class _RowDrawer:
    """Draws from one row after the other."""

    def __init__(self, vocab: int) -> None:
        self._shares_of = Shares(vocab)
        self._nucleus_shares_of = Shares(vocab)  # while the result of the other is in use

    def __call__(self, scaled: FloatArray, row: DrawSettings, uniform: float) -> int:
        """The token of one row [V] of scaled logits."""
        token_ids, kept = _keep_likely(scaled, row)
        shares = self._shares_of(kept)
        if row.top_p < 1:
            where = np.flatnonzero(kept >= self._nucleus_floor(kept, shares, row.top_p))
            token_ids = where if token_ids is None else token_ids[where]
            shares = shares[where]
        place = _invert(shares, uniform)
        return place if token_ids is None else int(token_ids[place])

    def _nucleus_floor(self, scaled: FloatArray, shares: IntArray, top_p: float) -> np.float32:
        """The scaled logit of the token that crosses `top_p` of the mass."""
        total = int(shares.sum())
        target = max(math.ceil(top_p * total), 1)
        likely = np.flatnonzero(scaled >= _bound_of_largest(scaled, _NUCLEUS))
        if shares[likely].sum() < target:
            # Tokens of at most (1 - p) / V of the mass hold at most 1 - p of it together, so the
            # nucleus ends before them. A little less, so that rounding only lengthens the bound.
            likely = np.flatnonzero(shares > 0.999 * (1 - top_p) / len(shares) * total)
        largest = np.sort(scaled[likely])[::-1].copy()
        mass = self._nucleus_shares_of(largest).cumsum()
        floor: np.float32 = largest[min(int(mass.searchsorted(target)), len(largest) - 1)]
        return floor


def _invert(shares: IntArray, uniform: float) -> int:
    """The first entry whose cumulative share exceeds uniform × total."""
    # Sums of runs first, then the sums within one run: a list of all sums takes twice as long.
    whole = len(shares) // _RUN * _RUN
    sums = shares[:whole].reshape(-1, _RUN).sum(1).cumsum()
    total = int(shares[whole:].sum()) + (int(sums[-1]) if whole else 0)
    target = min(int(uniform * total), total - 1)  # the product may round up to the total
    run = int(sums.searchsorted(target, side="right"))
    within = shares[run * _RUN : (run + 1) * _RUN].cumsum()
    before = int(sums[run - 1]) if run else 0
    return run * _RUN + int(within.searchsorted(target - before, side="right"))


def _keep_likely(scaled: FloatArray, row: DrawSettings) -> tuple[IntArray | None, FloatArray]:
    """What min-p and top-k keep, mostly without the tokens whose share is zero.

    Token ids in vocabulary order (None: all of them) and their scaled logits.
    """
    floor = np.float32(math.log(row.min_p)) if row.min_p else np.float32(LOWEST)
    top_k = row.top_k if row.top_k < len(scaled) else 0
    if top_k:
        floor = max(floor, _bound_of_largest(scaled, top_k))
    sample = scaled[::_SAMPLE_STEP] >= floor
    if not (row.min_p or top_k) and np.count_nonzero(sample) > _FEW * len(sample):
        return None, scaled
    token_ids = np.flatnonzero(scaled >= floor)
    kept = scaled[token_ids]
    surplus = len(kept) - top_k
    if top_k and surplus > 0:
        likely = kept >= np.partition(kept, surplus)[surplus]
        token_ids, kept = token_ids[likely], kept[likely]
    return token_ids, kept


def _bound_of_largest(scaled: FloatArray, count: int) -> np.float32:
    """A value that at least `count` entries reach (or all that matter), near the `count`-th
    largest.

    Deals the entries out into lanes: each maximum of a lane is an entry, so `count` entries reach
    the `count`-th largest of the maxima.
    """
    depth = len(scaled) // _NUM_LANES
    if count > _NUM_LANES or depth < 2:
        return np.float32(LOWEST)
    # Lanes side by side in memory, so that the maximum of all of them is one vector operation.
    maxima = scaled[: depth * _NUM_LANES].reshape(depth, _NUM_LANES).max(0)
    bound: np.float32 = np.partition(maxima, _NUM_LANES - count)[_NUM_LANES - count]
    return bound

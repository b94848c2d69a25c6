"""The token ids of the last step, kept on the device: the next step takes its inputs from there."""

from __future__ import annotations

import torch
from torch import Tensor


class LastSamples:
    """A buffer in a fixed place as soon as room for the largest step is reserved.

    Steps run in the order of their launches, so each finds what the one before it left.
    """

    def __init__(self, device: torch.device) -> None:
        self._token_ids = torch.zeros(1, dtype=torch.int64, device=device)

    def reserve(self, num_seqs: int) -> None:
        """Room for so many samples; what the buffer held is lost if it grows."""
        if num_seqs > len(self._token_ids):
            self._token_ids = self._token_ids.new_zeros(num_seqs)

    @torch.inference_mode()
    def keep(self, token_ids: Tensor) -> None:
        """Those of a step, [N] int64. An unusable row (`NO_TOKEN`) leaves token 0: its request ends
        when the host reads it, but its next row is launched before."""
        self.reserve(len(token_ids))
        torch.clamp(token_ids, min=0, out=self._token_ids[: len(token_ids)])

    def fill_in(self, input_ids: Tensor, sources: Tensor) -> Tensor:
        """`input_ids` [T], with sample `sources[i]` in place of number i where that is not -1."""
        samples = self._token_ids[sources.clamp(min=0)]
        return torch.where(sources >= 0, samples, input_ids)

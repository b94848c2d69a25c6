"""Which sizes of steps get a CUDA graph, and how much room each needs. Imports no torch.

A graph has a fixed number of rows. A step runs in the smallest bucket that holds it, and rows that
pad it cost next to nothing beside those that launches would.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

#: Close together where decode steps lie, whose rows are requests; beyond, steps with prompt chunks.
_DECODE_ROWS = (1, 2, 4, *range(8, 257, 8))
_MIXED_ROWS = (16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step there can be, in rows, requests, tokens of a request and cache blocks."""

    max_rows: int
    max_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """`is_decode`: each request has one row."""

    num_rows: int
    is_decode: bool


@dataclass(frozen=True, slots=True)
class WorkRoom:
    """Rows of the tables of one work list."""

    decode_items: int
    prompt_items: int
    merges: int
    parts: int


class Buckets:
    """Chooses the bucket of a step."""

    def __init__(self, limits: StepLimits) -> None:
        self._limits = limits
        self._decode = _up_to(_DECODE_ROWS, min(limits.max_rows, limits.max_seqs))
        self._mixed = _up_to(_MIXED_ROWS, limits.max_rows)

    def choose(self, num_rows: int, num_seqs: int) -> Bucket | None:
        """The smallest one that holds a step; None for a step larger than all of them."""
        is_decode = num_rows == num_seqs
        sizes = self._decode if is_decode else self._mixed
        place = bisect_left(sizes, num_rows)
        return Bucket(sizes[place], is_decode) if place < len(sizes) else None

    def num_sampling(self, bucket: Bucket) -> int:
        """How many requests of a step may get a token."""
        return min(bucket.num_rows, self._limits.max_seqs)

    def num_seqs(self, bucket: Bucket) -> int:
        """Sequences of a padded step. In a mixed one, the padding rows are one more sequence."""
        return bucket.num_rows if bucket.is_decode else self.num_sampling(bucket) + 1

    def num_block_ids(self, bucket: Bucket) -> int:
        """Entries of the block tables, as long as no block is shared when the cache is full."""
        limits = self._limits
        longest = -(-limits.max_model_len // limits.block_size)
        return min(self.num_sampling(bucket) * longest, limits.num_blocks)

    def work_room(self, bucket: Bucket, *, rows_per_item: int, split_tokens: int) -> WorkRoom:
        """Of a work list whose items take `rows_per_item` prompt rows or `split_tokens` keys."""
        num_seqs = self.num_seqs(bucket)
        stretches = -(-self._limits.max_model_len // split_tokens)
        cached_tokens = self.num_block_ids(bucket) * self._limits.block_size
        decode_items = min(num_seqs * stretches, num_seqs + cached_tokens // split_tokens)
        prompts = 0 if bucket.is_decode else min(num_seqs, bucket.num_rows // 2)
        return WorkRoom(
            decode_items=decode_items,
            prompt_items=prompts and bucket.num_rows // rows_per_item + prompts,
            merges=num_seqs if stretches > 1 else 0,
            parts=decode_items if stretches > 1 else 0,
        )


def _up_to(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    """Those below `largest`, and itself: no step is padded beyond what a step may have."""
    below = sizes[: bisect_left(sizes, largest)]
    return (*below, largest) if len(below) < len(sizes) else sizes

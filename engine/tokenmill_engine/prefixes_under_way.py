"""Prefixes that a step computes: whoever shares one waits a step and finds it in the cache.

Blocks are found only once they are computed (see `kv_cache_manager`), so requests that arrive
together with one system prompt would each compute it. The first does; the others stay in the queue
until nothing more of what they share is under way. SGLang's scheduler has a like rule, for
prefixes that wait in its queue.
"""

from __future__ import annotations

from collections.abc import Iterable

from .kv_cache_manager import KVCacheManager
from .outputs import ScheduledRequest
from .request import Request


class PrefixesUnderWay:
    """Watches over the admissions of one step, given what it computes already."""

    __slots__ = ("_hashes", "_kv", "_min_blocks")

    def __init__(
        self, kv: KVCacheManager, scheduled: Iterable[ScheduledRequest], *, min_tokens: int
    ) -> None:
        self._kv = kv
        self._min_blocks = kv.blocks_for(min_tokens)
        self._hashes: set[bytes] = set()
        for item in scheduled:
            self.note(item)

    def note(self, item: ScheduledRequest) -> None:
        """What the step computes of this request, and what steps in flight do."""
        self._hashes.update(self._kv.hashes_to_come(item.request, item.end))

    def hold(self, request: Request, num_cached_tokens: int) -> bool:
        """Whether the request should wait: `min_tokens` behind its cached prefix are under way."""
        first = num_cached_tokens // self._kv.block_size
        missing = request.block_hashes[first : first + self._min_blocks]  # as far as a lookup goes
        return len(missing) == self._min_blocks and self._hashes.issuperset(missing)

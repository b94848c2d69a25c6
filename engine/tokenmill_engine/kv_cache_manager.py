"""Block tables of requests over the block pool: prefix lookup, allocation, registration, release.

The order that keeps the prefix cache honest: `allocate` when a step is planned, `cache_full_blocks`
only after it ran. A block whose K/V is not written yet can therefore never be found. And since only
full blocks are found and at least one token is always left to compute, a request writes into blocks
of its own only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .block_hash import extend_block_hashes
from .block_pool import BlockPool, KVBlock
from .errors import ConfigError
from .request import Request


class KVCacheManager:
    """Owns `request.block_ids` and `request.block_hashes`; reads the tokens and their progress."""

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True
    ) -> None:
        if num_blocks < 1:
            raise ConfigError("num_gpu_blocks_override", "the cache needs at least one block")
        if block_size < 1:
            raise ConfigError("block_size", "must be a whole number of at least 1")
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Includes cached blocks that nobody references."""
        return self._pool.num_free

    @property
    def usage(self) -> float:
        """Share of blocks referenced by some request, 0 to 1."""
        return 1 - self._pool.num_free / self._pool.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def can_ever_fit(self, num_tokens: int) -> bool:
        """Whether one request of that length fits when it has the whole pool to itself."""
        return self.blocks_for(num_tokens) <= self.num_blocks

    def find_cached_prefix(self, request: Request) -> int:
        """Tokens at the start of the request whose K/V are cached, in whole blocks.

        At most `num_tokens - 1`: the last token is always computed, its logits are needed. Takes no
        reference: pass the number to `allocate` before anything else is allocated.
        """
        return len(self._cached_blocks(request)) * self.block_size

    def allocate(
        self,
        request: Request,
        num_tokens: int,
        *,
        num_cached_tokens: int = 0,
        reserve_blocks: int = 0,
    ) -> bool:
        """Extends the block table to hold the first `num_tokens` tokens; all or nothing.

        `num_cached_tokens` of an empty table come from the prefix cache (see `find_cached_prefix`).
        Fails unless `reserve_blocks` stay free afterwards.
        """
        missing = self.blocks_for(num_tokens) - len(request.block_ids)
        if missing <= 0:
            return True
        cached: list[KVBlock] = []
        if num_cached_tokens:
            if request.block_ids:
                raise ValueError("a cached prefix can only start an empty block table")
            cached = self._cached_blocks(request)[: num_cached_tokens // self.block_size]
        # Cached blocks that nobody references leave the free list just as new ones do.
        shared = sum(block.ref_count > 0 for block in cached)
        if missing - shared + reserve_blocks > self._pool.num_free:
            return False
        for block in cached:  # before any `take`, which could evict them
            self._pool.acquire(block)
        new = [self._pool.take() for _ in range(missing - len(cached))]
        request.block_ids.extend(block.block_id for block in (*cached, *new))
        return True

    def cache_full_blocks(self, request: Request) -> None:
        """Makes the request's full blocks findable, as far as their tokens are *computed*."""
        if not self.enable_prefix_caching:
            return
        num_full = request.num_computed_tokens // self.block_size
        blocks = self._pool.blocks
        first = num_full  # those before it are registered: scan back, at most over what is new
        while first > 0 and blocks[request.block_ids[first - 1]].block_hash is None:
            first -= 1
        if first == num_full:
            return
        extend_block_hashes(request, num_full, self.block_size)
        for index in range(first, num_full):
            self._pool.register(request.block_ids[index], request.block_hashes[index])

    def hashes_to_come(self, request: Request, end: int) -> list[bytes]:
        """Of the blocks that become findable when the tokens before `end` are computed.

        Its unread tokens are not known yet, so no block with one of those.
        """
        first = request.num_computed_tokens // self.block_size
        num_full = min(end, request.num_tokens) // self.block_size
        if not self.enable_prefix_caching or first >= num_full:
            return []
        extend_block_hashes(request, num_full, self.block_size)
        return request.block_hashes[first:num_full]

    def free(self, request: Request) -> None:
        """Gives all blocks back, last first: the tail of a prefix is evicted before its head."""
        for block_id in reversed(request.block_ids):
            self._pool.release(block_id)
        request.block_ids.clear()

    def sunk_tokens(self, request: Request) -> int:
        """Computed tokens that may have to be computed again if the request were preempted now.

        Tokens in blocks that another request references stay cached whatever happens. Blocks of its
        own may be found again, but a preemption happens because blocks are being used up.
        """
        blocks = self._pool.blocks
        num_shared = sum(blocks[block_id].ref_count > 1 for block_id in request.block_ids)
        return request.num_computed_tokens - num_shared * self.block_size

    def _cached_blocks(self, request: Request) -> list[KVBlock]:
        if not self.enable_prefix_caching:
            return []
        most = (request.num_tokens - 1) // self.block_size
        extend_block_hashes(request, most, self.block_size)
        found: list[KVBlock] = []
        for block_hash in request.block_hashes[:most]:
            block = self._pool.lookup(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def check_invariants(self, requests: Iterable[Request]) -> None:
        """Raises AssertionError unless pool and block tables agree; `requests`: all with a table.

        O(pool): for tests, and for the engine when it goes idle.
        """
        references: Counter[int] = Counter()
        for request in requests:
            table = request.block_ids
            if len(set(table)) != len(table):
                raise AssertionError(f"{request!r} has a block twice")
            if len(table) * self.block_size < request.num_computed_tokens:
                raise AssertionError(f"{request!r} has computed more than its table holds")
            self._check_hashes(request)
            references.update(table)
        self._pool.check_invariants(references)

    def _check_hashes(self, request: Request) -> None:
        """A block is registered if and only if it is full and computed, under its own content."""
        num_full = request.num_computed_tokens // self.block_size
        for index, block_id in enumerate(request.block_ids):
            expected = None
            if self.enable_prefix_caching and index < num_full:
                expected = request.block_hashes[index]
            if self._pool.blocks[block_id].block_hash != expected:
                raise AssertionError(f"{request!r}: block {index} is registered wrongly")

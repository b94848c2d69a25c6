"""The pool of KV blocks: who refers to each, which are free, and which hold a reusable prefix.

A block is *referenced* (some block table names it) or *free*; a free block may still be *cached*:
its K/V and its hash stay until the block is handed out again, so a later request can take it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence


class KVBlock:
    """One block of the paged cache: `block_size` consecutive positions of all layers."""

    __slots__ = ("block_hash", "block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        #: Identity of the content, set only once all of its K/V is written.
        self.block_hash: bytes | None = None
        self.prev: KVBlock | None = None  # neighbours in the free list, None while referenced
        self.next: KVBlock | None = None

    def __repr__(self) -> str:
        cached = self.block_hash is not None
        return f"KVBlock({self.block_id}, ref_count={self.ref_count}, cached={cached})"


class FreeBlockQueue:
    """Free blocks in the order in which they are handed out: worthless first, then least recent.

    Doubly linked through the blocks themselves and not a `deque`, because a prefix hit takes a
    block out of the *middle*: O(1) here, O(n) there. Nothing is allocated for a link.
    """

    def __init__(self, blocks: Sequence[KVBlock]) -> None:
        # A sentinel on both ends, so that no operation has a special case for the empty list.
        self._head, self._tail = KVBlock(-1), KVBlock(-1)
        self._head.next, self._tail.prev = self._tail, self._head
        self._length = 0
        for block in blocks:
            self.append(block)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[KVBlock]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def append(self, block: KVBlock) -> None:
        """To the end that is handed out last."""
        self._insert_after(self._last(), block)

    def prepend(self, block: KVBlock) -> None:
        """To the end that is handed out next."""
        self._insert_after(self._head, block)

    def pop(self) -> KVBlock:
        """Takes the next block to hand out; raises IndexError when there is none."""
        block = self._head.next
        if block is None or block is self._tail:
            raise IndexError("no free block")
        self.remove(block)
        return block

    def remove(self, block: KVBlock) -> None:
        if block.prev is None or block.next is None:
            raise ValueError(f"{block!r} is not in the free list")
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._length -= 1

    def _last(self) -> KVBlock:
        last = self._tail.prev
        return last if last is not None else self._head

    def _insert_after(self, left: KVBlock, block: KVBlock) -> None:
        if block.prev is not None or block.next is not None:
            raise ValueError(f"{block!r} is in the free list already")
        right = left.next if left.next is not None else self._tail
        block.prev, block.next = left, right
        left.next = right.prev = block
        self._length += 1


class BlockPool:
    """Blocks `0 … num_blocks-1` with reference counts and the index from content hash to block.

    When two requests compute the same content at the same time, the first to finish it is indexed;
    the other keeps its twin, which takes over the index entry if the first is gone by the time the
    twin is released.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [KVBlock(block_id) for block_id in range(num_blocks)]
        self._free = FreeBlockQueue(self.blocks)
        self._index: dict[bytes, KVBlock] = {}

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, those with a cached prefix included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that a prefix lookup can find."""
        return len(self._index)

    def lookup(self, block_hash: bytes) -> KVBlock | None:
        return self._index.get(block_hash)

    def take(self) -> KVBlock:
        """Hands out a free block, evicting what it cached; raises IndexError when there is none."""
        block = self._free.pop()
        if block.block_hash is not None:
            del self._index[block.block_hash]  # a free block with a hash is always the indexed one
            block.block_hash = None
        block.ref_count = 1
        return block

    def acquire(self, block: KVBlock) -> None:
        """One more reference to a block found by `lookup`."""
        if block.ref_count == 0:
            self._free.remove(block)
        block.ref_count += 1

    def release(self, block_id: int) -> None:
        """One reference less. Free blocks without reusable content are handed out before others."""
        block = self.blocks[block_id]
        if block.ref_count == 0:
            raise ValueError(f"{block!r} is released more often than it was handed out")
        block.ref_count -= 1
        if block.ref_count > 0:
            return
        if block.block_hash is not None:
            if self._index.setdefault(block.block_hash, block) is block:
                self._free.append(block)
                return
            block.block_hash = None  # a twin of what is cached already
        self._free.prepend(block)

    def register(self, block_id: int, block_hash: bytes) -> None:
        """Makes a block that is completely written findable."""
        block = self.blocks[block_id]
        block.block_hash = block_hash
        self._index.setdefault(block_hash, block)

    def check_invariants(self, references: Mapping[int, int]) -> None:
        """Raises AssertionError unless the pool agrees with `references`.

        That is the number of block table entries for each block id.
        """
        free = list(self._free)
        free_ids = {block.block_id for block in free}
        _require(len(free) == len(free_ids) == len(self._free), "a block is in the free list twice")
        _require(set(references) <= set(range(self.num_blocks)), "a table names an unknown block")
        for block in self.blocks:
            expected = references.get(block.block_id, 0)
            _require(block.ref_count == expected, "%r is in %d block tables", block, expected)
            _require((block.block_id in free_ids) == (expected == 0), "%r is misplaced", block)
            if expected == 0 and block.block_hash is not None:
                found = self._index.get(block.block_hash)
                _require(found is block, "%r is free and cannot be found", block)
        for block_hash, block in self._index.items():
            _require(block.block_hash == block_hash, "%r is under a foreign hash", block)


def _require(condition: bool, broken: str, *args: object) -> None:
    if not condition:
        raise AssertionError("block pool: " + broken % args)

"""The block pool: reference counts, the order of the free list, and the hash index."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tokenmill_engine.block_pool import BlockPool, FreeBlockQueue, KVBlock


def ids(queue: FreeBlockQueue) -> list[int]:
    return [block.block_id for block in queue]


def test_free_queue_hands_out_the_longest_free_first() -> None:
    queue = FreeBlockQueue([KVBlock(i) for i in range(3)])
    first = queue.pop()
    queue.append(first)
    assert (first.block_id, ids(queue), len(queue)) == (0, [1, 2, 0], 3)


def test_free_queue_removes_from_anywhere() -> None:
    blocks = [KVBlock(i) for i in range(4)]
    queue = FreeBlockQueue(blocks)
    for block in (blocks[1], blocks[3], blocks[0]):
        queue.remove(block)
    assert ids(queue) == [2]
    queue.remove(blocks[2])
    assert (ids(queue), len(queue)) == ([], 0)
    queue.prepend(blocks[3])
    queue.prepend(blocks[1])
    assert ids(queue) == [1, 3]


def test_free_queue_refuses_what_would_tangle_it() -> None:
    block = KVBlock(0)
    queue = FreeBlockQueue([block])
    with pytest.raises(ValueError, match="already"):
        queue.append(block)
    queue.pop()
    with pytest.raises(ValueError, match="not in the free list"):
        queue.remove(block)
    with pytest.raises(IndexError):
        queue.pop()


def test_blocks_are_counted_and_given_back_once() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.acquire(block)
    assert (block.ref_count, pool.num_free) == (2, 1)
    pool.release(block.block_id)
    assert pool.num_free == 1
    pool.release(block.block_id)
    assert pool.num_free == 2
    with pytest.raises(ValueError, match="more often"):
        pool.release(block.block_id)


def test_an_empty_pool_has_nothing_to_take() -> None:
    pool = BlockPool(1)
    pool.take()
    with pytest.raises(IndexError):
        pool.take()


def test_a_freed_block_keeps_its_content_until_it_is_handed_out() -> None:
    pool = BlockPool(2)
    block = pool.take()
    pool.register(block.block_id, b"h")
    pool.release(block.block_id)
    assert pool.lookup(b"h") is block
    pool.acquire(block)  # found again: out of the middle of the free list
    assert (block.ref_count, pool.num_free) == (1, 1)
    pool.release(block.block_id)
    pool.take()  # the other one, which caches nothing
    assert pool.lookup(b"h") is block
    assert pool.take() is block
    assert (pool.lookup(b"h"), block.block_hash, pool.num_cached) == (None, None, 0)


def test_worthless_blocks_are_handed_out_before_cached_ones() -> None:
    pool = BlockPool(3)
    cached, plain = pool.take(), pool.take()
    pool.register(cached.block_id, b"h")
    pool.release(cached.block_id)
    pool.release(plain.block_id)
    assert pool.take() is plain


def test_cached_blocks_are_evicted_least_recently_used_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block, block_hash in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.register(block.block_id, block_hash)
        pool.release(block.block_id)
    pool.acquire(blocks[0])
    pool.release(blocks[0].block_id)  # used again: now the most recent
    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_the_first_of_two_twins_is_indexed_and_the_second_worthless_when_freed() -> None:
    pool = BlockPool(3)
    first, twin = pool.take(), pool.take()
    pool.register(first.block_id, b"h")
    pool.register(twin.block_id, b"h")
    assert (pool.lookup(b"h"), pool.num_cached) == (first, 1)
    pool.release(twin.block_id)
    assert twin.block_hash is None
    assert pool.take() is twin


def test_a_twin_takes_over_when_the_indexed_block_is_gone() -> None:
    pool = BlockPool(2)
    first, twin = pool.take(), pool.take()
    pool.register(first.block_id, b"h")
    pool.register(twin.block_id, b"h")
    pool.release(first.block_id)
    assert pool.take() is first  # evicted: the only free block
    assert pool.lookup(b"h") is None
    pool.release(twin.block_id)
    assert pool.lookup(b"h") is twin
    pool.check_invariants({first.block_id: 1})


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda pool: setattr(pool.blocks[0], "ref_count", 5), "is in 1 block tables"),
        (lambda pool: pool._free.append(pool.blocks[0]), "misplaced"),
        (lambda pool: pool._free.pop(), "misplaced"),
        (lambda pool: pool._index.clear(), "cannot be found"),
        (lambda pool: setattr(pool.blocks[1], "block_hash", b"x"), "cannot be found|foreign"),
        (lambda pool: setattr(pool._free, "_length", 9), "twice"),
    ],
)
def test_invariants_see_a_broken_pool(break_it, complaint) -> None:
    pool = BlockPool(3)
    pool.take()
    cached = pool.take()
    pool.register(cached.block_id, b"h")
    pool.release(cached.block_id)
    pool.check_invariants({0: 1})
    break_it(pool)
    with pytest.raises(AssertionError, match=complaint):
        pool.check_invariants({0: 1})


def test_invariants_see_a_reference_that_the_pool_does_not_know() -> None:
    with pytest.raises(AssertionError, match="unknown"):
        BlockPool(2).check_invariants({7: 1})


@pytest.mark.parametrize("seed", range(5))
def test_random_use_keeps_the_invariants(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(8)
    held: Counter[int] = Counter()
    for _ in range(500):
        action = rng.choice(["take", "acquire", "register", "release", "release"])
        block_hash = bytes([rng.randrange(6)])
        if action == "take" and pool.num_free:
            held[pool.take().block_id] += 1
        elif action == "acquire" and (found := pool.lookup(block_hash)) is not None:
            pool.acquire(found)
            held[found.block_id] += 1
        elif action == "register" and held:
            block_id = rng.choice(list(held))
            if pool.blocks[block_id].block_hash is None:
                pool.register(block_id, block_hash)
        elif action == "release" and held:
            block_id = rng.choice(list(held))
            pool.release(block_id)
            held = held - Counter([block_id])
        pool.check_invariants(held)
        assert pool.num_free == 8 - len(held)

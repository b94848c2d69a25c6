"""The KV cache manager: block tables, prefix hits, and when a block may be found."""

from __future__ import annotations

import pytest

from support_engine import make_request
from tokenmill_engine.block_hash import extend_block_hashes
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.request import Request


def compute(kv: KVCacheManager, request: Request, num_tokens: int | None = None) -> int:
    """What the scheduler does for one request that gets all the budget; returns the hit."""
    num_tokens = request.num_tokens if num_tokens is None else num_tokens
    cached = 0
    if not request.block_ids:
        cached = kv.find_cached_prefix(request)
        request.num_computed_tokens = cached
    assert kv.allocate(request, num_tokens, num_cached_tokens=cached)
    request.num_computed_tokens = num_tokens
    kv.cache_full_blocks(request)
    return cached


def release(kv: KVCacheManager, request: Request) -> None:
    kv.free(request)
    request.num_computed_tokens = 0


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (4, 1), (5, 2), (8, 2), (9, 3), (40, 10)]
)
def test_a_table_has_as_many_blocks_as_the_tokens_need(num_tokens: int, num_blocks: int) -> None:
    kv = KVCacheManager(10, 4)
    request = make_request(prompt=40)
    assert kv.allocate(request, num_tokens)
    assert len(set(request.block_ids)) == len(request.block_ids) == num_blocks
    assert kv.num_free_blocks == 10 - num_blocks
    assert kv.usage == pytest.approx(num_blocks / 10)


def test_a_table_grows_at_its_end_only() -> None:
    kv = KVCacheManager(8, 4)
    request = make_request(prompt=20)
    kv.allocate(request, 4)
    before = list(request.block_ids)
    kv.allocate(request, 3)
    assert request.block_ids == before
    kv.allocate(request, 9)
    assert request.block_ids[:1] == before
    assert len(request.block_ids) == 3


def test_allocation_is_all_or_nothing() -> None:
    kv = KVCacheManager(3, 4)
    request = make_request(prompt=20)
    assert not kv.allocate(request, 13)
    assert (request.block_ids, kv.num_free_blocks) == ([], 3)
    assert not kv.allocate(request, 8, reserve_blocks=2)
    assert (request.block_ids, kv.num_free_blocks) == ([], 3)
    assert kv.allocate(request, 8, reserve_blocks=1)


def test_what_can_ever_fit_is_the_whole_pool() -> None:
    kv = KVCacheManager(3, 4)
    assert kv.can_ever_fit(12)
    assert not kv.can_ever_fit(13)


def test_a_written_prefix_is_shared_by_reference() -> None:
    kv = KVCacheManager(16, 4)
    first = make_request("a", range(100, 110))
    second = make_request("b", range(100, 112))
    assert compute(kv, first) == 0
    assert compute(kv, second) == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert not set(second.block_ids[2:]) & set(first.block_ids)
    kv.check_invariants([first, second])
    release(kv, first)
    kv.check_invariants([second])
    assert kv.num_free_blocks == 16 - 3


def test_a_hit_leaves_at_least_one_token_to_compute() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", range(100, 112)))
    assert kv.find_cached_prefix(make_request("b", range(100, 108))) == 4  # not 8: two full blocks
    assert kv.find_cached_prefix(make_request("c", range(100, 109))) == 8
    assert kv.find_cached_prefix(make_request("d", [100])) == 0


def test_nothing_is_found_before_it_is_computed() -> None:
    kv = KVCacheManager(16, 4)
    first = make_request("a", range(100, 112))
    second = make_request("b", range(100, 112))
    kv.allocate(first, 12)
    kv.cache_full_blocks(first)
    assert kv.find_cached_prefix(second) == 0
    first.num_computed_tokens = 7
    kv.cache_full_blocks(first)
    assert kv.find_cached_prefix(second) == 4
    first.num_computed_tokens = 8
    kv.cache_full_blocks(first)
    assert kv.find_cached_prefix(second) == 8


def test_output_tokens_extend_the_cached_prefix() -> None:
    kv = KVCacheManager(16, 4)
    first = make_request("a", range(100, 106))
    compute(kv, first)
    first.token_ids += [7, 8, 9]
    compute(kv, first)
    follow_up = make_request("b", [*range(100, 106), 7, 8, 9, 10])
    assert kv.find_cached_prefix(follow_up) == 8


@pytest.mark.parametrize(
    "other",
    [
        make_request("b", range(100, 120), cache_salt="tenant"),
        make_request("b", range(100, 120), cache_salt=""),
        make_request("b", [99, *range(101, 120)]),
        make_request("b", [*range(100, 103), 0, *range(104, 120)]),
    ],
)
def test_another_salt_or_another_first_block_hits_nothing(other: Request) -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", range(100, 120)))
    assert kv.find_cached_prefix(other) == 0


def test_the_salt_shares_with_itself_and_none_is_not_the_text_none() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", range(100, 109), cache_salt="None"))
    assert kv.find_cached_prefix(make_request("b", range(100, 109), cache_salt="None")) == 8
    assert kv.find_cached_prefix(make_request("c", range(100, 109))) == 0


def test_rope_regimes_do_not_share() -> None:
    kv = KVCacheManager(16, 4)
    short, long = make_request("a", range(100, 109)), make_request("b", range(100, 109))
    short.rope_regime, long.rope_regime = "short", "long"
    compute(kv, short)
    assert kv.find_cached_prefix(long) == 0


def test_equal_blocks_after_different_prefixes_do_not_share() -> None:
    kv = KVCacheManager(16, 4)
    compute(kv, make_request("a", [1, 1, 1, 1, 9, 9, 9, 9, 0]))
    assert kv.find_cached_prefix(make_request("b", [9, 9, 9, 9, 9, 9, 9, 9, 0])) == 0


def test_hashes_are_extended_not_redone() -> None:
    request, whole = make_request("a", range(6)), make_request("b", range(12))
    extend_block_hashes(request, 1, 4)
    first = request.block_hashes[0]
    request.token_ids += range(6, 12)
    extend_block_hashes(request, 3, 4)
    extend_block_hashes(whole, 3, 4)
    assert request.block_hashes[0] is first
    assert request.block_hashes == whole.block_hashes
    assert len(set(whole.block_hashes)) == 3


def test_freed_prefixes_are_found_until_the_pool_needs_them_tail_first() -> None:
    kv = KVCacheManager(4, 4)
    first = make_request("a", range(100, 113))  # three full blocks and one begun
    compute(kv, first)
    release(kv, first)
    assert kv.num_free_blocks == 4
    assert kv.find_cached_prefix(make_request("b", range(100, 113))) == 12
    other = make_request("c", 8)
    compute(kv, other)  # takes the begun block, then the tail of the prefix
    assert kv.find_cached_prefix(make_request("d", range(100, 113))) == 8
    release(kv, other)
    kv.check_invariants([])


def test_a_hit_on_free_blocks_counts_against_the_free_ones() -> None:
    kv = KVCacheManager(4, 4)
    first = make_request("a", range(100, 113))
    compute(kv, first)
    release(kv, first)
    again = make_request("b", range(100, 117))  # 12 cached tokens, but 5 blocks in all
    assert kv.find_cached_prefix(again) == 12
    assert not kv.allocate(again, 17, num_cached_tokens=12)
    assert not kv.allocate(again, 13, num_cached_tokens=12, reserve_blocks=1)
    assert kv.allocate(again, 13, num_cached_tokens=12)
    assert kv.num_free_blocks == 0


def test_a_hit_on_blocks_in_use_costs_only_the_new_ones() -> None:
    kv = KVCacheManager(4, 4)
    first = make_request("a", range(100, 109))
    compute(kv, first)
    second = make_request("b", range(100, 109))
    assert kv.allocate(second, 9, num_cached_tokens=8)
    assert kv.num_free_blocks == 0


def test_a_hit_is_not_evicted_by_its_own_allocation() -> None:
    kv = KVCacheManager(3, 4)
    first = make_request("a", range(100, 109))
    compute(kv, first)
    release(kv, first)
    second = make_request("b", range(100, 112))
    assert compute(kv, second) == 8
    kv.check_invariants([second])


def test_a_prefix_hit_belongs_to_an_empty_table() -> None:
    kv = KVCacheManager(8, 4)
    request = make_request(prompt=12)
    kv.allocate(request, 4)
    with pytest.raises(ValueError, match="empty"):
        kv.allocate(request, 12, num_cached_tokens=4)


def test_two_that_compute_the_same_at_once_keep_their_own_blocks() -> None:
    kv = KVCacheManager(16, 4)
    first, second = make_request("a", range(100, 109)), make_request("b", range(100, 109))
    for request in (first, second):
        kv.allocate(request, 9)
    for request in (first, second):
        request.num_computed_tokens = 9
        kv.cache_full_blocks(request)
    assert not set(first.block_ids) & set(second.block_ids)
    kv.check_invariants([first, second])
    release(kv, first)
    release(kv, second)
    assert kv.find_cached_prefix(make_request("c", range(100, 109))) == 8
    kv.check_invariants([])


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    kv = KVCacheManager(16, 4, enable_prefix_caching=False)
    first = make_request("a", range(100, 109))
    compute(kv, first)
    assert kv.find_cached_prefix(make_request("b", range(100, 109))) == 0
    assert first.block_hashes == []
    kv.check_invariants([first])


def test_sunk_tokens_leave_out_what_others_keep_alive() -> None:
    kv = KVCacheManager(16, 4)
    first, second = make_request("a", range(100, 110)), make_request("b", range(100, 111))
    compute(kv, first)
    assert kv.sunk_tokens(first) == 10
    compute(kv, second)
    assert (kv.sunk_tokens(first), kv.sunk_tokens(second)) == (2, 3)


@pytest.mark.parametrize(
    ("break_it", "complaint"),
    [
        (lambda request: request.block_ids.append(request.block_ids[0]), "twice"),
        (lambda request: request.block_ids.pop(), "more than its table"),
        (lambda request: setattr(request, "num_computed_tokens", 7), "registered wrongly"),
        (lambda request: request.block_hashes.__setitem__(0, b"x"), "registered wrongly"),
        (lambda request: request.block_ids.append(9), "block tables"),
    ],
)
def test_invariants_see_a_broken_table(break_it, complaint: str) -> None:
    kv = KVCacheManager(10, 4)
    request = make_request(prompt=10)
    compute(kv, request)
    kv.check_invariants([request])
    break_it(request)
    with pytest.raises(AssertionError, match=complaint):
        kv.check_invariants([request])


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "option"),
    [(0, 4, "num_gpu_blocks_override"), (4, 0, "block_size")],
)
def test_a_cache_without_room_is_refused(num_blocks: int, block_size: int, option: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        KVCacheManager(num_blocks, block_size)
    assert refusal.value.field == option

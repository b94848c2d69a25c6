"""The scheduler by example; `test_scheduler_random` drives it through arbitrary ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support_engine import Driver, expected_output, invented_token, kv_of, make_request
from support_engine import make_scheduler as make
from tokenmill_engine.errors import (
    DuplicateRequest,
    InvalidRequest,
    PromptTooLong,
    RequestTooLarge,
    ResumeMismatch,
)
from tokenmill_engine.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from tokenmill_engine.request import FinishReason, RequestStatus

ENDLESS = {"ignore_eos": True, "max_tokens": 100}


def rows(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in output.scheduled]


def outputs_are_right(driver: Driver) -> bool:
    config = driver.scheduler.config
    return all(
        (r.output_token_ids, r.finish_reason) == expected_output(r, config) for r in driver.requests
    )


# --- the budget and the order within a step ---------------------------------------------------


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    driver = Driver(make(max_num_batched_tokens=8))
    driver.add(make_request("a", 20, max_tokens=3, ignore_eos=True))
    got_a_token = [len(driver.step()) for _ in range(5)]
    assert not driver.scheduler.has_unfinished_requests
    assert [rows(step) for step in driver.steps] == [
        [("a", 0, 8)],
        [("a", 8, 8)],
        [("a", 16, 4)],
        [("a", 20, 1)],
        [("a", 21, 1)],
    ]
    assert got_a_token == [0, 0, 1, 1, 1]


def test_decodes_come_first_then_running_prompts_then_new_ones() -> None:
    driver = Driver(make(max_num_batched_tokens=12, max_num_seqs=4))
    driver.add(make_request("a", 4, **ENDLESS))
    driver.step()
    driver.add(make_request("b", 20, **ENDLESS))
    driver.step()
    driver.add(make_request("c", 7, **ENDLESS))
    driver.step()
    assert rows(driver.steps[-2]) == [("a", 4, 1), ("b", 0, 11)]
    assert rows(driver.steps[-1]) == [("a", 5, 1), ("b", 11, 9), ("c", 0, 2)]


def test_a_slow_step_makes_prompt_chunks_smaller_while_others_decode() -> None:
    driver = Driver(
        make(
            num_blocks=300,
            max_num_batched_tokens=256,
            max_num_seqs=4,
            max_model_len=1000,
            itl_target_ms=100,
        )
    )
    scheduler = driver.scheduler
    driver.add(make_request("a", 4, **ENDLESS))
    driver.step()
    scheduler.pacer.observe(num_decodes=1, num_chunk_tokens=256, seconds=0.16)
    driver.add(make_request("b", 400, **ENDLESS))
    driver.step()
    assert rows(driver.steps[-1]) == [("a", 4, 1), ("b", 0, 160)]  # 256 * 100 ms / 160 ms
    scheduler.abort("a")
    driver.step()
    assert rows(driver.steps[-1]) == [("b", 160, 240)]  # nobody is kept waiting


def test_a_full_house_admits_nobody() -> None:
    driver = Driver(make(max_num_seqs=2))
    driver.add(*(make_request(f"r{i}", 3, **ENDLESS) for i in range(3)))
    driver.step()
    assert (driver.scheduler.num_running, driver.scheduler.num_waiting) == (2, 1)
    driver.scheduler.abort("r0")
    driver.step()
    assert driver.requests[2].status is RequestStatus.RUNNING


def test_the_most_urgent_is_admitted_first_under_priority() -> None:
    driver = Driver(make(policy="priority", max_num_seqs=1))
    driver.add(*(make_request(f"r{i}", 3, max_tokens=1, priority=p) for i, p in enumerate((2, 0))))
    driver.add(make_request("r2", 3, max_tokens=1, priority=2))
    driver.run()
    assert [rows(step)[0][0] for step in driver.steps] == ["r1", "r0", "r2"]


def test_a_step_without_requests_is_empty() -> None:
    assert make().schedule() == SchedulerOutput()


# --- preemption ----------------------------------------------------------------------------------


def crowded(**settings: object) -> Driver:
    """Two requests that together outgrow six blocks of four tokens: `b` has to give way."""
    driver = Driver(make(num_blocks=6, block_size=4, max_model_len=24, **settings))
    driver.add(make_request("a", 8, max_tokens=16, ignore_eos=True))
    driver.add(make_request("b", 3, max_tokens=12, ignore_eos=True))
    return driver


def test_the_cheaper_one_gives_way_keeps_its_output_and_ends_right() -> None:
    driver = crowded()
    a, b = driver.requests
    while not b.num_preemptions:
        driver.step()
    assert driver.steps[-1].preempted == (b,)
    assert b.status is RequestStatus.PREEMPTED
    assert (b.num_computed_tokens, b.block_ids) == (0, [])
    assert b.num_output_tokens > 0
    driver.run()
    assert outputs_are_right(driver)
    assert (a.num_preemptions, b.num_preemptions) == (0, 1)
    assert driver.scheduler.stats.preemptions_total == 1


def test_a_preempted_request_waits_until_the_reserve_is_free_or_it_runs_alone() -> None:
    driver = crowded()
    a, b = driver.requests
    while not b.num_preemptions:
        driver.step()
    while not a.is_finished:
        assert b.status is RequestStatus.PREEMPTED  # six blocks never hold both and a reserve of 4
        driver.step()
    driver.step()
    assert b.status is RequestStatus.RUNNING


def test_a_resumed_victim_finds_its_blocks_in_the_prefix_cache() -> None:
    with_cache, without = crowded(), crowded(enable_prefix_caching=False)
    for driver in (with_cache, without):
        while not driver.requests[1].num_preemptions:
            driver.step()
        lost = driver.requests[1].peak_computed_tokens
        driver.scheduler.abort("a")
        driver.run()
        recomputed = driver.scheduler.stats.recomputed_tokens_total
        assert recomputed == (lost if driver is without else lost % 4)


def test_a_victim_already_in_the_step_is_taken_out_of_it() -> None:
    driver = Driver(make(policy="priority", num_blocks=5, block_size=4, max_model_len=20))
    driver.add(make_request("idle", 2, max_tokens=14, priority=1, ignore_eos=True))
    driver.step()
    driver.add(make_request("urgent", 3, max_tokens=17, ignore_eos=True))
    driver.run()
    preempting = next(step for step in driver.steps if step.preempted)
    assert [r.request_id for r in preempting.preempted] == ["idle"]
    assert [row[0] for row in rows(preempting)] == ["urgent"]
    assert outputs_are_right(driver)


def test_a_preempted_request_is_ahead_of_newer_ones() -> None:
    driver = crowded()
    b = driver.requests[1]
    while not b.num_preemptions:
        driver.step()
    num_before = len(driver.steps)
    driver.add(make_request("c", 2, max_tokens=2))
    driver.run()
    order = [row[0] for step in driver.steps[num_before:] for row in rows(step)]
    assert order.index("b") < order.index("c")
    assert outputs_are_right(driver)


def test_nobody_is_admitted_into_the_room_that_a_preemption_made_in_this_step() -> None:
    driver = Driver(make(policy="priority", num_blocks=12, block_size=2, max_model_len=24))
    driver.add(make_request("big", 12, max_tokens=12, priority=2, ignore_eos=True))
    driver.add(make_request("leader", 5, max_tokens=19, priority=0, ignore_eos=True))
    driver.step()
    driver.add(make_request("next", 3, max_tokens=1, priority=1))
    driver.run()
    big, _, after = driver.requests
    preempting = next(i for i, step in enumerate(driver.steps) if step.preempted)
    assert driver.steps[preempting].preempted == (big,)
    assert after.request_id not in {row[0] for row in rows(driver.steps[preempting])}
    assert after.request_id in {row[0] for row in rows(driver.steps[preempting + 1])}


def test_a_burst_in_a_tiny_pool_is_preempted_at_most_logarithmically() -> None:
    driver = Driver(make(num_blocks=16, block_size=2, max_model_len=32, max_num_seqs=8))
    driver.add(*(make_request(f"r{i}", 2, max_tokens=28, ignore_eos=True) for i in range(24)))
    driver.run()
    assert driver.scheduler.stats.preemptions_total > 0
    assert max(r.num_preemptions for r in driver.requests) <= 1 + 4  # log2 of 16 blocks
    assert outputs_are_right(driver)


# --- the prefix cache ----------------------------------------------------------------------------


def test_a_later_request_starts_after_the_shared_prefix() -> None:
    driver = Driver(make())
    shared = list(range(100, 111))
    driver.add(make_request("a", shared, **ENDLESS))
    driver.step()
    driver.add(make_request("b", [*shared, 7], **ENDLESS))
    driver.step()
    assert rows(driver.steps[-1]) == [("a", 11, 1), ("b", 8, 4)]
    b, stats = driver.requests[1], driver.scheduler.stats
    assert b.num_cached_tokens == 8
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (11 + 12, 8)
    assert stats.prompt_tokens_total == 11 + 4


def test_two_equal_prompts_in_one_step_compute_both() -> None:
    driver = Driver(make())
    driver.add(*(make_request(name, range(100, 109), **ENDLESS) for name in "ab"))
    driver.step()
    assert rows(driver.steps[0]) == [("a", 0, 9), ("b", 0, 9)]


def test_waiting_for_blocks_does_not_count_as_more_queries() -> None:
    driver = Driver(make(num_blocks=6, block_size=4, max_model_len=24))
    driver.add(make_request("a", 16, max_tokens=4, ignore_eos=True), make_request("b", 12))
    driver.run()
    assert driver.scheduler.stats.prefix_cache_queries_total == 16 + 12


def test_no_queries_are_counted_without_prefix_caching() -> None:
    driver = Driver(make(enable_prefix_caching=False))
    driver.add(make_request())
    driver.run()
    assert driver.scheduler.stats.prefix_cache_queries_total == 0


# --- LongRoPE ------------------------------------------------------------------------------------


def test_crossing_the_rope_switch_computes_everything_once_more() -> None:
    driver = Driver(make(rope_switch_tokens=10))
    driver.add(make_request("a", 8, max_tokens=6, ignore_eos=True))
    driver.run()
    assert [row[1:] for step in driver.steps for row in rows(step)] == [
        (0, 8),
        (8, 1),
        (9, 1),
        (0, 11),  # the eleventh token crossed
        (11, 1),
        (12, 1),
    ]
    stats = driver.scheduler.stats
    assert (stats.recomputed_tokens_total, stats.preemptions_total) == (10, 0)
    assert (stats.prompt_tokens_total, stats.generation_tokens_total) == (8, 6)
    assert outputs_are_right(driver)


def test_blocks_of_the_two_rope_regimes_are_not_shared() -> None:
    driver = Driver(make(rope_switch_tokens=10))
    driver.add(make_request("short", range(100, 109), max_tokens=1))
    driver.run()
    driver.add(make_request("long", range(100, 112), max_tokens=1))
    driver.run()
    driver.add(make_request("short again", range(100, 110), max_tokens=1))
    driver.add(make_request("long again", range(100, 115), max_tokens=1))
    driver.run()
    assert [r.num_cached_tokens for r in driver.requests] == [0, 0, 8, 12]
    assert len({r.rope_regime for r in driver.requests}) == 2


def test_blocks_computed_after_the_switch_are_not_found_under_the_old_regime() -> None:
    driver = Driver(make(num_blocks=4, block_size=4, max_model_len=16, rope_switch_tokens=10))
    driver.add(make_request("a", range(100, 108), max_tokens=4, ignore_eos=True))
    driver.run()  # a pool so small that computing again evicts the blocks of the short regime
    driver.add(make_request("b", range(100, 109), max_tokens=1))
    driver.run()  # the driver's model of the cache fails the test if b finds a's second block
    assert driver.requests[1].num_cached_tokens == 4


def test_ending_at_the_rope_switch_computes_nothing_again() -> None:
    driver = Driver(make(rope_switch_tokens=10))
    driver.add(make_request("a", 8, max_tokens=3, ignore_eos=True))
    driver.run()
    assert driver.scheduler.stats.recomputed_tokens_total == 0


def test_a_request_at_the_switch_that_finds_no_blocks_waits_for_them() -> None:
    driver = Driver(make(num_blocks=6, block_size=4, max_model_len=24, rope_switch_tokens=6))
    driver.add(make_request("a", 4, max_tokens=16, ignore_eos=True))
    driver.add(make_request("b", 3, max_tokens=16, ignore_eos=True))
    driver.run()
    assert outputs_are_right(driver)


# --- add, abort, finish --------------------------------------------------------------------------


def test_what_can_never_run_is_refused_at_the_door() -> None:
    scheduler = make(num_blocks=4, block_size=4, max_model_len=32)
    scheduler.add(make_request("fits", 10, max_tokens=6))
    with pytest.raises(RequestTooLarge) as too_large:
        scheduler.add(make_request("a", 10, max_tokens=7))
    with pytest.raises(PromptTooLong) as too_long:
        scheduler.add(make_request("b", 32))
    with pytest.raises(InvalidRequest) as empty:
        scheduler.add(make_request("c", 0))
    with pytest.raises(DuplicateRequest):
        scheduler.add(make_request("fits"))
    assert [e.value.field for e in (too_large, too_long, empty)] == [
        "max_tokens",
        "prompt_token_ids",
        "prompt_token_ids",
    ]
    assert scheduler.num_waiting == 1


def test_max_model_len_caps_what_must_fit() -> None:
    make(num_blocks=4, block_size=4, max_model_len=16).add(make_request("a", 15, max_tokens=999))


def test_an_id_is_free_again_after_the_end() -> None:
    driver = Driver(make())
    driver.add(make_request("a", max_tokens=1))
    driver.run()
    driver.add(make_request("a", max_tokens=1))
    driver.run()
    assert driver.requests[1].is_finished


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_ends_a_request_at_once_wherever_it_is(steps: int) -> None:
    driver = Driver(make(max_num_batched_tokens=8))
    driver.add(make_request("a", 12, **ENDLESS))
    for _ in range(steps):
        driver.step()
    assert driver.scheduler.abort("a") is driver.requests[0]
    assert driver.requests[0].finish_reason is FinishReason.ABORT
    assert not driver.scheduler.has_unfinished_requests
    assert kv_of(driver.scheduler).usage == 0
    assert driver.scheduler.abort("a") is None
    driver.scheduler.check_invariants()


def test_abort_of_a_preempted_request() -> None:
    driver = crowded()
    while not driver.requests[1].num_preemptions:
        driver.step()
    driver.scheduler.abort("b")
    driver.run()
    assert driver.requests[0].finish_reason is FinishReason.LENGTH


def test_abort_between_schedule_and_update_drops_the_sample() -> None:
    driver = Driver(make())
    driver.add(*(make_request(name, 5, **ENDLESS) for name in "abc"))
    driver.step()
    before = driver.requests[1].output_token_ids
    driver.in_flight = lambda _output: driver.scheduler.abort("b")
    updated = driver.step()
    assert [r.request_id for r in updated] == ["a", "c"]
    assert driver.requests[1].output_token_ids == before
    for request in updated:
        assert request.token_ids[-1] == invented_token(request.token_ids[:-1])


def test_an_id_reused_while_its_predecessor_is_in_flight_starts_clean() -> None:
    driver = Driver(make())
    driver.add(make_request("a", 5, **ENDLESS))

    def replace(_output: SchedulerOutput) -> None:
        driver.scheduler.abort("a")
        driver.add(make_request("a", range(50, 57), max_tokens=3))

    driver.in_flight = replace
    assert driver.step() == []
    driver.in_flight = lambda _output: None
    driver.run()
    assert (
        driver.requests[1].output_token_ids
        == expected_output(driver.requests[1], driver.scheduler.config)[0]
    )


def test_the_first_reason_stays() -> None:
    scheduler = make()
    request = make_request()
    scheduler.add(request)
    scheduler.finish(request, FinishReason.STOP, "stop string")
    scheduler.finish(request, FinishReason.LENGTH)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "stop string")


def test_a_stop_string_found_after_the_update_ends_the_request() -> None:
    driver = Driver(make())
    driver.add(make_request("a", 5, **ENDLESS), make_request("b", 5, max_tokens=3))
    driver.step()
    driver.scheduler.finish(driver.requests[0], FinishReason.STOP, "###")
    driver.run()
    assert driver.requests[0].num_output_tokens == 1
    assert kv_of(driver.scheduler).usage == 0


# --- resumption, failure, accounts ---------------------------------------------------------------


@pytest.mark.parametrize("num_known", range(1, 8))
def test_a_request_resumed_at_any_token_ends_like_an_undisturbed_one(num_known: int) -> None:
    driver = Driver(make(max_num_batched_tokens=8))
    whole, _ = expected_output(make_request("a", ignore_eos=True), driver.scheduler.config)
    assert len(whole) == 8
    driver.add(make_request("a", ignore_eos=True, output=whole[:num_known]))
    driver.run()
    assert driver.requests[0].output_token_ids == whole
    assert driver.scheduler.stats.generation_tokens_total == 8 - num_known


def test_a_resumed_request_that_is_complete_is_refused() -> None:
    scheduler = make()
    with pytest.raises(ResumeMismatch):
        scheduler.add(make_request("a", max_tokens=2, output=[5, 6]))
    with pytest.raises(ResumeMismatch):
        scheduler.add(make_request("a", max_tokens=2, output=[5, 6, 7]))
    assert not scheduler.has_unfinished_requests


def test_a_step_that_failed_can_be_scheduled_again() -> None:
    driver = Driver(make(max_num_batched_tokens=8))
    driver.add(make_request("a", 5, max_tokens=4), make_request("b", 9, max_tokens=4))
    driver.step()
    lost = driver.scheduler.schedule()
    assert rows(driver.scheduler.schedule()) == rows(lost)
    driver.run()
    assert outputs_are_right(driver)


@pytest.mark.parametrize("num_sampled", [0, 2])
def test_too_few_or_too_many_samples_change_nothing(num_sampled: int) -> None:
    driver = Driver(make(max_num_batched_tokens=8))
    driver.add(make_request("a", 4, max_tokens=4), make_request("b", 9, max_tokens=4))
    output = driver.scheduler.schedule()
    with pytest.raises(ValueError, match=r"output\.sampling"):
        driver.scheduler.update_from_output(
            output, ModelRunnerOutput((SampledToken(1),) * num_sampled)
        )
    assert [r.num_computed_tokens for r in driver.requests] == [0, 0]
    driver.run()
    assert outputs_are_right(driver)


def test_the_stats_add_up_to_the_rows_that_ran() -> None:
    driver = crowded()
    driver.run()
    stats = driver.scheduler.engine_stats()
    num_decoded = sum(r.num_output_tokens - 1 for r in driver.requests)  # the last is never fed in
    ran = sum(step.num_batched_tokens for step in driver.steps)
    assert stats.prompt_tokens_total == 8 + 3
    assert stats.generation_tokens_total == 16 + 12
    assert ran == stats.prompt_tokens_total + num_decoded + stats.recomputed_tokens_total
    assert stats.steps_total == len(driver.steps)
    assert stats.num_batched_tokens == driver.steps[-1].num_batched_tokens
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    assert (stats.num_blocks, stats.num_free_blocks) == (6, 6)


def test_invariants_see_a_request_in_two_places() -> None:
    scheduler = make()
    request = make_request()
    scheduler.add(request)
    scheduler.check_invariants()
    scheduler._book.running[request.request_id] = request
    with pytest.raises(AssertionError, match="both"):
        scheduler.check_invariants()


def test_importing_the_scheduler_leaves_torch_out() -> None:
    code = (
        "import sys, tokenmill_engine.scheduler\n"
        "sys.exit(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)) or None)"
    )
    command = [sys.executable, "-c", code]
    path = {"PYTHONPATH": ":".join(sys.path)}
    result = subprocess.run(command, env=path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr

"""The scheduler under arbitrary load: every step is checked, and every request ends right.

The checks of a step are the driver's (`support_engine`): books, budget, decode first, order, the
leader, contiguous rows, and a model of the cache that knows what each slot was written with.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_arrivals import (
    Arrival,
    arrivals,
    check_endings,
    check_preemptions,
    request_of,
    schedulers,
)
from support_engine import Driver, make_request, make_scheduler
from tokenmill_engine.outputs import SchedulerOutput
from tokenmill_engine.request import RequestStatus


class Load:
    """Plays arrivals and aborts against a driver, and keeps its own account of the rows."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.recomputed = self.first_time = 0
        self._peaks: dict[str, int] = {}
        self._abort_at: dict[str, int] = {}
        self._abort_in_flight: dict[str, int] = {}
        driver.in_flight = self._in_flight

    def play(self, planned: list[Arrival]) -> None:
        for index, arrival in enumerate(planned):
            for _ in range(arrival.wait_steps):
                self._step()
            request = request_of(index, arrival, self.driver.scheduler.config)
            self.driver.add(request)
            if arrival.abort_after_steps is not None:
                due = self._abort_in_flight if arrival.abort_in_flight else self._abort_at
                due[request.request_id] = len(self.driver.steps) + arrival.abort_after_steps
        while self.driver.scheduler.has_unfinished_requests:
            self._step()

    def _step(self) -> None:
        self._abort_due(self._abort_at)
        if not self.driver.scheduler.has_unfinished_requests:
            return
        limit = 1 + sum((r.num_tokens + 61) * (r.num_preemptions + 2) for r in self.driver.requests)
        assert len(self.driver.steps) < limit, "each step should compute something new"
        self.driver.step()

    def _in_flight(self, output: SchedulerOutput) -> None:
        self._abort_due(self._abort_in_flight)
        for item in output.scheduled:
            if item.request.is_finished:
                continue
            peak = self._peaks.get(item.request.request_id, 0)
            again = len([p for p in range(item.start, item.end) if p < peak])
            self.recomputed += again
            self.first_time += item.num_tokens - again
            self._peaks[item.request.request_id] = max(peak, item.end)

    def _abort_due(self, due: dict[str, int]) -> None:
        now = len(self.driver.steps)
        for request_id in [key for key, step in due.items() if step <= now]:
            del due[request_id]
            self.driver.scheduler.abort(request_id)


@pytest.mark.timeout(600)  # it takes seconds, but shrinking a failure takes minutes
@settings(max_examples=100, deadline=None, derandomize=True)
@given(scheduler=schedulers(), planned=st.lists(arrivals, min_size=8, max_size=24))
def test_whatever_comes_every_step_is_sound_and_every_request_ends_right(
    scheduler, planned
) -> None:
    driver = Driver(scheduler)
    load = Load(driver)
    load.play(planned)
    check_endings(driver.scheduler, driver.requests)
    check_accounts(driver, load)
    check_preemptions(driver.scheduler, driver.requests)


def check_accounts(driver: Driver, load: Load) -> None:
    stats = driver.scheduler.stats
    assert stats.recomputed_tokens_total == load.recomputed
    assert stats.prompt_tokens_total <= load.first_time
    assert stats.preemptions_total == sum(len(step.preempted) for step in driver.steps)
    assert stats.prefix_cache_hits_total <= stats.prefix_cache_queries_total


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    num_requests=st.integers(4, 24),
    num_blocks=st.integers(4, 20),
    block_size=st.sampled_from([1, 2, 4]),
    enable_prefix_caching=st.booleans(),
)
def test_an_overload_of_growing_requests_ends_in_order_of_arrival_almost(
    num_requests, num_blocks, block_size, enable_prefix_caching
) -> None:
    """All want the whole pool: at most the ones running at once may overtake each other."""
    length = num_blocks * block_size
    driver = Driver(
        make_scheduler(
            num_blocks=num_blocks,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            max_model_len=max(2, length),
        )
    )
    ended: list[int] = []
    for index in range(num_requests):
        driver.add(make_request(f"r{index}", 1, max_tokens=length - 1, ignore_eos=True))
    while driver.scheduler.has_unfinished_requests:
        ended += [r.arrival for r in driver.step() if r.is_finished]
    check_endings(driver.scheduler, driver.requests)
    check_preemptions(driver.scheduler, driver.requests)
    assert ended == sorted(ended)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    max_overtakes=st.integers(0, 6),
    num_blocks=st.integers(16, 40),
    share=st.floats(0.4, 1.0),
    small_tokens=st.integers(2, 12),
)
def test_a_big_request_starts_within_a_bound_beside_endless_small_ones(
    max_overtakes, num_blocks, share, small_tokens
) -> None:
    """Small ones arrive in every step; the big one waits for those before it and so many after."""
    block_size = 2
    scheduler = make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        max_overtakes=max_overtakes,
        max_num_seqs=64,
        max_num_batched_tokens=128,
        max_model_len=num_blocks * block_size,
    )
    driver = Driver(scheduler)

    def add_small() -> None:
        index = len(driver.requests)
        driver.add(make_request(f"r{index}", 2, max_tokens=small_tokens, ignore_eos=True))

    for _ in range(num_blocks):
        add_small()
        driver.step()
    num_before = len(driver.requests)
    big = make_request("big", int(share * num_blocks * block_size) - 2, max_tokens=2)
    driver.add(big)
    while big.status is RequestStatus.WAITING:
        add_small()
        driver.step()
        # All before it and all that may pass it, one after another and each computed twice.
        limit = num_blocks + (num_before + max_overtakes) * 2 * (small_tokens + 2)
        assert len(driver.steps) <= limit
    assert driver.overtaken[id(big)] <= max_overtakes
    driver.run()
    check_endings(driver.scheduler, driver.requests)

"""Steps one ahead under arbitrary load, on a device that is as late as it may be."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support_arrivals import (
    Arrival,
    arrivals,
    check_endings,
    check_preemptions,
    mostly,
    request_of,
    schedulers,
)
from support_engine import EOS, expected_output, invented_token, kv_of, make_request, make_scheduler
from support_late_device import BY_HOST_PRIORITY, AheadDriver
from tokenmill_engine.request import FinishReason, Request

failures = st.lists(mostly("", st.sampled_from(["launch", "read"])), min_size=3, max_size=12)


class Load:
    """Plays arrivals, and aborts between runs: what is aborted is in flight more often than not."""

    def __init__(self, driver: AheadDriver) -> None:
        self.driver = driver
        self._abort_at: dict[str, int] = {}

    def play(self, planned: list[Arrival]) -> None:
        driver = self.driver
        for index, arrival in enumerate(planned):
            for _ in range(arrival.wait_steps):
                self._step()
            request = request_of(index, arrival, driver.scheduler.config)
            driver.add(request)
            if arrival.abort_after_steps is not None:
                due = driver.num_runs + arrival.abort_after_steps
                self._abort_at[request.request_id] = due
        while driver.has_work:
            self._step()

    def _step(self) -> None:
        driver = self.driver
        due = [name for name, run in self._abort_at.items() if run <= driver.num_runs]
        for request_id in due:
            del self._abort_at[request_id]
            driver.scheduler.abort(request_id)
        if not driver.has_work:
            return
        most = 2 + sum((r.num_tokens + 61) * (r.num_preemptions + 2) for r in driver.requests)
        assert driver.num_runs < 3 * most, "each step should compute something new"
        driver.step()


@pytest.mark.timeout(600)  # it takes seconds, but shrinking a failure takes minutes
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    scheduler=schedulers(), planned=st.lists(arrivals, min_size=8, max_size=24), failures=failures
)
def test_whatever_comes_no_block_changes_hands_early_and_every_request_ends_right(
    scheduler, planned, failures
) -> None:
    driver = AheadDriver(scheduler, cycle(failures))
    Load(driver).play(planned)
    check_endings(scheduler, driver.requests)
    check_preemptions(scheduler, driver.requests)
    assert scheduler.stats.generation_tokens_total == sum(
        request.num_output_tokens - known_tokens(request, planned, scheduler.config)
        for request in driver.requests
    )


def known_tokens(request: Request, planned: list[Arrival], config) -> int:
    index = int(request.request_id.removeprefix("r"))
    return request_of(index, planned[index], config).num_output_tokens


def driver_with(*requests: Request, **config: object) -> AheadDriver:
    driver = AheadDriver(make_scheduler(**config))
    for request in requests:
        driver.add(request)
    return driver


def test_a_token_comes_from_the_run_after_the_one_that_launched_its_step() -> None:
    request = make_request(max_tokens=3, ignore_eos=True)
    driver = driver_with(request)
    seen = []
    while driver.has_work:
        driver.step()
        seen.append((len(driver.in_flight), request.num_output_tokens))
    assert seen == [(1, 0), (1, 1), (1, 2), (0, 3)]
    assert driver.device.num_launched_ahead == 2
    assert driver.device.num_dropped == 0  # the end was known ahead


def prompt_that_ends_after(num_tokens: int) -> list[int]:
    """One whose request gets EOS as its token of that number."""
    for first in range(1, 10_000):
        request = make_request(prompt=[first, 3, 5], max_tokens=num_tokens + 1)
        output, _ = expected_output(request, make_scheduler().config)
        if len(output) == num_tokens and output[-1] == EOS:
            return [first, 3, 5]
    raise AssertionError("no such prompt")


def test_blocks_of_an_ended_request_are_kept_until_its_last_row_is_written() -> None:
    request = make_request(prompt=prompt_that_ends_after(3), max_tokens=20)
    driver = driver_with(request, block_size=4)
    while not request.is_finished:
        driver.step()
    kv = kv_of(driver.scheduler)
    assert request.finish_reason is FinishReason.STOP
    assert not driver.scheduler.has_unfinished_requests
    assert (len(driver.in_flight), kv.num_blocks - kv.num_free_blocks) == (1, 2)
    assert driver.step() == []
    assert (len(driver.in_flight), kv.num_free_blocks) == (0, kv.num_blocks)
    assert driver.device.num_dropped == 1


def test_an_id_may_be_used_again_while_its_first_request_is_still_in_flight() -> None:
    first = make_request("same", [7, 8], max_tokens=9, ignore_eos=True)
    driver = driver_with(first)
    driver.step()
    driver.step()
    driver.scheduler.abort("same")
    second = make_request("same", [9, 10, 11], max_tokens=4, ignore_eos=True)
    driver.add(second)
    while driver.has_work:
        driver.step()
    output, _ = expected_output(second, driver.scheduler.config)
    assert second.output_token_ids == output
    assert first.output_token_ids == [invented_token([7, 8])]


def test_nothing_stays_in_flight_while_the_host_takes_part_in_choosing() -> None:
    helped = make_request("helped", 4, max_tokens=4, priority=BY_HOST_PRIORITY, ignore_eos=True)
    plain = make_request("plain", 4, max_tokens=8, ignore_eos=True)
    driver = driver_with(helped, plain)
    while not helped.is_finished:
        driver.step()
        assert len(driver.in_flight) == 0
    assert plain.num_output_tokens == 4
    driver.step()
    assert len(driver.in_flight) == 1


def test_blocks_that_run_out_drain_the_pipeline_before_somebody_is_preempted() -> None:
    requests = [make_request(f"r{n}", 4, max_tokens=24, ignore_eos=True) for n in range(2)]
    driver = driver_with(*requests, num_blocks=9, block_size=4, max_model_len=36)
    while driver.scheduler.stats.preemptions_total == 0:
        in_flight = len(driver.in_flight)
        driver.step()
    assert in_flight == 0
    while driver.has_work:
        driver.step()
    check_endings(driver.scheduler, requests)


@pytest.mark.parametrize("failure", ["launch", "read"])
def test_a_failure_gives_up_what_is_in_flight_and_nothing_else(failure: str) -> None:
    requests = [make_request(f"r{n}", 6, max_tokens=6, ignore_eos=True) for n in range(3)]
    driver = AheadDriver(make_scheduler(), ["", "", failure])
    for request in requests:
        driver.add(request)
    lengths = []
    while driver.has_work:
        driver.step()
        lengths.append(requests[0].num_output_tokens)
    # Run 3: its launch fails and the synchronous step follows on what was in flight; or run 4
    # cannot read the step that run 3 launched, and computes that token again.
    expected = {"launch": [0, 1, 3, 3, 4, 5, 6], "read": [0, 1, 2, 3, 3, 4, 5, 6]}
    assert lengths == expected[failure]
    check_endings(driver.scheduler, requests)


def test_an_interrupted_run_loses_nothing() -> None:
    """Ctrl-C while the host waits leaves two steps in flight; the next run makes up for it."""
    request = make_request(max_tokens=6, ignore_eos=True)
    driver = driver_with(request)
    driver.step()
    step = driver.device.under_way[0]
    read = step.read

    def interrupted() -> None:
        step.read = read  # type: ignore[method-assign]
        raise KeyboardInterrupt

    step.read = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt):
        driver.step()
    assert len(driver.in_flight) == 2
    while driver.has_work:
        driver.step()
    check_endings(driver.scheduler, [request])

"""Who waits for a prefix that another one computes, and for how long: by example.

What requests with equal beginnings must give is the driver's business (`test_scheduler_random`).
"""

from __future__ import annotations

import pytest

from support_engine import Driver, make_request, make_scheduler
from tokenmill_engine.config import SchedulerConfig
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from tokenmill_engine.request import Request

SHARED = list(range(1, 21))  # five blocks of four
ENDLESS = {"ignore_eos": True, "max_tokens": 100}


def rows(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in output.scheduled]


def behind(prefix: list[int], request_id: str, **settings: object) -> Request:
    """`prefix` and three tokens of its own."""
    return make_request(request_id, prefix + [ord(request_id)] * 3, **ENDLESS | settings)


def driver_of(**config: object) -> Driver:
    return Driver(make_scheduler(**{"min_awaited_tokens": 8} | config))


def steps_of(driver: Driver, count: int) -> list[list[tuple[str, int, int]]]:
    for _ in range(count):
        driver.step()
    return [rows(step) for step in driver.steps]


def test_a_prefix_is_computed_once_by_those_who_come_together() -> None:
    driver = driver_of()
    driver.add(*(behind(SHARED, name) for name in "abc"))
    assert steps_of(driver, 2) == [
        [("a", 0, 23)],
        [("a", 23, 1), ("b", 20, 3), ("c", 20, 3)],
    ]
    stats = driver.scheduler.engine_stats()
    assert (stats.prefix_cache_queries_total, stats.prefix_cache_hits_total) == (69, 40)


def test_others_enter_meanwhile_and_have_overtaken() -> None:
    driver = driver_of()
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"), make_request("x", 5, **ENDLESS))
    driver.add(behind(SHARED, "c"))
    assert steps_of(driver, 1) == [[("a", 0, 23), ("x", 0, 5)]]
    assert [request.num_overtaken for request in driver.requests] == [0, 1, 0, 0]
    waiting = driver.scheduler.engine_stats().waiting
    assert [(one.request_id, one.is_blocked) for one in waiting] == [("b", False), ("c", False)]
    assert steps_of(driver, 1)[1][2:] == [("b", 20, 3), ("c", 20, 3)]


def test_a_long_prefix_is_awaited_chunk_by_chunk_up_to_where_prompts_part() -> None:
    driver = driver_of(max_num_batched_tokens=12)
    driver.add(behind(SHARED, "a"), behind(SHARED[:14], "b"))
    assert steps_of(driver, 2) == [
        [("a", 0, 12)],  # of b's 17 tokens 12 are under way
        [("a", 12, 11), ("b", 12, 1)],  # and now none: the fourth block is its own
    ]


def test_what_is_still_to_come_in_later_steps_is_not_awaited() -> None:
    driver = driver_of(max_num_batched_tokens=8, max_num_seqs=8)
    driver.add(make_request("x", 1, **ENDLESS))
    driver.step()
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"))
    assert steps_of(driver, 1)[1:] == [[("x", 1, 1), ("a", 0, 7)]]  # one full block
    assert driver.requests[2].num_overtaken == 0


@pytest.mark.parametrize(("num_shared", "is_held"), [(7, False), (8, True)])
def test_less_than_the_least_is_computed_twice(num_shared: int, is_held: bool) -> None:
    driver = driver_of()
    driver.add(behind(SHARED[:num_shared], "a"), behind(SHARED[:num_shared], "b"))
    computes = num_shared + 3
    both = [("a", 0, computes), ("b", 0, computes)]
    assert steps_of(driver, 1) == [both[:1] if is_held else both]


def test_only_what_lies_behind_the_cached_prefix_counts() -> None:
    driver = driver_of()
    driver.add(behind(SHARED[:16], "x"))
    driver.step()
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"))
    assert steps_of(driver, 1)[1][1:] == [("a", 16, 7), ("b", 16, 7)]


@pytest.mark.parametrize(
    "config",
    [{"max_overtakes": 0}, {"enable_prefix_caching": False}, {"min_awaited_tokens": 64}],
    ids=str,
)
def test_nobody_waits_when(config: dict[str, object]) -> None:
    driver = driver_of(**config)
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"))
    assert steps_of(driver, 1) == [[("a", 0, 23), ("b", 0, 23)]]


def test_another_tenants_prefix_is_not_awaited() -> None:
    driver = driver_of()
    driver.add(behind(SHARED, "a"), behind(SHARED, "b", cache_salt="tenant"))
    assert steps_of(driver, 1) == [[("a", 0, 23), ("b", 0, 23)]]


def test_whoever_was_passed_often_enough_computes_it_itself() -> None:
    driver = driver_of(max_overtakes=2, policy="priority")
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"))
    driver.add(*(make_request(name, 2, **ENDLESS) for name in "xyz"))
    driver.in_flight = lambda _output: driver.scheduler.abort("a") and None
    driver.step()
    driver.add(behind(SHARED, "c", priority=-1))
    assert steps_of(driver, 1) == [
        [("a", 0, 23), ("x", 0, 2), ("y", 0, 2)],
        [("x", 2, 1), ("y", 2, 1), ("c", 0, 23), ("b", 0, 23), ("z", 0, 2)],
    ]


def test_the_place_of_one_that_waits_is_kept() -> None:
    driver = driver_of(max_num_seqs=2)
    driver.add(behind(SHARED, "a"), behind(SHARED, "b"), make_request("x", 2, **ENDLESS))
    assert steps_of(driver, 2) == [[("a", 0, 23)], [("a", 23, 1), ("b", 20, 3)]]


def test_when_the_one_that_computes_it_is_gone_the_next_one_does() -> None:
    driver = driver_of()
    driver.add(*(behind(SHARED, name) for name in "abc"))
    driver.in_flight = lambda _output: driver.scheduler.abort("a") and None
    assert steps_of(driver, 2) == [[("a", 0, 23)], [("b", 0, 23)]]


def test_what_is_in_flight_is_awaited_too() -> None:
    scheduler = make_scheduler(min_awaited_tokens=8)
    for name in "ab":
        scheduler.add(behind(SHARED, name))
    first = scheduler.schedule()
    scheduler.take_off(first)
    second = scheduler.schedule(ahead=True)
    assert (rows(first), rows(second)) == ([("a", 0, 23)], [("a", 23, 1)])


def test_a_block_with_an_unread_token_has_no_hash_yet() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", SHARED[:7], **ENDLESS))
    steps = [scheduler.schedule()]
    scheduler.take_off(steps[0])
    scheduler.add(make_request("x", 2, **ENDLESS))  # or nobody would ask what is under way
    steps.append(scheduler.schedule(ahead=True))
    assert rows(steps[1]) == [("a", 7, 1), ("x", 0, 2)]
    scheduler.take_off(steps[1])
    for step in steps:
        scheduler.land(step)
        sampled = tuple(SampledToken(30) for _ in step.sampling)
        scheduler.update_from_output(step, ModelRunnerOutput(sampled))
    scheduler.add(make_request("b", [*SHARED[:7], 30, 5], **ENDLESS))
    assert rows(scheduler.schedule())[2:] == [("b", 8, 1)]


def test_the_least_must_be_a_number_of_tokens() -> None:
    with pytest.raises(ConfigError, match="min_awaited_tokens"):
        SchedulerConfig(min_awaited_tokens=0)

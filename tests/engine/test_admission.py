"""Admission by example: bounded overtaking, suspects alone, what the stats tell of the queue."""

from __future__ import annotations

import pytest

from support_engine import Driver, expected_output, make_request, make_scheduler
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.outputs import SchedulerOutput, WaitingRequest

ENDLESS = {"ignore_eos": True, "max_tokens": 100}


def rows(output: SchedulerOutput) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.num_tokens) for item in output.scheduled]


def order_of_admission(driver: Driver) -> list[str]:
    return list(dict.fromkeys(row[0] for step in driver.steps for row in rows(step)))


@pytest.mark.parametrize("max_overtakes", [0, 2])
def test_a_big_request_at_the_head_is_overtaken_so_often_and_no_more(max_overtakes: int) -> None:
    scheduler = make_scheduler(
        num_blocks=20, block_size=4, max_num_batched_tokens=200, max_overtakes=max_overtakes
    )
    driver = Driver(scheduler)
    driver.add(make_request("a", 30, max_tokens=10, ignore_eos=True))
    driver.step()
    driver.add(make_request("big", 64, max_tokens=4))
    driver.add(*(make_request(f"small{i}", 2, max_tokens=2, ignore_eos=True) for i in range(4)))
    driver.run()
    assert order_of_admission(driver).index("big") == 1 + max_overtakes
    assert driver.requests[1].num_overtaken == max_overtakes
    for request in driver.requests:
        expected = expected_output(request, scheduler.config)
        assert (request.output_token_ids, request.finish_reason) == expected


def test_the_bound_must_be_a_number() -> None:
    with pytest.raises(ConfigError, match="max_overtakes"):
        make_scheduler(max_overtakes=-1)


def test_a_preempted_request_is_not_overtaken() -> None:
    driver = Driver(make_scheduler(num_blocks=6, block_size=4, max_model_len=24))
    driver.add(make_request("a", 8, max_tokens=16, ignore_eos=True))
    driver.add(make_request("b", 3, max_tokens=12, ignore_eos=True))
    while not driver.requests[1].num_preemptions:
        driver.step()
    driver.add(make_request("c", 1, max_tokens=1))
    waiting = driver.scheduler.engine_stats().waiting
    assert [(one.request_id, one.overtakes_left) for one in waiting] == [("b", 0), ("c", 8)]
    num_before = len(driver.steps)
    driver.run()
    later = [row[0] for step in driver.steps[num_before:] for row in rows(step)]
    assert later.index("b") < later.index("c")


def test_a_suspect_is_prefilled_alone_while_others_decode() -> None:
    driver = Driver(make_scheduler(max_num_batched_tokens=8))
    driver.add(make_request("decoding", 4, **ENDLESS), make_request("prompt", 10, **ENDLESS))
    driver.step()
    driver.add(make_request("suspect", 11, alone=True, **ENDLESS))
    driver.add(make_request("next", 2, **ENDLESS))
    for _ in range(5):
        driver.step()
    assert [rows(step)[1:] for step in driver.steps[1:]] == [
        [("prompt", 4, 6)],  # the budget has a row left, but a prompt is under way
        [("prompt", 10, 1), ("suspect", 0, 6)],
        [("prompt", 11, 1), ("suspect", 6, 5)],  # again, and nobody enters
        [("prompt", 12, 1), ("suspect", 11, 1), ("next", 0, 2)],
        [("prompt", 13, 1), ("suspect", 12, 1), ("next", 2, 1)],
    ]


def test_two_suspects_are_prefilled_one_after_the_other() -> None:
    driver = Driver(make_scheduler())
    driver.add(*(make_request(name, 1, alone=True, **ENDLESS) for name in "ab"))
    driver.step()
    driver.step()
    assert [rows(step) for step in driver.steps] == [[("a", 0, 1)], [("a", 1, 1), ("b", 0, 1)]]


def test_the_stats_name_who_waits_for_blocks_and_how_often_it_may_be_passed() -> None:
    driver = Driver(make_scheduler(num_blocks=12, block_size=4, max_num_seqs=2, max_overtakes=3))
    driver.add(make_request("a", 30, max_tokens=10, ignore_eos=True), make_request("big", 40))
    driver.add(*(make_request(f"small{i}", 2, max_tokens=4, ignore_eos=True) for i in range(2)))
    driver.step()
    assert driver.scheduler.engine_stats().waiting == (
        WaitingRequest("big", num_tokens=40, is_blocked=True, overtakes_left=2),
        WaitingRequest("small1", num_tokens=2, is_blocked=False, overtakes_left=3),
    )


def test_prefill_blocks_and_chunks_are_those_of_the_prompt() -> None:
    driver = Driver(make_scheduler(block_size=4, max_num_batched_tokens=8))
    driver.add(make_request("a", 20, **ENDLESS))
    blocks = []
    for _ in range(4):
        driver.step()
        blocks.append(driver.scheduler.engine_stats().num_prefill_blocks)
    assert blocks == [5, 5, 0, 0]
    assert driver.requests[0].num_prefill_chunks == 3
    assert driver.scheduler.engine_stats().step_tokens == 8

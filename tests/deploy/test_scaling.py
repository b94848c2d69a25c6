"""The autoscaler's signals on a replayed load (tests/scaling), with the numbers of the manifest."""

from __future__ import annotations

from collections import deque

import pytest

from scaling.autoscaler import Autoscaler, Trigger, lag, pending, work
from scaling.curve import LONG_ANSWER_TOKENS, Request, arrivals, duration_s, rate_at
from scaling.pool import Pool, Shape
from scaling.simulate import Replay, limits_of_the_manifest, replay, target_of_the_manifest


@pytest.fixture(scope="module")
def by_work() -> Replay:
    return replay("work", [work(target_of_the_manifest())])


@pytest.fixture(scope="module")
def by_lag() -> Replay:
    return replay("lag alone", [lag()])


def long_answer(result: Replay) -> Request:
    (found,) = (each for each in result.requests if each.answer_tokens == LONG_ANSWER_TOKENS)
    return found


def replicas(result: Replay, second: float) -> float:
    return next(value for at, value in result.points["replicas"] if at >= second)


def test_work_keeps_the_worker_of_a_long_answer(by_work: Replay) -> None:
    request = long_answer(by_work)
    assert request.handovers == 0
    assert request.ended_s is not None
    alone_s = LONG_ANSWER_TOKENS / Shape().tokens_per_s_of_one
    assert request.ended_s - request.arrives_s < alone_s + Shape().load_s + 30


def test_lag_alone_takes_it_away_again_and_again(by_lag: Replay) -> None:
    assert long_answer(by_lag).handovers > 1
    assert by_lag.restarts > 1


def test_work_goes_to_nothing_after_the_last_request_and_not_before(by_work: Replay) -> None:
    ended_s = long_answer(by_work).ended_s
    assert ended_s is not None
    limits = limits_of_the_manifest()
    assert replicas(by_work, ended_s) >= 1
    assert replicas(by_work, ended_s + limits.cooldown_s + 3 * limits.polling_s + 10) == 0
    assert by_work.restarts == 0


def test_counts_do_not_see_that_requests_are_large(by_work: Replay) -> None:
    by_counts = replay("lag and pending", [lag(), pending()])
    assert by_counts.unfinished == by_work.unfinished == 0
    assert by_work.wait_quantile_s(0.99) < by_counts.wait_quantile_s(0.99) / 2


def test_the_curve_is_what_it_says() -> None:
    requests = arrivals()
    expected = sum(rate_at(second) for second in range(int(duration_s())))
    assert len(requests) == pytest.approx(expected, rel=0.05)
    assert all(request.answer_tokens <= request.limit_tokens for request in requests)
    assert requests == arrivals()


def pool_of(workers: int) -> Pool:
    pool = Pool(deque())
    pool.resize(workers)
    return pool


def decide(trigger_value: float, *, workers: int, seconds: range) -> list[int]:
    """What the autoscaler says at each second of a constant value with target 10."""
    pool = pool_of(workers)
    trigger = Trigger("given", 10.0, lambda _pool: trigger_value)
    scaler = Autoscaler([trigger], limits_of_the_manifest())
    said = []
    for second in seconds:
        pool.now_s = float(second)
        pool.resize(scaler.decide(pool))
        said.append(pool.replicas)
    return said


def test_from_nothing_to_one_at_the_next_poll() -> None:
    limits = limits_of_the_manifest()
    said = decide(1.0, workers=0, seconds=range(1, limits.polling_s + 1))
    assert said == [0] * (limits.polling_s - 1) + [1]


def test_up_in_steps_that_the_policy_allows() -> None:
    limits = limits_of_the_manifest()
    said = decide(1000.0, workers=1, seconds=range(1, 200))
    for second, number in enumerate(said):
        before = said[max(second - limits.up_period_s + 1, 0)]
        assert number <= before + limits.up_pods
    assert said[-1] == limits.max_replicas


def test_down_only_after_the_window_and_one_by_one() -> None:
    limits = limits_of_the_manifest()
    pool = pool_of(8)
    trigger = Trigger("given", 10.0, lambda pool: 80.0 if pool.now_s <= 300 else 10.0)
    scaler = Autoscaler([trigger], limits)
    falls = []
    for second in range(1, 1200):
        pool.now_s = float(second)
        before = pool.replicas
        pool.resize(scaler.decide(pool))
        if pool.replicas < before:
            falls.append((second, before - pool.replicas))
    assert {number for _, number in falls} == {limits.down_pods}
    assert falls[0][0] > 300 + limits.down_window_s - 15
    assert pool.replicas == 1


def test_within_a_tenth_of_the_target_nothing_moves() -> None:
    assert set(decide(43.0, workers=4, seconds=range(1, 400))) == {4}

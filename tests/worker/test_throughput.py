"""The mean over a sliding window, by a clock of the test's own."""

from __future__ import annotations

import pytest

from tokenmill_worker.throughput import Throughput


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_steady_rate_is_told_as_it_is(clock: Clock) -> None:
    rate = Throughput(clock)
    for second in range(1, 31):
        clock.now_s += 1
        assert rate.per_second(50 * second) == pytest.approx(50)


def test_what_was_before_the_window_is_forgotten(clock: Clock) -> None:
    rate = Throughput(clock)
    clock.now_s += 4
    rate.per_second(4000)
    for _ in range(11):
        clock.now_s += 1
        last = rate.per_second(4000)
    assert last == 0


def test_asking_again_at_once_changes_nothing(clock: Clock) -> None:
    rate = Throughput(clock)
    clock.now_s += 5
    assert [rate.per_second(500) for _ in range(20)] == [100] * 20
    clock.now_s += 5
    assert rate.per_second(1000) == 100


def test_nothing_yet(clock: Clock) -> None:
    assert Throughput(clock).per_second(0) == 0

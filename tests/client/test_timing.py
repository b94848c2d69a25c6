"""The keywords `not_before`, `deadline_s`, `queue_deadline_s`, `first_token_deadline_s`."""

from __future__ import annotations

import math
import time
from datetime import UTC, datetime, timedelta, timezone

import pytest

from tokenmill import Client, DeadlineExceeded, InvalidRequest, limits
from tokenmill._timing import check_timing
from tokenmill.calls import QueueCalls
from tokenmill.keys import Keyspace
from tokenmill.scripts import run

HOUR_S = 3600.0


@pytest.mark.parametrize(
    "make",
    [
        lambda now_s: timedelta(hours=1),
        lambda now_s: now_s + HOUR_S,
        lambda now_s: int(now_s + HOUR_S),
        lambda now_s: datetime.fromtimestamp(now_s + HOUR_S, tz=UTC),
        lambda now_s: datetime.fromtimestamp(now_s + HOUR_S, tz=timezone(timedelta(hours=-7))),
    ],
)
def test_not_before_may_be_said_in_three_ways(make):
    now_s = time.time()
    timing = check_timing({"not_before": make(now_s)})
    assert timing.not_before_s == pytest.approx(now_s + HOUR_S, abs=30)
    assert timing.delay_s() == pytest.approx(HOUR_S, abs=30)
    assert timing.patience_s() == pytest.approx(HOUR_S + limits.DEFAULT_DEADLINE_S + 10, abs=30)


@pytest.mark.parametrize("past", [1.0, timedelta(seconds=-5), datetime(2001, 1, 1, tzinfo=UTC)])
def test_a_moment_that_is_over_means_at_once(past):
    timing = check_timing({"not_before": past})
    assert timing.delay_s() == 0
    assert timing.enqueue_options()["delay_ms"] == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (datetime(2030, 1, 1), "time zone"),
        (timedelta(hours=25), "86400 seconds ahead"),
        (datetime.max.replace(tzinfo=UTC), "86400 seconds ahead"),
        (math.nan, "since the epoch"),
        (math.inf, "since the epoch"),
        (True, "since the epoch"),
        (-5, "since the epoch"),
        (10**13, "since the epoch"),
        ("tomorrow", "since the epoch"),
    ],
)
def test_any_other_moment_is_refused(value, message):
    with pytest.raises(InvalidRequest, match=message) as caught:
        check_timing({"not_before": value})
    assert caught.value.field == "not_before"
    assert "tomorrow" not in str(caught.value)


@pytest.mark.parametrize("name", ["queue_deadline_s", "first_token_deadline_s"])
@pytest.mark.parametrize("value", [0, -1, math.nan, True, "5", 11])
def test_the_further_deadlines_lie_within_the_whole(name, value):
    with pytest.raises(InvalidRequest, match="at most 10") as caught:
        check_timing({"deadline_s": 10, name: value})
    assert caught.value.field == name


def test_what_was_not_asked_for_is_not_sent():
    assert check_timing({"deadline_s": 10}).enqueue_options() == {
        "delay_ms": 0, "deadline_ms": 10_000, "queue_deadline_ms": None,
        "first_token_deadline_ms": None,
    }  # fmt: skip


def test_a_submitted_request_has_its_times_in_its_status(client: Client):
    handle = client.submit(
        "x", not_before=timedelta(hours=1), deadline_s=100, queue_deadline_s=10,
        first_token_deadline_s=20,
    )  # fmt: skip
    status = client.status(handle.id)
    start = status.not_before_at
    assert status.state == "delayed"
    assert start is not None
    assert abs((start - status.created_at).total_seconds() - HOUR_S) < 30
    assert status.deadline_at - start == timedelta(seconds=100)
    assert status.queue_deadline_at is not None
    assert status.queue_deadline_at - start == timedelta(seconds=10)
    assert status.first_token_deadline_at is not None
    assert status.first_token_deadline_at - start == timedelta(seconds=20)


def test_without_them_the_status_has_none(client: Client):
    status = client.status(client.submit("x").id)
    assert status.state == "queued"
    assert (status.not_before_at, status.queue_deadline_at) == (None, None)
    assert status.first_token_deadline_at is None


def test_a_delayed_request_is_answered_when_its_time_has_come(client: Client, running_worker):
    before_s = time.time()
    completion = client.generate("x", not_before=timedelta(seconds=0.3))
    assert completion.finish_reason == "stop"
    assert time.time() - before_s >= 0.3


def test_a_queue_deadline_raises_for_who_waits(client: Client, redis_client, keyspace: Keyspace):
    handle = client.submit("x", queue_deadline_s=0.001)
    while run(redis_client, QueueCalls(keyspace).tick(jitter=0.5)).expired == 0:
        pass
    with pytest.raises(DeadlineExceeded, match="queue deadline"):
        client.result(handle.id, timeout_s=5)

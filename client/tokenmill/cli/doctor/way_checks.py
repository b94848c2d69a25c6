"""The way to Redis: rights of this user, round trips, and whether the clocks agree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any, Final, cast

from redis.exceptions import NoPermissionError

from tokenmill._link import Home
from tokenmill._redis_errors import REDIS_ERRORS, lacks_right
from tokenmill.cli.partitions import operator_calls, text
from tokenmill.scripts import run

from .finding import Finding
from .subject import Subject

#: Of the commands that are tried: those that only a worker, or only a producer, cannot do without.
FOR_WORKERS: Final = frozenset({
    "xreadgroup", "xgroup|createconsumer", "xpending", "xclaim", "xtrim", "hscan", "hkeys",
    "zrange", "zrangebyscore", "set",
})  # fmt: skip
FOR_PRODUCERS: Final = frozenset({"subscribe"})
PINGS: Final = 21
#: Each token crosses this way once or twice, and a worker's writes wait for their replies.
SLOW_MS: Final = 5.0
VERY_SLOW_MS: Final = 50.0
#: Deadlines and due times follow the clock of Redis; clients and logs have their own.
CLOCK_WARNING_S: Final = 1.0


def check_rights(subject: Subject) -> Iterator[Finding]:
    """Whoever may either enqueue or work has what it takes for one of the two roles."""
    for home in subject.servers:
        refused = _refused_commands(home)
        missing = min((refused - FOR_WORKERS, refused - FOR_PRODUCERS), key=len)
        if missing:
            yield Finding(
                severity="error",
                check="acl",
                problem="this user may neither enqueue requests nor work for them",
                evidence=f"ACL WHOAMI: {_user(home)}; refused: {', '.join(sorted(missing))}",
                way_out="take its rules from deploy/redis/users.acl (ACL SETUSER, or ACL LOAD); "
                "keys and channels must be those of this namespace",
            )


def _refused_commands(home: Home) -> set[str]:
    """Tried on keys that no request can have."""
    try:
        missing = run(home.redis, operator_calls(home).probe())
        refused = set(missing)
    except REDIS_ERRORS as error:
        if not lacks_right(error):
            raise
        refused = {"eval, evalsha or keys of this namespace"}
    try:
        with cast(Any, home.redis).pubsub() as listener:  # redis-py's pubsub is untyped
            listener.subscribe(home.keys.channel("~"))
            listener.get_message(timeout=1.0)
    except NoPermissionError:
        refused.add("subscribe")
    return refused


def _user(home: Home) -> str:
    try:
        return str(home.redis.acl_whoami())
    except NoPermissionError:
        return "not told"


def check_latency(subject: Subject) -> Iterator[Finding]:
    for home in subject.servers:
        times_ms = sorted(_ping_ms(home) for _ in range(PINGS))
        median_ms = statistics.median(times_ms)
        if median_ms > SLOW_MS:
            yield Finding(
                severity="error" if median_ms > VERY_SLOW_MS else "warning",
                check="latency",
                problem="Redis answers slowly: tokens come late and in lumps",
                evidence=f"{PINGS} PINGs: median {median_ms:.1f} ms, slowest {times_ms[-1]:.1f} ms",
                way_out="put workers and Redis into one network; SLOWLOG GET and LATENCY DOCTOR "
                "say whether the server itself is busy",
            )


def _ping_ms(home: Home) -> float:
    began_s = time.perf_counter()
    home.redis.ping()
    return (time.perf_counter() - began_s) * 1000


def check_clock(subject: Subject) -> Iterator[Finding]:
    for home in subject.servers:
        skew_s = _skew_s(home)
        if abs(skew_s) > CLOCK_WARNING_S:
            yield Finding(
                severity="warning",
                check="clock",
                problem="the clocks of Redis and of this machine disagree: a not_before given as a "
                "time, and times in logs, are off",
                evidence=f"TIME: Redis is {abs(skew_s):.1f} s "
                f"{'ahead' if skew_s > 0 else 'behind'}",
                way_out="run NTP on both",
            )


def _skew_s(home: Home) -> float:
    """How far the clock of Redis is ahead, but for half a round trip."""
    before_s = time.time()
    seconds, microseconds = text(home.redis.time())
    after_s = time.time()
    return float(seconds + microseconds / 1e6 - (before_s + after_s) / 2)

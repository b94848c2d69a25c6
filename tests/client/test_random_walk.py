"""The scripts under a random walk, with the whole keyspace checked after every step.

The walk must be able to fail: known bugs, put into the scripts as text, must be found.
"""

from __future__ import annotations

from collections import Counter

import pytest
from redis.exceptions import ResponseError

from support_redis import ServerBackend, unique_keyspace
from support_walk import Walk
from support_walk_steps import random_step
from tokenmill.scripts import Script, load_script

NUM_SEEDS = 10
STEPS_PER_SEED = 300
#: All of these must happen in the course of the walks, or they do not test what they claim to.
EXPECTED_OUTCOMES = {
    "enqueue OK queued", "enqueue OK held", "enqueue DUP", "enqueue CONFLICT",
    "enqueue FULL memory", "enqueue FULL queue", "enqueue TENANT_FULL tenant",
    "admit OK", "admit DUP", "admit CONFLICT", "admit INVALID", "admit TOO_LARGE", "admit FULL",
    "lease OK", "lease GONE", "lease BUSY", "lease EXPIRED",
    "finish OK", "finish DUP", "finish LOST", "finish BEHIND",
    "used again OK", "release OK queued", "release OK delayed", "release FAILED failed",
    "cancel True", "cancel False",
    "tick promoted", "tick expired", "tick vanished", "tick redelivered", "tick requeued",
    "tick dead", "tick recovered", "tick in_grace",
}  # fmt: skip


def walk_seed(client, seed, num_steps=STEPS_PER_SEED, script_of=load_script):
    """Walk once and say what happened; a failure names the seed and the last steps."""
    walk = Walk(client, unique_keyspace(), seed, script_of)
    try:
        for step in range(num_steps):
            try:
                random_step(walk)
            except AssertionError as error:
                raise AssertionError(
                    f"seed {seed}, step {step}, after {list(walk.history)}: {error}"
                ) from error
    finally:
        walk.close()
    return walk.outcomes


@pytest.mark.timeout(600)
def test_no_walk_finds_a_violation(redis_client):
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        outcomes += walk_seed(redis_client, seed)
    assert not EXPECTED_OUTCOMES - outcomes.keys()


#: These run with the ordinary tests, the others in `make test-all`.
QUICK_MUTANTS = {
    "append without the fence", "append that does not publish", "heartbeat without the fence",
    "finish over a gap", "the body stays after the end", "an ended request ends again",
    "a fence that counts leases only",
    "tick that forgets who vanished", "requeue that keeps the old fence",
}  # fmt: skip
#: name → (script, text, its wrong replacement)
MUTANTS = {
    "append without the fence": (
        "append", "if fences[i] ~= argv[at + 1] then", "if false then"),
    "append without the dense number": (
        "append", "elseif stored < number - 1 then", "elseif false then"),
    "append that is not idempotent": (
        "append", "if stored >= number then", "if false then"),
    "append that does not publish": (
        "append", "call(publish, channel_prefix .. id, payload)", ""),
    "a log that lives for ever": (
        "append", "if number == 1 then", "if false then"),
    "heartbeat without the fence": (
        "heartbeat", "if call('HGET', KEYS[1], id) ~= ARGV[first + 1] then", "if false then"),
    "finish without the fence": (
        "finish", "if redis.call('HGET', OWNERS, id) ~= fence then", "if false then"),
    "finish over a gap": (
        "finish", "if stored ~= seq - 1 then", "if false then"),
    "release without the fence": (
        "release", "if redis.call('HGET', OWNERS, id) ~= fence then", "if false then"),
    "a lease taken from its holder": (
        "lease", "elseif owner ~= worker or", "elseif"),
    "a lease that keeps its place in the window": (
        "lease", "    leave_window(id, class, tenant)\n  elseif", "  elseif"),
    "a superseded entry is leased": (
        "lease", "if not state or current ~= entry or at ~= ready then", "if not state then"),
    "enqueue that forgets the other content": (
        "enqueue", "known[2] == sha and 'DUP' or 'CONFLICT'", "'DUP'"),
    "enqueue over the window": (
        "enqueue", "< options.window", "<= options.window"),
    "the body stays after the end": (
        "cancel", "redis.call('HDEL', record, 'body')", ""),
    "the end leaves its deadline": (
        "cancel", "redis.call('ZREM', DEADLINES, id)", ""),
    "an undelivered entry is deleted": (
        "cancel", "if redis.call('XACK', stream, GROUP, entry) == 1",
        "if redis.call('XACK', stream, GROUP, entry) >= 0"),
    "an ended request ends again": (
        "cancel", "if not was or TERMINAL[was] then", "if not was then"),
    "admit that drops what it refuses in silence": (
        "admit", "settle(id, 'failed', code, message)", ""),
    "tick without outage grace": (
        "tick", "reap_after = time + options.lease_ms", "reap_after = 0"),
    "tick that drops plain entries": (
        "tick", "      redeliver_plain(ready, entry, consumer, fields)",
        "      drop_read_entry(ready, entry)"),
    "tick that forgets who vanished": (
        "tick", "redis.call('HSET', MAINTENANCE, 'recount', '1')\n      count", "count"),
    "tick that buries without a body": (
        "tick", "if not options.dead_letter_bodies then", "if true then"),
    "tick that leaves the lag unknown": (
        "tick", "do repair_lag(ready) end", "do local _ = ready end"),
    "a fence that counts leases only": (
        "lease", "return attempt .. '.' .. created", "return attempt .. '.0'"),
    "enqueue that leaves the lease of a lost record": (
        "enqueue", "  redis.call('HDEL', OWNERS, id)\n  redis.call('ZREM', DELAYED, id)\n  if",
        "  redis.call('ZREM', DELAYED, id)\n  if"),
    "enqueue that leaves the log of a lost record": (
        "enqueue", "  redis.call('DEL', log_key(id))\n", ""),
    "enqueue that forgets what a lost record counted for": (
        "enqueue", "redis.call('HSET', MAINTENANCE, 'recount', '1')", ""),
    "requeue that keeps the old fence": (
        "tick", "redis.call('HDEL', OWNERS, id)\n  drop_read_entry", "drop_read_entry"),
}  # fmt: skip


def _quick_or_slow():
    return [
        name if name in QUICK_MUTANTS else pytest.param(name, marks=pytest.mark.slow)
        for name in MUTANTS
    ]


@pytest.mark.parametrize("mutant", _quick_or_slow())
def test_the_walk_finds_a_planted_bug(server, mutant):
    name, text, wrong = MUTANTS[mutant]
    original = load_script(name).source
    assert original.count(text) == 1
    mutated = Script(name, original.replace(text, wrong))

    def script_of(wanted):
        return mutated if wanted == name else load_script(wanted)

    def walk_all_seeds():
        for seed in range(NUM_SEEDS):
            walk_seed(client, seed, script_of=script_of)

    # Some bugs make a later command fail in Redis, which is a finding, too.
    findings = (AssertionError, ResponseError)
    with ServerBackend(server).client() as client, pytest.raises(findings):
        walk_all_seeds()

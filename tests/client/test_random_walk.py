"""The scripts under a random walk, with the whole keyspace checked after every step.

The walk must be able to fail: known bugs, put into the scripts as text, must be found.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support_mutant_table import MUTANTS
from support_mutants import hunt, scripts_with
from support_redis import ServerBackend
from support_walk_steps import NUM_SEEDS, walk_seed

#: All of these must happen in the course of the walks, or they do not test what they claim to.
EXPECTED_OUTCOMES = {
    "enqueue OK queued", "enqueue OK held", "enqueue OK delayed", "enqueue DUP", "enqueue CONFLICT",
    "enqueue FULL memory", "enqueue FULL queue", "enqueue TENANT_FULL tenant",
    "admit OK", "admit DUP", "admit CONFLICT", "admit INVALID", "admit TOO_LARGE", "admit FULL",
    "lease OK", "lease GONE", "lease BUSY", "lease EXPIRED",
    "finish OK", "finish DUP", "finish LOST", "finish BEHIND",
    "used again OK", "release OK queued", "release OK delayed", "release FAILED failed",
    "cancel True", "cancel False",
    "tick promoted", "tick expired", "tick vanished", "tick redelivered", "tick requeued",
    "dead worker_crash", "dead too_many_attempts", "dead undeliverable", "tick recovered",
    "tick in_grace",
    "requeue_dead OK", "requeue_dead NO_BODY", "requeue_dead NOT_DEAD", "requeue_dead UNKNOWN",
    "lease PAUSED", "paused", "move MOVED", "move SAME", "move TAKEN", "move UNKNOWN",
    "cancel_waiting", "purge", "weight raised", "weight set", "deadline passed",
    "queue_deadline passed", "queue_deadline passed, too late", "first_token_deadline passed",
    "first_token_deadline passed, too late",
}  # fmt: skip


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "redis_backend", ["valkey", pytest.param("fakeredis", marks=pytest.mark.slow)], indirect=True
)
def test_no_walk_finds_a_violation(redis_client):
    outcomes: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        outcomes += walk_seed(redis_client, seed)
    assert not EXPECTED_OUTCOMES - outcomes.keys()


#: These run with the ordinary tests, the others in `make test-all`.
QUICK_MUTANTS = {
    "append without the fence", "heartbeat without the fence", "an ended request ends again",
    "a fence that counts leases only", "a delayed request that is served at once",
}  # fmt: skip


def _quick_or_slow():
    return [
        name if name in QUICK_MUTANTS else pytest.param(name, marks=pytest.mark.slow)
        for name in MUTANTS
    ]


@pytest.mark.parametrize("mutant", _quick_or_slow())
def test_the_walk_finds_a_planted_bug(server, mutant):
    with ServerBackend(server).client() as client:
        assert hunt(client, mutant) is not None, "survives"


def test_every_planted_bug_is_a_bug_in_the_scripts_of_today():
    for mutant in MUTANTS:
        scripts_with(mutant)

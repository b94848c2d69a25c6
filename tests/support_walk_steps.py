"""The steps of the random walk with their weights, and a whole walk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import redis
from redis.exceptions import ResponseError

import support_walk_mishaps as mishaps
import support_walk_requests as requests
import support_walk_workers as workers
from support_redis import unique_keyspace
from support_walk import Walk
from tokenmill.scripts import Script, load_script

NUM_SEEDS = 10
STEPS_PER_SEED = 300

STEPS: dict[str, tuple[int, Callable[[Walk], None]]] = {
    step.__name__: (weight, step)
    for weight, step in (
        (11, requests.enqueue), (2, requests.enqueue_for_later), (2, requests.enqueue_known_id),
        (1, requests.enqueue_too_large), (4, requests.xadd_plain), (2, requests.xadd_junk),
        (3, requests.cancel), (1, requests.set_memory_flag), (3, requests.change_weight),
        (2, requests.crowd),
        (3, requests.requeue_dead), (2, requests.purge), (1, requests.pause), (1, requests.move),
        (1, requests.cancel_waiting),
        (9, workers.take), (2, workers.read_and_die), (3, workers.lease_twice_delivered),
        (1, workers.lease_what_another_holds), (10, workers.append),
        (2, workers.append_stored_or_gap), (3, workers.append_stale), (3, workers.heartbeat),
        (3, workers.heartbeat_stale), (8, workers.finish), (2, workers.finish_stale),
        (3, workers.hand_over), (5, workers.retry_later), (1, workers.release_stale),
        (1, mishaps.pass_deadline), (2, mishaps.tick_after_deadline),
        (2, mishaps.take_after_deadline), (4, mishaps.pass_delay),
        (5, mishaps.age_pending), (6, mishaps.tick), (2, mishaps.tick_in_grace),
        (1, mishaps.tick_after_lost_pending),
        (1, mishaps.tick_after_vanished), (2, mishaps.use_id_again), (1, mishaps.lose_end_of_log),
        (3, mishaps.lose_every_worker), (2, mishaps.lose_every_reader),
    )
}  # fmt: skip
_NAMES = list(STEPS)
_WEIGHTS = [weight for weight, _ in STEPS.values()]


class Violation(AssertionError):
    """What was found wrong (`finding`, one line), in which walk, after how many steps."""

    def __init__(self, seed: int, step: int, steps: list[str], finding: Exception) -> None:
        super().__init__(f"seed {seed}, step {step}, after {steps}: {finding}")
        self.seed = seed
        self.step = step
        self.finding = str(finding).partition("\n")[0] or f"an assertion of the step {steps[-1]}"


def random_step(walk: Walk) -> None:
    (name,) = walk.random.choices(_NAMES, _WEIGHTS)
    walk.step(name, STEPS[name][1])


def walk_seed(
    client: redis.Redis,
    seed: int,
    num_steps: int = STEPS_PER_SEED,
    script_of: Callable[[str], Script] = load_script,
) -> Counter[str]:
    """Walk once and say what happened.

    Raises:
        Violation: something is wrong, or Redis refused a command.
    """
    walk = Walk(client, unique_keyspace(), seed, script_of)
    try:
        for step in range(num_steps):
            try:
                random_step(walk)
            except (AssertionError, ResponseError) as error:
                raise Violation(seed, step, list(walk.history), error) from error
    finally:
        walk.close()
    return walk.outcomes

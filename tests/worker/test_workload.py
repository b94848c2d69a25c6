"""The work that a worker has left, and its speed, by a clock and an engine of the test's own."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from support_worker import make_delivery, make_output
from tokenmill_engine.outputs import EngineStats
from tokenmill_worker.conversion import book
from tokenmill_worker.delivery import Deliveries
from tokenmill_worker.workload import MEMORY_S, Workload


@dataclass
class Engine:
    """Generates what the test says; its clock stands still meanwhile."""

    now_s: float = 0.0
    is_full: bool = False
    stats: EngineStats = field(default_factory=EngineStats)

    def work(self, seconds: float, **added: int) -> None:
        self.now_s += seconds
        totals = {name: getattr(self.stats, name) + number for name, number in added.items()}
        self.stats = replace(self.stats, **totals)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def workload(engine: Engine) -> Workload:
    return Workload(
        Deliveries(), lambda: engine.stats, lambda: engine.is_full, lambda: engine.now_s
    )


def test_what_is_left_of_a_request() -> None:
    deliveries = Deliveries()
    workload = Workload(deliveries, EngineStats, lambda: False)
    delivery = make_delivery(body='{"prompt_token_ids":[1,2,3],"max_tokens":10}')
    deliveries.add(delivery)
    assert workload.remaining_tokens() == 13  # not tokenized: as it was estimated

    delivery.prompt_tokens, delivery.max_tokens = 3, 10
    assert workload.remaining_tokens() == 13
    book(delivery, make_output(1, num_output_tokens=1))
    assert workload.remaining_tokens() == 9
    book(delivery, make_output(2, 3, num_output_tokens=3))
    assert workload.remaining_tokens() == 7
    deliveries.remove(delivery)
    assert workload.remaining_tokens() == 0


def test_while_it_is_full_the_speed_is_averaged(engine: Engine, workload: Workload) -> None:
    assert workload.capacity_tokens_per_s is None
    for tokens in (1000, 1000, 400):
        engine.work(10, prompt_tokens_total=tokens // 2, generation_tokens_total=tokens // 2)
        engine.is_full = True
        workload.measure()
    kept = math.exp(-10 / MEMORY_S)
    assert workload.capacity_tokens_per_s == pytest.approx(100 * kept + 40 * (1 - kept))


def test_with_room_left_only_more_counts(engine: Engine, workload: Workload) -> None:
    for tokens in (1000, 10, 0, 1500, 20):
        engine.work(10, generation_tokens_total=tokens)
        engine.is_full = False
        workload.measure()
    assert workload.capacity_tokens_per_s == 150


def test_a_worker_that_just_became_full_says_nothing_yet(
    engine: Engine, workload: Workload
) -> None:
    engine.work(10, generation_tokens_total=1000)
    engine.is_full = False
    workload.measure()
    engine.work(10, generation_tokens_total=10)  # idle for most of it
    engine.is_full = True
    workload.measure()
    assert workload.capacity_tokens_per_s == 100


def test_cached_prompts_and_early_ends_are_work_done(engine: Engine, workload: Workload) -> None:
    """The queue had counted both."""
    delivery = make_delivery()
    delivery.max_tokens, delivery.num_tokens = 100, 30
    workload.ended(delivery)
    engine.work(10, generation_tokens_total=30, prefix_cache_hits_total=900)
    engine.is_full = True
    workload.measure()
    assert workload.capacity_tokens_per_s == 100


def test_looking_too_often_changes_nothing(engine: Engine, workload: Workload) -> None:
    engine.work(0.5, generation_tokens_total=1000)
    engine.is_full = True
    workload.measure()
    assert workload.capacity_tokens_per_s is None
    engine.work(0.5)
    engine.is_full = True
    workload.measure()
    assert workload.capacity_tokens_per_s == 1000

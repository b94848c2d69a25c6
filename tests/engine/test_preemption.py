"""Policies, the waiting queue, whom to preempt, and what must stay free."""

from __future__ import annotations

import random

import pytest

from support_engine import make_request
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.policy import FcfsPolicy, PriorityPolicy, WaitingQueue, make_policy
from tokenmill_engine.preemption import Preemption
from tokenmill_engine.request import Request
from tokenmill_engine.step_builder import StepBuilder


def arrivals(*priorities: int) -> list[Request]:
    requests = []
    for arrival, priority in enumerate(priorities):
        request = make_request(f"r{arrival}", priority=priority)
        request.arrival = arrival
        requests.append(request)
    return requests


def running(kv: KVCacheManager, *computed_tokens: int, priorities=()) -> list[Request]:
    requests = arrivals(*(priorities or [0] * len(computed_tokens)))
    for request, computed in zip(requests, computed_tokens, strict=True):
        request.token_ids = [request.arrival + 1] * (computed + 1)
        if computed:
            assert kv.allocate(request, computed + 1)
        request.num_computed_tokens = computed
    return requests


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2, 3]), ("priority", [1, 3, 0, 2])])
def test_the_queue_follows_the_policy(policy, order) -> None:
    queue = WaitingQueue(make_policy(policy))
    requests = arrivals(5, -1, 5, 0)
    for request in reversed(requests):
        queue.push(request)
    assert [request.arrival for request in queue] == order
    assert [queue.pop().arrival for _ in range(len(queue))] == order
    with pytest.raises(IndexError):
        queue.peek()


@pytest.mark.parametrize("seed", range(5))
def test_the_queue_forgets_what_was_removed_wherever_it_stood(seed: int) -> None:
    rng = random.Random(seed)
    queue, model = WaitingQueue(FcfsPolicy()), []
    for request in arrivals(*[0] * 400):
        queue.push(request)
        model.append(request)
        while model and rng.random() < 0.45:
            gone = rng.choice(model)
            model.remove(gone)
            queue.remove(gone)
        assert len(queue) == len(model)
        if model:
            assert queue.peek() is model[0]
    for gone in model[::2]:
        queue.remove(gone)
    assert list(queue) == model[1::2]
    with pytest.raises(KeyError):
        queue.remove(model[0])


def test_removed_requests_do_not_pile_up() -> None:
    queue = WaitingQueue(FcfsPolicy())
    first, *others = arrivals(*[0] * 1000)
    queue.push(first)  # at the top for ever, so that nothing below is ever dropped by a pop
    for request in others:
        queue.push(request)
        queue.remove(request)
    assert len(queue._heap) < 100


def test_the_cheapest_is_the_victim_but_never_the_leader() -> None:
    kv = KVCacheManager(64, 4)
    requests = running(kv, 2, 30, 10, 20)
    victim = Preemption(FcfsPolicy(), kv).choose_victim(requests, requests[1])
    assert victim is requests[2]  # not the first, which lost least but leads


def test_the_requester_is_a_candidate_like_the_others() -> None:
    kv = KVCacheManager(64, 4)
    requests = running(kv, 20, 30, 10)
    preemption = Preemption(FcfsPolicy(), kv)
    assert preemption.choose_victim(requests, requests[2]) is requests[2]
    assert preemption.choose_victim(requests, requests[1]) is requests[2]
    assert preemption.choose_victim(requests[:2], requests[0]) is requests[1]


def test_equal_costs_fall_on_the_newest() -> None:
    kv = KVCacheManager(64, 4)
    requests = running(kv, 9, 9, 9)
    assert Preemption(FcfsPolicy(), kv).choose_victim(requests, requests[1]) is requests[2]


def test_the_least_urgent_go_first_under_priority_and_the_most_urgent_leads() -> None:
    kv = KVCacheManager(64, 4)
    requests = running(kv, 1, 40, 30, 2, priorities=[1, 2, 2, -1])
    preemption = Preemption(PriorityPolicy(), kv)
    assert preemption.choose_victim(requests, requests[0]) is requests[2]
    urgent, leader = requests[0], requests[3]
    assert preemption.choose_victim([urgent, leader], leader) is urgent
    assert preemption.choose_victim([urgent, leader], urgent) is urgent


def test_one_without_blocks_is_no_victim_for_others() -> None:
    kv = KVCacheManager(64, 4)
    requests = running(kv, 20, 0, 10)
    preemption = Preemption(FcfsPolicy(), kv)
    assert preemption.choose_victim(requests, requests[0]) is requests[2]
    assert preemption.choose_victim(requests, requests[1]) is requests[1]


def test_a_preempted_request_gives_its_rows_back_to_the_step() -> None:
    first, second, third = make_request("a", 6), make_request("b", 6), make_request("c", 6)
    step = StepBuilder(budget=10)
    step.add(first)
    step.add(second)
    assert step.budget == 0
    step.drop(first)
    step.drop(third)  # was not in it
    assert step.budget == 6
    output = step.build()
    assert [(item.request, item.num_tokens) for item in output.scheduled] == [(second, 4)]
    assert output.num_batched_tokens == 4
    assert output.preempted == (first, third)


def test_the_reserve_grows_with_the_running_and_doubles_with_each_preemption() -> None:
    preemption = Preemption(FcfsPolicy(), KVCacheManager(400, 4))
    request = make_request()
    assert preemption.reserve_blocks(request, 0) == 0
    assert [preemption.reserve_blocks(request, n) for n in (1, 3)] == [6, 10]
    assert [preemption.least_reserve(n) for n in (0, 1, 3)] == [0, 6, 10]
    request.num_preemptions = 2
    assert [preemption.reserve_blocks(request, n) for n in (1, 3)] == [24, 40]
    assert preemption.reserve_blocks(request, 0) == 0
    request.num_preemptions = 10_000
    assert preemption.reserve_blocks(request, 1) < 2**40

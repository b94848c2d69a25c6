"""Arbitrary load on a scheduler, drawn by hypothesis, and how each request of it must end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log2

from hypothesis import strategies as st

from support_engine import expected_output, kv_of, make_request, make_scheduler
from tokenmill_engine.config import SchedulerConfig
from tokenmill_engine.request import FinishReason, Request
from tokenmill_engine.scheduler import Scheduler

#: Prompts share beginnings of these, so that prefix hits are the rule.
SHARED = ([1 + i * 7 % 39 for i in range(48)], [1 + i * 11 % 39 for i in range(48)])


@dataclass(frozen=True)
class Arrival:
    wait_steps: int
    shared: int
    num_shared: int
    num_own: int
    max_tokens: int
    ignore_eos: bool
    num_known_output: int
    priority: int
    cache_salt: str | None
    abort_after_steps: int | None
    abort_in_flight: bool
    alone: bool


def mostly(value: object, others: st.SearchStrategy) -> st.SearchStrategy:
    return st.one_of(st.just(value), st.just(value), others)


#: Short prompts with long outputs, most at once: that is what makes a pool run out.
arrivals = st.builds(
    Arrival,
    wait_steps=mostly(0, st.integers(1, 12)),
    shared=st.integers(0, 1),
    num_shared=mostly(12, st.integers(0, 40)),
    num_own=st.integers(0, 6),
    max_tokens=mostly(40, st.integers(1, 60)),
    ignore_eos=mostly(True, st.just(False)),
    num_known_output=mostly(0, st.integers(1, 9)),
    priority=st.integers(0, 2),
    cache_salt=mostly(None, st.just("tenant")),
    abort_after_steps=mostly(None, st.integers(0, 30)),
    abort_in_flight=st.booleans(),
    alone=mostly(False, st.booleans()),
)


@st.composite
def schedulers(draw: st.DrawFn):
    num_blocks, block_size = draw(st.integers(8, 48)), draw(st.sampled_from([1, 1, 2, 3, 8]))
    max_num_seqs = draw(mostly(8, st.integers(1, 10)))
    return make_scheduler(
        num_blocks=num_blocks,
        block_size=block_size,
        enable_prefix_caching=draw(mostly(True, st.just(False))),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + draw(st.integers(0, 40)),
        max_model_len=min(num_blocks * block_size, draw(mostly(64, st.integers(16, 64)))),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        rope_switch_tokens=draw(mostly(None, st.integers(3, 40))),
        max_overtakes=draw(mostly(8, st.integers(0, 3))),
        min_awaited_tokens=draw(st.sampled_from([1, 4, 64])),
    )


def request_of(index: int, arrival: Arrival, config: SchedulerConfig) -> Request:
    prompt = SHARED[arrival.shared][: arrival.num_shared] + [2 + index % 30] * arrival.num_own
    prompt = (prompt or [5])[: config.max_model_len - 1]
    settings = {
        "max_tokens": arrival.max_tokens,
        "ignore_eos": arrival.ignore_eos,
        "priority": arrival.priority,
        "cache_salt": arrival.cache_salt,
    }
    whole, _ = expected_output(make_request("", prompt, **settings), config)
    known = whole[: min(arrival.num_known_output, len(whole) - 1)]
    return make_request(f"r{index}", prompt, output=known, alone=arrival.alone, **settings)


def check_endings(scheduler: Scheduler, requests: Iterable[Request]) -> None:
    for request in requests:
        output, reason = expected_output(request, scheduler.config)
        if request.finish_reason is FinishReason.ABORT:
            assert request.output_token_ids == output[: request.num_output_tokens]
        else:
            assert (request.output_token_ids, request.finish_reason) == (output, reason)
        assert request.block_ids == []
    assert kv_of(scheduler).usage == 0


def check_preemptions(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    """No thrash: the bound that `preemption.py` derives from its doubling reserve."""
    bound = 1 + log2(kv_of(scheduler).num_blocks)
    for request in requests:
        more_urgent = 0
        if scheduler.config.policy == "priority":
            more_urgent = sum(other.priority < request.priority for other in requests)
        assert request.num_preemptions <= bound + more_urgent

"""Credit: the arithmetic by example, and in front of a real scheduler."""

from __future__ import annotations

from dataclasses import replace

from support_engine import Driver, make_request, make_scheduler
from tokenmill_engine.outputs import EngineStats, WaitingRequest
from tokenmill_engine.request import Request, RequestStatus
from tokenmill_worker.credit import Credit, HeldSize

#: 100 blocks of 16 tokens, 80 of them free.
STATS = EngineStats(num_blocks=100, num_free_blocks=80, block_size=16, num_running=1)


def held(
    name: str = "a",
    *,
    prompt: int | None = 160,
    output: int = 0,
    max_tokens: int = 64,
    has_blocks: bool = False,
) -> HeldSize:
    return HeldSize(name, prompt, output, max_tokens, has_blocks)


def blocked(name: str, overtakes_left: int, num_tokens: int = 1600) -> WaitingRequest:
    return WaitingRequest(name, num_tokens, is_blocked=True, overtakes_left=overtakes_left)


def credit(prompt: int = 96, output: int = 64, *, slots: int = 128) -> Credit:
    """Ended requests had these sizes: 10 blocks together."""
    credit = Credit(slots)
    credit.observe(prompt, output)
    return credit


def test_free_blocks_divided_by_the_expected_size() -> None:
    # The one that runs still takes 4 blocks for 64 tokens: (80 - 4) / 10.
    assert credit().num_requests(STATS, [held(has_blocks=True)]) == 7


def test_one_without_blocks_counts_with_its_whole_size() -> None:
    assert credit().num_requests(STATS, [held()]) == (80 - 14) // 10
    assert credit().num_requests(STATS, [held(prompt=None)]) == (80 - 10) // 10


def test_the_blocks_of_a_prefill_are_not_counted_twice() -> None:
    prefilling = replace(STATS, num_free_blocks=70, num_prefill_blocks=10)
    assert credit().num_requests(prefilling, [held()]) == (80 - 14) // 10


def test_a_short_answer_is_not_expected_to_grow_beyond_its_limit() -> None:
    assert credit().expected_tokens(held(max_tokens=5), STATS) == 165
    assert credit().expected_tokens(held(max_tokens=500), STATS) == 224
    # It has outgrown the mean already, so at least one more token will come.
    assert credit().expected_tokens(held(max_tokens=500, output=300), STATS) == 461


def test_the_mean_follows_what_ends() -> None:
    credit_ = credit()
    for _ in range(100):
        credit_.observe(16, 16)
    # One block for the prompt, and two more that the engine keeps free beside each that runs.
    assert credit_.num_requests(STATS, [held(has_blocks=True, output=64)]) == 80 // 3


def test_until_something_ended_each_request_has_its_share() -> None:
    assert Credit(10).num_requests(STATS, [held(has_blocks=True, output=64)]) == 8
    assert Credit(10).num_requests(EngineStats(), []) == 10


def test_places_bound_credit() -> None:
    many = [held(str(number), has_blocks=True, output=64) for number in range(8)]
    assert credit(1, 1, slots=8).num_requests(STATS, many) == 0
    assert credit(1, 1, slots=9).num_requests(STATS, many) == 1


def test_an_idle_worker_always_takes_one() -> None:
    assert credit(5000, 5000).num_requests(replace(STATS, num_free_blocks=100), []) == 1


def test_a_blocked_request_is_passed_so_often_and_no_more() -> None:
    """It does not count itself: it has to wait in any case."""
    running = held("a", has_blocks=True, output=64)
    for left, expected in ((5, 5), (0, 0), (9, 8)):
        stats = replace(STATS, num_waiting=1, waiting=(blocked("big", left),))
        assert credit().num_requests(stats, [running, held("big", prompt=1600)]) == expected
    # Two are on their way into the engine: they will pass it first.
    on_their_way = [held("b", prompt=16, max_tokens=1), held("c", prompt=16, max_tokens=1)]
    stats = replace(STATS, num_waiting=1, waiting=(blocked("big", 3),))
    assert credit().num_requests(stats, [running, held("big"), *on_their_way]) == 1


def test_no_more_prompts_are_leased_than_two_steps_begin_with() -> None:
    roomy = replace(STATS, num_blocks=10_000, num_free_blocks=9_000, step_tokens=512)
    running = held(has_blocks=True, output=64)
    assert credit(100, 10).num_requests(roomy, [running]) == 1024 // 100
    on_its_way = held("b", prompt=300)
    assert credit(100, 10).num_requests(roomy, [running, on_its_way]) == 724 // 100
    assert credit(100, 10).num_requests(roomy, [running, held("b", prompt=None)]) == 924 // 100
    # A prompt longer than that is leased when no other is on its way.
    assert credit(5000, 10).num_requests(roomy, [running]) == 1
    assert credit(5000, 10).num_requests(roomy, [running, on_its_way]) == 0
    assert Credit(128).num_requests(roomy, [running]) > 100  # no size is known yet


def test_a_preempted_request_counts_with_its_whole_size_again() -> None:
    waits = WaitingRequest("a", 224, is_blocked=False, overtakes_left=0)
    stats = replace(STATS, num_running=0, num_waiting=1, waiting=(waits,))
    assert credit().num_requests(stats, [held(has_blocks=True, output=64)]) == (80 - 15) // 10


def test_the_room_shown_to_peers() -> None:
    running = held(has_blocks=True)
    assert credit().room_tokens(STATS, [running]) == 76 * 16
    assert credit(slots=1).room_tokens(STATS, [running]) == 0
    waiting = replace(STATS, num_waiting=1)  # for blocks or for their turn: peers see no difference
    assert credit().room_tokens(waiting, [running]) == 0
    assert credit().room_tokens(replace(STATS, num_free_blocks=1), [running]) == 0


class Worker:
    """A queue, credit and a scheduler, without anything that takes time between them."""

    def __init__(self, *, num_blocks: int, max_overtakes: int) -> None:
        scheduler = make_scheduler(
            num_blocks=num_blocks,
            block_size=4,
            max_num_seqs=32,
            max_num_batched_tokens=512,
            max_model_len=4 * num_blocks,
            max_overtakes=max_overtakes,
        )
        self.driver = Driver(scheduler)
        self.credit = Credit(32)
        self.queue: list[Request] = []
        self.leased: list[Request] = []
        self.held: list[Request] = []

    def tick(self) -> None:
        stats = self.driver.scheduler.engine_stats()
        count = self.credit.num_requests(stats, [self.size_of(one) for one in self.held])
        if any(one.is_blocked and not one.overtakes_left for one in stats.waiting):
            assert count == 0, "nobody may start before the blocked one, so nobody is leased"
        self.leased, self.queue = self.queue[:count], self.queue[count:]
        self.driver.add(*self.leased)
        self.held += self.leased
        if self.held:
            self.driver.step()
        for request in [one for one in self.held if one.is_finished]:
            self.held.remove(request)
            self.credit.observe(request.num_prompt_tokens, request.num_output_tokens)

    def size_of(self, request: Request) -> HeldSize:
        return HeldSize(
            request.request_id,
            request.num_prompt_tokens,
            request.num_output_tokens,
            request.params.max_tokens,
            has_blocks=request.num_output_tokens > 0,
        )


def small(number: int) -> Request:
    return make_request(f"small{number}", 6, max_tokens=6, ignore_eos=True)


def test_equal_requests_are_never_leased_to_wait() -> None:
    worker = Worker(num_blocks=40, max_overtakes=4)
    worker.queue = [small(number) for number in range(100)]
    most_running = 0
    while worker.queue or worker.held:
        sizes_are_known = any(request.is_finished for request in worker.driver.requests)
        worker.tick()
        if sizes_are_known:
            assert all(one.status is not RequestStatus.WAITING for one in worker.leased)
        most_running = max(most_running, worker.driver.scheduler.num_running)
    assert most_running >= 8


def test_a_big_request_does_not_starve_and_small_ones_pass_it_within_the_bound() -> None:
    worker = Worker(num_blocks=40, max_overtakes=4)
    big = make_request("big", 120, max_tokens=8, ignore_eos=True)
    numbers = iter(range(10_000))
    worker.queue = [small(next(numbers)) for _ in range(20)]
    for _ in range(10):
        worker.tick()
    worker.queue.insert(0, big)
    while big.status is RequestStatus.WAITING:
        worker.queue += [small(next(numbers)), small(next(numbers))]
        worker.tick()
        assert len(worker.driver.steps) < 200
    assert 0 < big.num_overtaken <= 4
    while not big.is_finished:
        worker.tick()

"""Builders for the engine's bookkeeping, and a driver that plays the model with invented tokens.

`InventedModel` stands for the device: it writes "K/V" (a fingerprint of the whole prefix) into the
cache slots that a block table names and reads every slot that the step relies on, as attention
would. Its next token is a function of the sequence alone, so a request's output has one right
value, `expected_output`, whatever was batched, cached, preempted or resumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tokenmill_engine.config import SchedulerConfig
from tokenmill_engine.kv_cache_manager import KVCacheManager
from tokenmill_engine.outputs import ModelRunnerOutput, SampledToken, SchedulerOutput
from tokenmill_engine.request import FinishReason, Request, RequestStatus
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.scheduler import Scheduler

EOS = 0
VOCABULARY = 40


def make_request(
    request_id: str = "r0",
    prompt: Sequence[int] | int = 4,
    *,
    max_tokens: int = 8,
    output: Sequence[int] = (),
    priority: int = 0,
    cache_salt: str | None = None,
    alone: bool = False,
    **params: object,
) -> Request:
    """`prompt`: token ids, or how many; then they are unlike those of every other request id."""
    if isinstance(prompt, int):
        own = 1000 + 1000 * sum(ord(char) * 31**i for i, char in enumerate(request_id))
        prompt = range(own, own + prompt)
    return Request(
        request_id,
        list(prompt),
        SamplingParams(max_tokens=max_tokens, **params),
        output_token_ids=output,
        eos_token_ids=frozenset({EOS}),
        priority=priority,
        cache_salt=cache_salt,
        alone=alone,
    )


def make_scheduler(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    enable_prefix_caching: bool = True,
    **config: object,
) -> Scheduler:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 128} | config
    kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
    return Scheduler(SchedulerConfig(**settings), kv)


def kv_of(scheduler: Scheduler) -> KVCacheManager:
    return scheduler.kv


def invented_token(token_ids: Sequence[int]) -> int:
    """The "model": the next token after a sequence, from its last three tokens and its length."""
    a, b, c = ([0, 0, 0, *token_ids])[-3:]
    return (a * 7 + b * 13 + c * 31 + len(token_ids) * 5 + 3) % VOCABULARY


def expected_output(request: Request, config: SchedulerConfig) -> tuple[list[int], FinishReason]:
    """What the request must end with, without the engine's stopping rules: a batch of one."""
    prompt, params = request.token_ids[: request.num_prompt_tokens], request.params
    output: list[int] = []
    while True:
        output.append(invented_token(prompt + output))
        may_stop = len(output) >= params.min_tokens
        if may_stop and output[-1] == EOS and not params.ignore_eos:
            return output, FinishReason.STOP
        if may_stop and output[-1] in params.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) == params.max_tokens or len(prompt + output) == config.max_model_len:
            return output, FinishReason.LENGTH


@dataclass
class InventedModel:
    """The cache content by (block, offset), and the checks that every step must pass."""

    scheduler: Scheduler
    slots: dict[tuple[int, int], int] = field(default_factory=dict)
    #: Fingerprints so far, by request and RoPE regime; the driver keeps every request alive.
    prints: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        # Aborted in flight: its blocks are not its own any more.
        live = [item for item in output.scheduled if not item.request.is_finished]
        for item in live:  # all reads before any write of the step
            prints, slots = self._fingerprints(item.request), self._slots(item.request)
            found = [self.slots.get(slot) for slot in slots[: item.start]]
            assert found == prints[: item.start], f"{item}: stale K/V"
        written: set[tuple[int, int]] = set()
        for item in live:
            prints, slots = self._fingerprints(item.request), self._slots(item.request)
            for position in range(item.start, item.end):
                self._check_writable(item.request, slots[position], written)
                written.add(slots[position])
                self.slots[slots[position]] = prints[position]
        return ModelRunnerOutput(
            tuple(SampledToken(invented_token(item.request.token_ids)) for item in output.sampling)
        )

    def _slots(self, request: Request) -> list[tuple[int, int]]:
        """Where the block table puts each position."""
        size = kv_of(self.scheduler).block_size
        return [(block_id, offset) for block_id in request.block_ids for offset in range(size)]

    def _check_writable(
        self, request: Request, slot: tuple[int, int], written: set[tuple[int, int]]
    ) -> None:
        block = kv_of(self.scheduler)._pool.blocks[slot[0]]
        assert slot not in written, f"{request!r}: two rows write one slot"
        assert block.ref_count == 1, f"{request!r} writes into a shared block"
        assert block.block_hash is None, f"{request!r} writes into a block others can find"

    def _fingerprints(self, request: Request) -> list[int]:
        """One number per position for all that its K/V depend on: the prefix, salt and RoPE."""
        switch = self.scheduler.config.rope_switch_tokens
        root = hash((request.cache_salt, switch is not None and request.num_tokens > switch))
        prints = self.prints.setdefault((id(request), root), [])
        for token_id in request.token_ids[len(prints) :]:
            prints.append(hash((prints[-1] if prints else root, token_id)))
        return prints


@dataclass
class Driver:
    """Steps a scheduler with invented outputs and checks the books around every step."""

    scheduler: Scheduler
    #: Called between `schedule` and `update_from_output`, e.g. to abort what is in flight.
    in_flight: Callable[[SchedulerOutput], None] = lambda _output: None

    def __post_init__(self) -> None:
        self.model = InventedModel(self.scheduler)
        self.requests: list[Request] = []
        self.overtaken: Counter[int] = Counter()  # by id(request): all requests are kept alive
        self._proven: set[int] = set()  # those that got a token since they were last admitted
        self.steps: list[SchedulerOutput] = []

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.scheduler.add(request)
            self.requests.append(request)

    def step(self) -> list[Request]:
        was_running = [r for r in self.requests if r.status is RequestStatus.RUNNING]
        lacking = {r.request_id: r.num_tokens - r.num_computed_tokens for r in was_running}
        output = self.scheduler.schedule()
        self.steps.append(output)
        self.scheduler.check_invariants()
        self._check_limits(output)
        self._check_decode_first(output, was_running, lacking)
        self._check_order(output, was_running)
        self._check_quarantine(output, was_running)
        self.in_flight(output)
        updated = self.scheduler.update_from_output(output, self.model.run(output))
        self._proven |= set(map(id, updated))
        self.scheduler.check_invariants()
        return updated

    def run(self, max_steps: int = 10_000) -> None:
        while self.scheduler.has_unfinished_requests:
            assert len(self.steps) < max_steps, "no end in sight"
            self.step()

    def _check_limits(self, output: SchedulerOutput) -> None:
        config = self.scheduler.config
        rows = sum(item.num_tokens for item in output.scheduled)
        assert 0 < rows == output.num_batched_tokens <= config.max_num_batched_tokens
        assert len(output.scheduled) <= self.scheduler.num_running <= config.max_num_seqs
        # Below the budget nobody is given less than it lacks, unless the pacer says so.
        if rows < config.max_num_batched_tokens and config.itl_target_ms is None:
            running = [r for r in self.requests if r.status is RequestStatus.RUNNING]
            assert rows == sum(r.num_tokens - r.num_computed_tokens for r in running)
        for item in output.scheduled:
            assert item.num_tokens > 0
            assert item.start == item.request.num_computed_tokens, "rows must be contiguous"
            assert item.end <= item.request.num_tokens
            size = kv_of(self.scheduler).block_size
            assert len(item.request.block_ids) * size >= item.end

    def _check_decode_first(
        self, output: SchedulerOutput, was_running: list[Request], lacking: dict[str, int]
    ) -> None:
        """No decode is left out for a prompt, and the leader is never left out at all."""
        scheduled = {item.request.request_id for item in output.scheduled}
        for request in was_running:
            if lacking[request.request_id] == 1 and request not in output.preempted:
                assert request.request_id in scheduled, f"{request!r} should decode"
        if was_running:
            leader = min(was_running, key=self.rank)
            assert leader.request_id in scheduled, "the leader must proceed"

    def _check_order(self, output: SchedulerOutput, was_running: list[Request]) -> None:
        """Who was admitted before someone that ranks ahead of it did so within the bound."""
        admitted = [i.request for i in output.scheduled if i.request not in was_running]
        assert not (admitted and output.preempted), "nobody is admitted in a step that preempts"
        assert admitted == sorted(admitted, key=self.rank)
        waiting = [
            r for r in self.requests if r.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        ]
        for other in waiting:
            passed_by = sum(self.rank(request) > self.rank(other) for request in admitted)
            assert not passed_by or other.status is RequestStatus.WAITING, "its stream stands still"
            self.overtaken[id(other)] += passed_by
            assert self.overtaken[id(other)] <= self.scheduler.config.max_overtakes

    def _check_quarantine(self, output: SchedulerOutput, was_running: list[Request]) -> None:
        """While a suspect is prefilled, nobody else is, and nobody is admitted."""
        admitted = [i.request for i in output.scheduled if i.request not in was_running]
        self._proven -= set(map(id, (*admitted, *output.preempted)))
        prefilling = [i.request for i in output.scheduled if id(i.request) not in self._proven]
        if any(request.alone for request in prefilling):
            assert len(prefilling) == 1, "a suspect is prefilled alone"
        if any(request.alone and id(request) not in self._proven for request in was_running):
            assert not admitted, "nobody enters while a suspect is prefilled"

    def rank(self, request: Request) -> tuple[int, ...]:
        if self.scheduler.config.policy == "priority":
            return (request.priority, request.arrival)
        return (request.arrival,)

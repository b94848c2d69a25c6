"""Continuous batching: which tokens of which requests the next step computes. Imports no torch.

There is no prefill phase and no decode phase. A request knows `num_tokens` and has computed
`num_computed_tokens` of them; each step lets it catch up within one token budget that all share,
and when it has caught up it gets a token. A decode is a request that lacks one, a prompt chunk one
that lacks more. The contract of `schedule` and `update_from_output` is vLLM V1's.
"""

from __future__ import annotations

from .acceptance import check_acceptable
from .admission import Admission
from .config import SchedulerConfig
from .errors import DuplicateRequest
from .kv_cache_manager import KVCacheManager
from .outputs import EngineStats, ModelRunnerOutput, SchedulerOutput
from .pacing import ChunkPacer
from .policy import make_policy
from .preemption import Preemption
from .request import FinishReason, Request, RequestStatus
from .request_book import RequestBook
from .scheduler_stats import SchedulerStats
from .step_builder import StepBuilder
from .step_limits import StepLimits
from .stopping import check_stop, ends_with_unread


class Scheduler:
    """Owns requests from `add` to their finish. Synchronous, deterministic, not thread-safe.

    Order of calls: `schedule`, compute, `update_from_output`. Nothing counts as computed before the
    update, so a step that failed may be scheduled again. `abort` and `finish` may come at any time,
    also between the two for a request of the step in flight.

    To schedule before the last step is booked, say `take_off` when it is launched and `land` when
    it has ended, and update only then.
    """

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        self.stats = SchedulerStats()
        self.limits = StepLimits(config)
        self.pacer = ChunkPacer(config.itl_target_ms, config.max_num_batched_tokens)
        self.kv = kv
        self._policy = make_policy(config.policy)
        self._preemption = Preemption(self._policy, kv)
        self._book = RequestBook(self._policy, kv)
        self._admission = Admission(
            self._book,
            kv,
            preemption=self._preemption,
            limits=self.limits,
            stats=self.stats,
            max_overtakes=config.max_overtakes,
            min_awaited_tokens=config.min_awaited_tokens,
        )

    @property
    def has_unfinished_requests(self) -> bool:
        return len(self._book) > 0

    @property
    def num_running(self) -> int:
        return len(self._book.running)

    @property
    def num_waiting(self) -> int:
        """Includes the preempted ones."""
        return len(self._book.waiting)

    def add(self, request: Request) -> None:
        """Queues a request. Output tokens it comes with are known, not sampled again (a resume).

        Raises DuplicateRequest and whatever `check_acceptable` raises; then nothing has changed.
        """
        if self._book.get(request.request_id) is not None:
            raise DuplicateRequest(f"request {request.request_id} is already waiting or running")
        check_acceptable(request, self.config, self.kv)
        request.rope_regime = self._rope_regime(request.num_tokens)
        self._book.add(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at once and frees its blocks; None if there is no such request."""
        request = self._book.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """Ends a waiting or running request; one that has finished keeps its first reason."""
        if not request.is_finished:
            self._book.finish(request, reason, stop_reason)

    def schedule(self, *, ahead: bool = False) -> SchedulerOutput:
        """Plans one step: running requests first, then waiting ones into what the budget leaves.

        `ahead`: while steps are in flight. Then nobody is preempted, for blocks that are written to
        cannot be handed out; the plan is empty where that would be necessary.
        """
        decodes, chunks = self._decodes_and_chunks()
        step = StepBuilder(self._budget(len(decodes)))
        if not self._schedule_running(decodes + chunks, step, may_preempt=not ahead):
            return SchedulerOutput()
        self._admission.fill(step)
        return step.build()

    def take_off(self, output: SchedulerOutput) -> None:
        """`output` was launched; what it samples is not known yet."""
        self._book.take_off(output)

    def land(self, output: SchedulerOutput) -> None:
        """`output`, the oldest step in flight, has ended: it is booked next, or given up."""
        self._book.land(output)

    def _budget(self, num_decodes: int) -> int:
        chunk_tokens = self.pacer.chunk_tokens
        if chunk_tokens is None or not num_decodes:
            return self.limits.num_tokens
        return min(self.limits.num_tokens, num_decodes + chunk_tokens)

    def relieve(self, output: SchedulerOutput) -> bool:
        """After `output` ran out of memory: preempts half of the running, and halves the limits.

        False if there is nothing to gain, because it held a single row.
        """
        if output.num_batched_tokens <= 1:
            return False
        running = self._book.running
        self.limits.halve(output.num_batched_tokens, len(running))
        num_victims = len(running) - self.limits.num_seqs
        for victim in self._preemption.cheapest(running.values(), num_victims):
            self._book.preempt(victim)
            self.stats.preemptions_total += 1
        return True

    def _schedule_running(
        self, running: list[Request], step: StepBuilder, *, may_preempt: bool
    ) -> bool:
        """Decodes, then prompt chunks; each may preempt others for blocks. False if that would be
        necessary and is not allowed.

        No more requests run than a step has rows, which leaves one for the first prompt chunk.
        """
        for request in running:
            if step.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted by one before it
            if not may_preempt and not self.kv.allocate(request, request.planned_length):
                return False
            if self._make_room(request, step):
                step.add(request)
        return True

    def _decodes_and_chunks(self) -> tuple[list[Request], list[Request]]:
        """The running requests; prompt chunks in the policy's order."""
        decodes: list[Request] = []
        chunks: list[Request] = []
        for request in self._book.running.values():
            if request.num_unread_tokens and self._changes_with_unread(request):
                continue
            lacks_one = request.planned_length - request.planned_start == 1
            (decodes if lacks_one else chunks).append(request)
        chunks.sort(key=self._policy.rank)
        return decodes, chunks

    def _changes_with_unread(self, request: Request) -> bool:
        """Whether something else follows on its unread tokens than one more row."""
        regime = self._rope_regime(request.planned_length)
        return regime != request.rope_regime or ends_with_unread(request, self.config)

    def _make_room(self, request: Request, step: StepBuilder) -> bool:
        """Gets blocks for all its tokens, by preemption if need be; False if it hit itself."""
        while not self.kv.allocate(request, request.planned_length):
            victim = self._preemption.choose_victim(self._book.running.values(), request)
            self._preempt(victim, step)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request, step: StepBuilder) -> None:
        step.drop(request)
        self._book.preempt(request)
        self.stats.preemptions_total += 1

    def update_from_output(
        self, output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[Request]:
        """Books a step that ran; returns the requests that got a token, finished ones included.

        Requests ended since `schedule` are passed over, their samples dropped. Raises ValueError if
        the runner did not sample exactly one token for each of `output.sampling`.
        """
        if len(runner_output.sampled) != len(output.sampling):
            raise ValueError("the runner must sample one token for each of output.sampling")
        self.stats.book_step(output)
        sampled = iter(runner_output.sampled)
        updated: list[Request] = []
        for item in output.scheduled:
            request = item.request
            token = next(sampled) if item.samples else None
            if request.is_finished:
                continue
            self.stats.book_computed(item)
            request.num_computed_tokens = item.end
            self.kv.cache_full_blocks(request)
            if token is not None:
                self._append_token(request, token.token_id)
                updated.append(request)
        return updated

    def _append_token(self, request: Request, token_id: int) -> None:
        request.token_ids.append(token_id)
        self.stats.generation_tokens_total += 1
        stop = check_stop(request, self.config)
        if stop is not None:
            self.finish(request, stop.finish_reason, stop.stop_reason)
        elif self._rope_regime(request.num_tokens) != request.rope_regime:
            self._restart(request)

    def _restart(self, request: Request) -> None:
        """The LongRoPE switch: every K/V of the request changes, so it computes them all once more.

        It keeps running, without blocks, and its hashes start over under the new regime.
        """
        self._book.forget_computed(request)
        request.prefill_end = request.num_tokens
        request.rope_regime = self._rope_regime(request.num_tokens)
        request.block_hashes.clear()

    def _rope_regime(self, num_tokens: int) -> str:
        switch = self.config.rope_switch_tokens
        if switch is None:
            return ""
        return "long" if num_tokens > switch else "short"

    def engine_stats(self) -> EngineStats:
        prefilling = (r for r in self._book.running.values() if r.is_prefilling)
        present = EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_blocks=self.kv.num_blocks,
            num_free_blocks=self.kv.num_free_blocks,
            block_size=self.kv.block_size,
            step_tokens=self.limits.num_tokens,
            num_prefill_blocks=sum(len(request.block_ids) for request in prefilling),
            reserve_blocks=self._preemption.least_reserve(self.num_running),
            waiting=self._admission.report(),
        )
        return self.stats.snapshot(present)

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree; O(pool), for tests and an idle engine."""
        self._book.check_invariants()

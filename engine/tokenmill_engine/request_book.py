"""Where each request stands and how it gets there: the transitions of `RequestStatus`.

    add → WAITING ── admit ──→ RUNNING ── finish ──→ FINISHED
              │                 │   ↑                    ↑
              │           preempt   admit                │
              │                 ↓   │                    │
              │               PREEMPTED ──── finish ─────┤
              └────────────────── finish ────────────────┘

The blocks of a finished request return to the pool when no step in flight writes to them any more.

Which request moves is the scheduler's decision; that books and blocks move together is kept here.
"""

from __future__ import annotations

from .kv_cache_manager import KVCacheManager
from .outputs import SchedulerOutput
from .policy import Policy, WaitingQueue
from .request import FinishReason, Request, RequestStatus


class RequestBook:
    """All unfinished requests; `waiting` includes the preempted ones."""

    def __init__(self, policy: Policy, kv: KVCacheManager) -> None:
        self.waiting = WaitingQueue(policy)
        self.running: dict[str, Request] = {}  # in order of admission
        self._leaving: list[Request] = []  # finished; steps in flight still write to their blocks
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._kv = kv

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    def add(self, request: Request) -> None:
        request.arrival = self._arrivals
        self._arrivals += 1
        request.status = RequestStatus.WAITING
        self._requests[request.request_id] = request
        self.waiting.push(request)

    def admit(self, request: Request, num_cached_tokens: int) -> None:
        """Starts a request that was just taken from the queue and has its blocks by now."""
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = min(num_cached_tokens, request.num_prompt_tokens)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = num_cached_tokens
        request.prefill_end = request.num_tokens
        self.running[request.request_id] = request

    def preempt(self, request: Request) -> None:
        """Back to its old place in the queue with its output; its K/V must be found or redone."""
        del self.running[request.request_id]
        self.forget_computed(request)
        request.status = RequestStatus.PREEMPTED
        request.num_preemptions += 1
        self.waiting.push(request)

    def finish(self, request: Request, reason: FinishReason, stop_reason: int | str | None) -> None:
        if request.status is RequestStatus.RUNNING:
            del self.running[request.request_id]
        else:
            self.waiting.remove(request)
        del self._requests[request.request_id]
        if request.num_rows_in_flight:
            self._leaving.append(request)
        else:
            self._kv.free(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason

    def take_off(self, step: SchedulerOutput) -> None:
        """A step was launched: plans begin behind its rows and its samples."""
        for item in step.scheduled:
            item.request.num_rows_in_flight += item.num_tokens
        for place, item in enumerate(step.sampling):
            item.request.num_unread_tokens += 1
            item.request.unread_place = place

    def land(self, step: SchedulerOutput) -> None:
        """The oldest step in flight has ended, to be booked now or to be given up."""
        for item in step.scheduled:
            request = item.request
            request.num_rows_in_flight -= item.num_tokens
            request.num_unread_tokens -= item.samples
            if request.is_finished and not request.num_rows_in_flight:
                self._leaving.remove(request)
                self._kv.free(request)

    def forget_computed(self, request: Request) -> None:
        """Gives the blocks back; what is computed starts over at token 0."""
        self._kv.free(request)
        request.num_computed_tokens = 0

    def check_invariants(self) -> None:
        """Raises AssertionError if the books disagree with each other or with the cache."""
        waiting = {request.request_id: request for request in self.waiting}
        if waiting.keys() & self.running.keys():
            raise AssertionError("a request is both waiting and running")
        if waiting | self.running != self._requests:
            raise AssertionError("a request is neither waiting nor running")
        for request in self._requests.values():
            runs = request.status is RequestStatus.RUNNING
            if runs != (request.request_id in self.running) or request.is_finished:
                raise AssertionError(f"{request!r} has the wrong status")
            if not runs and (request.block_ids or request.planned_start):
                raise AssertionError(f"{request!r} holds blocks while it waits")
            if request.num_computed_tokens >= request.num_tokens:
                raise AssertionError(f"{request!r} has nothing left to compute")
        for request in self._leaving:
            if not (request.is_finished and request.num_rows_in_flight):
                raise AssertionError(f"{request!r} keeps its blocks without need")
        self._kv.check_invariants([*self._requests.values(), *self._leaving])

"""Who enters the running batch: the policy's order, with bounded overtaking of what does not fit.

When there are no blocks for the first of the queue, later ones that do fit may pass it, so that one
big request does not stop many small ones. Each request lets at most `max_overtakes` admissions pass
in its life, those of requests that pass again after a preemption included; then nobody passes until
it runs. The running ones end, and with nothing running every request fits: so it starts, and how
many it has to wait for is bounded. A preempted request lets nobody pass: its stream stands still.

One that lets others pass also waits for a prefix that this step computes (`prefixes_under_way`);
its place is kept.
"""

from __future__ import annotations

import math

from .kv_cache_manager import KVCacheManager
from .outputs import WaitingRequest
from .preemption import Preemption
from .prefixes_under_way import PrefixesUnderWay
from .quarantine import Quarantine
from .request import Request, RequestStatus
from .request_book import RequestBook
from .scheduler_stats import SchedulerStats
from .step_builder import StepBuilder
from .step_limits import StepLimits

#: So many requests that do not fit are looked behind, at most: each costs a look at the cache.
_LOOKAHEAD = 8
#: So many waiting requests are reported, at most.
_REPORTED = 16


class Admission:
    """Moves requests from the queue into the batch, as far as places, rows and blocks reach."""

    def __init__(
        self,
        book: RequestBook,
        kv: KVCacheManager,
        *,
        preemption: Preemption,
        limits: StepLimits,
        stats: SchedulerStats,
        max_overtakes: int,
        min_awaited_tokens: int,
    ) -> None:
        self._book = book
        self._kv = kv
        self._preemption = preemption
        self._limits = limits
        self._stats = stats
        self._max_overtakes = max_overtakes
        self._min_awaited_tokens = min_awaited_tokens
        self._blocked: frozenset[str] = frozenset()  # found not to fit when last tried

    def fill(self, step: StepBuilder) -> None:
        """Admits whoever fits. After a preemption nobody is admitted in the same step."""
        waiting = self._book.waiting
        if not waiting or not self._is_open(step):
            return
        quarantine = Quarantine(self._book.running.values())
        prefixes = PrefixesUnderWay(self._kv, step.scheduled, min_tokens=self._min_awaited_tokens)
        blocked: list[Request] = []
        held: list[Request] = []
        room = math.inf  # so many more may enter past those two
        while waiting and self._is_open(step, len(held)) and room and len(blocked) <= _LOOKAHEAD:
            if not quarantine.admits(waiting.peek()):
                break
            request = waiting.pop()
            num_cached = self._kv.find_cached_prefix(request)
            if self._overtakes_left(request) and prefixes.hold(request, num_cached):
                held.append(request)
            elif not self._enter(request, num_cached, step, prefixes):
                blocked.append(request)
            else:
                quarantine.note(request)
                room -= 1
                for other in (*blocked, *held):
                    other.num_overtaken += 1
                continue
            room = min(room, self._overtakes_left(request))
        for request in (*blocked, *held):
            waiting.push(request)
        self._blocked = frozenset(request.request_id for request in blocked)

    def report(self) -> tuple[WaitingRequest, ...]:
        """The first of the queue, in its order."""
        return tuple(
            WaitingRequest(
                request.request_id,
                num_tokens=request.num_tokens,
                is_blocked=request.request_id in self._blocked,
                overtakes_left=self._overtakes_left(request),
            )
            for request in self._book.waiting.first(_REPORTED)
        )

    def _is_open(self, step: StepBuilder, num_held: int = 0) -> bool:
        has_place = len(self._book.running) + num_held < self._limits.num_seqs
        return has_place and step.budget > 0 and not step.preempted

    def _overtakes_left(self, request: Request) -> int:
        if request.status is RequestStatus.PREEMPTED:
            return 0
        return self._max_overtakes - request.num_overtaken

    def _enter(
        self, request: Request, num_cached: int, step: StepBuilder, prefixes: PrefixesUnderWay
    ) -> bool:
        reserve = self._preemption.reserve_blocks(request, len(self._book.running))
        if not self._kv.allocate(
            request, request.num_tokens, num_cached_tokens=num_cached, reserve_blocks=reserve
        ):
            return False
        if request.status is RequestStatus.WAITING and self._kv.enable_prefix_caching:
            self._stats.book_prefix_query(request, num_cached)
        self._book.admit(request, num_cached)
        prefixes.note(step.add(request))
        return True

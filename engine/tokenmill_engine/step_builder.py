"""A step under construction: what it computes, in order, and what the token budget leaves."""

from __future__ import annotations

from collections.abc import Collection

from .outputs import ScheduledRequest, SchedulerOutput
from .request import Request


class StepBuilder:
    """`budget`: rows still to give away. `preempted`: who was put back into the queue meanwhile."""

    __slots__ = ("_scheduled", "budget", "preempted")

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.preempted: list[Request] = []
        self._scheduled: dict[str, ScheduledRequest] = {}

    @property
    def scheduled(self) -> Collection[ScheduledRequest]:
        return self._scheduled.values()

    def add(self, request: Request) -> ScheduledRequest:
        """As many of the tokens that the request lacks as the budget allows."""
        start = request.planned_start
        num_tokens = min(request.planned_length - start, self.budget)
        item = ScheduledRequest(request, start, num_tokens)
        self._scheduled[request.request_id] = item
        self.budget -= num_tokens
        return item

    def drop(self, request: Request) -> None:
        """Takes a preempted request out again and gives its tokens back to the budget."""
        item = self._scheduled.pop(request.request_id, None)
        if item is not None:
            self.budget += item.num_tokens
        self.preempted.append(request)

    def build(self) -> SchedulerOutput:
        scheduled = tuple(self._scheduled.values())
        return SchedulerOutput(
            scheduled=scheduled,
            num_batched_tokens=sum(item.num_tokens for item in scheduled),
            preempted=tuple(self.preempted),
        )

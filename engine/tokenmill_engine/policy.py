"""Who comes first and who goes first: scheduling policies, and the queue of waiting requests."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush, nsmallest
from typing import Protocol

from .config import SchedulingPolicy
from .request import Request

Rank = tuple[int, ...]


class Policy(Protocol):
    """An order of requests for admission and one for preemption; both total, lowest first."""

    def rank(self, request: Request) -> Rank:
        """Order of admission, fixed while the request lives; the lowest running is the leader."""

    def victim_rank(self, request: Request, sunk_tokens: int) -> Rank:
        """Order of preemption, given the computed tokens that would be lost."""


class FcfsPolicy:
    """First come, first served; the cheapest to recompute is preempted first, then the newest."""

    def rank(self, request: Request) -> Rank:
        return (request.arrival,)

    def victim_rank(self, request: Request, sunk_tokens: int) -> Rank:
        return (sunk_tokens, -request.arrival)


class PriorityPolicy:
    """The lower `priority` first, then first come; the least urgent is preempted first."""

    def rank(self, request: Request) -> Rank:
        return (request.priority, request.arrival)

    def victim_rank(self, request: Request, sunk_tokens: int) -> Rank:
        return (-request.priority, sunk_tokens, -request.arrival)


_POLICIES: dict[SchedulingPolicy, type[FcfsPolicy] | type[PriorityPolicy]] = {
    "fcfs": FcfsPolicy,
    "priority": PriorityPolicy,
}


def make_policy(name: SchedulingPolicy) -> Policy:
    return _POLICIES[name]()


class WaitingQueue:
    """Waiting and preempted requests by the policy's rank: push and pop O(log n), remove O(1).

    A heap whose removed entries stay until they reach the top or outnumber the live ones, so a
    burst of aborts costs no search. A preempted request keeps its arrival, hence its place.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Request]] = []
        self._live: dict[str, tuple[Rank, Request]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        """In queue order; O(n log n)."""
        return (request for _, request in sorted(self._live.values(), key=lambda entry: entry[0]))

    def first(self, count: int) -> list[Request]:
        """At most so many, in queue order; O(n)."""
        entries = nsmallest(count, self._live.values(), key=lambda entry: entry[0])
        return [request for _, request in entries]

    def push(self, request: Request) -> None:
        entry = (self._policy.rank(request), request)
        self._live[request.request_id] = entry
        heappush(self._heap, entry)

    def peek(self) -> Request:
        """The next to admit; raises IndexError when none waits."""
        while not self._is_live(self._heap[0]):
            heappop(self._heap)
        return self._heap[0][1]

    def pop(self) -> Request:
        request = self.peek()
        heappop(self._heap)
        del self._live[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Raises KeyError if it does not wait."""
        del self._live[request.request_id]
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = list(self._live.values())
            heapify(self._heap)

    def _is_live(self, entry: tuple[Rank, Request]) -> bool:
        return self._live.get(entry[1].request_id) is entry

"""Workers and a queue in steps of a second: who computes how many tokens, who waits, who moves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from scaling.curve import Request

STEP_S = 1.0


@dataclass(frozen=True, slots=True)
class Shape:
    """What one worker can do."""

    tokens_per_s: float = 1500.0  # with enough to do
    tokens_per_s_of_one: float = 40.0  # of a single answer, however idle the worker
    places: int = 64
    load_s: float = 75.0  # from the pod to the first token
    drain_grace_s: float = 20.0


@dataclass(slots=True)
class Worker:
    ready_s: float
    stops_s: float | None = None  # hands over then
    running: list[Request] = field(default_factory=list)


@dataclass(slots=True)
class Pool:
    """`arrivals` in order of time."""

    arrivals: deque[Request]
    shape: Shape = field(default_factory=Shape)
    now_s: float = 0.0
    waiting: deque[Request] = field(default_factory=deque)
    workers: list[Worker] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    worker_seconds: float = 0.0

    @property
    def replicas(self) -> int:
        """Those that the deployment counts: loading ones too, ending ones not."""
        return sum(worker.stops_s is None for worker in self.workers)

    @property
    def running(self) -> Iterable[Request]:
        return (request for worker in self.workers for request in worker.running)

    @property
    def num_running(self) -> int:
        return sum(len(worker.running) for worker in self.workers)

    def resize(self, replicas: int) -> None:
        """New workers load; of those that are too many, the ones that load go first, then the
        newest: Kubernetes knows nothing of their load."""
        for _ in range(replicas - self.replicas):
            self.workers.append(Worker(self.now_s + self.shape.load_s))
        staying = [worker for worker in self.workers if worker.stops_s is None]
        for worker in sorted(staying, key=lambda each: -each.ready_s)[: self.replicas - replicas]:
            worker.stops_s = self.now_s + self.shape.drain_grace_s

    def step(self) -> None:
        self.now_s += STEP_S
        self.worker_seconds += STEP_S * len(self.workers)
        while self.arrivals and self.arrivals[0].arrives_s <= self.now_s:
            self.waiting.append(self.arrivals.popleft())
        self._hand_over()
        for worker in self.workers:
            if worker.ready_s <= self.now_s:
                self._work(worker)

    def _hand_over(self) -> None:
        """Who ends gives back what it has: what was generated stays, and is computed again as a
        prompt, which the token counts of the remaining work leave out."""
        for worker in self.workers:
            if worker.stops_s is not None and (worker.stops_s <= self.now_s or not worker.running):
                for request in worker.running:
                    request.handovers += 1
                self.waiting.extendleft(reversed(worker.running))
                worker.running = []
                worker.stops_s = 0.0
        self.workers = [worker for worker in self.workers if worker.stops_s != 0.0]

    def _work(self, worker: Worker) -> None:
        while self.waiting and worker.stops_s is None and len(worker.running) < self._fair_share():
            worker.running.append(self.waiting.popleft())
        if not worker.running:
            return
        share = self.shape.tokens_per_s / len(worker.running)
        going_on = []
        for request in worker.running:
            in_prompt = request.done_tokens < request.prompt_tokens  # computed side by side
            each = share if in_prompt else min(share, self.shape.tokens_per_s_of_one)
            request.done_tokens += each * STEP_S
            if request.first_token_s is None and request.done_tokens > request.prompt_tokens:
                request.first_token_s = self.now_s
            if request.done_tokens >= request.tokens:
                request.ended_s = self.now_s
                self.ended.append(request)
            else:
                going_on.append(request)
        worker.running = going_on

    def _fair_share(self) -> float:
        """Workers read side by side, so none fills up while another is empty."""
        ready = sum(each.ready_s <= self.now_s and each.stops_s is None for each in self.workers)
        demand = (self.num_running + len(self.waiting)) / max(ready, 1)
        return min(self.shape.places, demand + 1)

"""KEDA and the horizontal pod autoscaler, as far as they decide about numbers.

KEDA (`pollingInterval`, `cooldownPeriod`) decides between 0 and 1 and, once nothing is active, goes
to 0 from any number. In between the autoscaler asks every 15 s for ceil(value / target), leaves it
where it is within a tenth, and obeys `behavior` of deploy/k8s/components/keda/scaled-object.yaml.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from scaling.pool import Pool

SYNC_PERIOD_S = 15
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class Trigger:
    """A value of which each replica should have `target`."""

    name: str
    target: float
    value: Callable[[Pool], float]


def work(target_s: float = 20.0) -> Trigger:
    """tokenmill_backlog_seconds: what is left of all requests, at most, by one worker's speed."""

    def seconds(pool: Pool) -> float:
        left = sum(request.promised_tokens for request in pool.waiting)
        left += sum(request.promised_tokens for request in pool.running)
        return left / pool.shape.tokens_per_s

    return Trigger("work", target_s, seconds)


def lag(target: float = 16.0) -> Trigger:
    return Trigger("lag", target, lambda pool: float(len(pool.waiting)))


def pending(target: float = 32.0) -> Trigger:
    return Trigger("pending", target, lambda pool: float(pool.num_running))


@dataclass(frozen=True, slots=True)
class Limits:
    """The numbers of the ScaledObject."""

    polling_s: int
    cooldown_s: int
    max_replicas: int
    up_pods: int
    up_period_s: int
    down_pods: int
    down_period_s: int
    down_window_s: int


@dataclass(slots=True)
class Autoscaler:
    triggers: Sequence[Trigger]
    limits: Limits
    _active_s: float = field(default=-math.inf, init=False)
    _wanted: deque[tuple[float, int]] = field(default_factory=deque, init=False)
    _changes: deque[tuple[float, int]] = field(default_factory=deque, init=False)

    def decide(self, pool: Pool) -> int:
        """How many replicas there should be now. Called once a second."""
        second = int(pool.now_s)
        if second % self.limits.polling_s == 0:
            if any(trigger.value(pool) > 0 for trigger in self.triggers):
                self._active_s = pool.now_s
                if pool.replicas == 0:
                    return self._changed(pool, 1)
            elif pool.now_s - self._active_s > self.limits.cooldown_s:
                return self._changed(pool, 0)
        if pool.replicas and second % SYNC_PERIOD_S == 0:
            return self._changed(pool, self._synchronize(pool))
        return pool.replicas

    def _changed(self, pool: Pool, replicas: int) -> int:
        if replicas != pool.replicas:
            self._changes.append((pool.now_s, replicas - pool.replicas))
        return replicas

    def _synchronize(self, pool: Pool) -> int:
        now = pool.replicas
        wanted = max(self._desired(trigger, pool) for trigger in self.triggers)
        wanted = min(max(wanted, 1), self.limits.max_replicas)
        self._wanted.append((pool.now_s, wanted))
        while self._wanted[0][0] < pool.now_s - self.limits.down_window_s:
            self._wanted.popleft()
        if wanted > now:
            added = self._within(pool.now_s, self.limits.up_period_s, up=True)
            return min(wanted, max(now - added + self.limits.up_pods, now))
        # Down only as far as the highest wish of the window.
        wanted = min(max(number for _, number in self._wanted), now)
        removed = self._within(pool.now_s, self.limits.down_period_s, up=False)
        return max(wanted, min(now + removed - self.limits.down_pods, now))

    def _desired(self, trigger: Trigger, pool: Pool) -> int:
        value, now = trigger.value(pool), pool.replicas
        if abs(value / (trigger.target * now) - 1) <= TOLERANCE:
            return now
        return math.ceil(value / trigger.target)

    def _within(self, now_s: float, period_s: float, *, up: bool) -> int:
        """Replicas added or removed in the last period."""
        recent = [number for second, number in self._changes if second > now_s - period_s]
        return sum(abs(number) for number in recent if (number > 0) is up)

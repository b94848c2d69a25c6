"""One replay of the curve under one signal, and what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from scaling.autoscaler import Autoscaler, Limits, Trigger
from scaling.curve import Request, arrivals, duration_s, rate_at
from scaling.pool import Pool

SCALED_OBJECT = (
    Path(__file__).resolve().parents[2] / "deploy/k8s/components/keda/scaled-object.yaml"
)
SAMPLE_EVERY_S = 10


@dataclass(slots=True)
class Replay:
    """Points are (second, value)."""

    name: str
    pool: Pool
    requests: list[Request]
    points: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    restarts: int = 0  # from nothing, after the first
    most: int = 0

    def waits(self) -> list[float]:
        """Seconds to the first token, sorted; of those that never had one, until the end."""
        return sorted(
            (duration_s() if each.first_token_s is None else each.first_token_s) - each.arrives_s
            for each in self.requests
        )

    def wait_quantile_s(self, share: float) -> float:
        waits = self.waits()
        return waits[min(int(share * len(waits)), len(waits) - 1)]

    @property
    def handovers(self) -> int:
        return sum(request.handovers for request in self.requests)

    @property
    def unfinished(self) -> int:
        return sum(request.ended_s is None for request in self.requests)

    @property
    def worker_hours(self) -> float:
        return self.pool.worker_seconds / 3600


def limits_of_the_manifest() -> Limits:
    """What deploy/k8s/components/keda says is what is simulated."""
    spec = yaml.safe_load(SCALED_OBJECT.read_text())["spec"]
    behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    (up,), (down,) = behavior["scaleUp"]["policies"], behavior["scaleDown"]["policies"]
    return Limits(
        polling_s=spec["pollingInterval"],
        cooldown_s=spec["cooldownPeriod"],
        max_replicas=spec["maxReplicaCount"],
        up_pods=up["value"],
        up_period_s=up["periodSeconds"],
        down_pods=down["value"],
        down_period_s=down["periodSeconds"],
        down_window_s=behavior["scaleDown"]["stabilizationWindowSeconds"],
    )


def target_of_the_manifest() -> float:
    (trigger,) = yaml.safe_load(SCALED_OBJECT.read_text())["spec"]["triggers"]
    return float(trigger["metadata"]["targetValue"])


def replay(name: str, triggers: Sequence[Trigger], *, scale: float = 1.0) -> Replay:
    """Replay the curve, `scale` times as high."""
    requests = arrivals(scale=scale)
    pool = Pool(deque(requests))
    scaler = Autoscaler(triggers, limits_of_the_manifest())
    result = Replay(name, pool, requests)
    starts = 0
    while pool.now_s < duration_s():
        pool.step()
        before = pool.replicas
        wanted = scaler.decide(pool)
        starts += before == 0 and wanted > 0
        pool.resize(wanted)
        result.most = max(result.most, pool.replicas)
        if int(pool.now_s) % SAMPLE_EVERY_S == 0:
            _sample(result, scale)
    result.restarts = max(starts - 1, 0)
    return result


def _sample(result: Replay, scale: float) -> None:
    pool = result.pool
    values = {
        "requests": rate_at(pool.now_s) * scale,
        "replicas": float(pool.replicas),
        "waiting": float(len(pool.waiting)),
        "running": float(pool.num_running),
    }
    for name, value in values.items():
        result.points.setdefault(name, []).append((pool.now_s, value))

"""What the engines did while the demo ran, from the workers' own metrics."""

from __future__ import annotations

import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

STEPS = "tokenmill_engine_steps_total"
GENERATION_TOKENS = "vllm:generation_tokens_total"


@dataclass(frozen=True, slots=True)
class EngineSteps:
    """Counters summed over the workers."""

    steps: int = 0
    generation_tokens: int = 0

    @classmethod
    def read(cls, addresses: Sequence[str]) -> Self:
        """From the /metrics of every worker at `host:port`."""
        texts = [_get(address) for address in addresses]
        return cls(
            steps=sum(counter_value(text, STEPS) for text in texts),
            generation_tokens=sum(counter_value(text, GENERATION_TOKENS) for text in texts),
        )

    def since(self, before: EngineSteps) -> EngineSteps:
        return EngineSteps(
            self.steps - before.steps, self.generation_tokens - before.generation_tokens
        )

    @property
    def mean_batch_size(self) -> float | None:
        """Sequences that got a token in a step, on average: each got exactly one."""
        return self.generation_tokens / self.steps if self.steps else None


def counter_value(exposition: str, name: str) -> int:
    """The sum of a counter's series in a text exposition."""
    lines = exposition.splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith(f"{name}{{"))


def _get(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as reply:
        text: str = reply.read().decode()
        return text

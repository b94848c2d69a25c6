"""What the stages of a device check share: the device, its clock, and where results go."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tokenmill_engine.cuda_graphs import Computation, CudaGraphs, GraphDriver


class CheckFailed(AssertionError):
    """A result is wrong; timings that depend on it mean nothing."""


@dataclass
class Bench:
    """One run of the check. `tiny`: the same code on sizes that a CPU computes in seconds."""

    device: torch.device
    tiny: bool
    stage: str = ""
    deadline_s: float = 0.0
    lines: list[dict[str, object]] = field(default_factory=list)
    printed: list[str] = field(default_factory=list)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.is_cuda else torch.float32

    def line(self, what: str, **figures: object) -> None:
        """A result, printed at once: what is known when the time is up must not be lost."""
        self.lines.append({"stage": self.stage, "what": what, **figures})
        shown = "  ".join(f"{name} {_shown(value)}" for name, value in figures.items())
        self.printed.append(f"[{self.stage}] {what}: {shown}")
        print(self.printed[-1], flush=True)

    def require(self, holds: bool, what: str) -> None:
        if not holds:
            self.line(what, passed=False)
            raise CheckFailed(what)

    @property
    def is_out_of_time(self) -> bool:
        return time.monotonic() > self.deadline_s

    def median_ms(self, work: Callable[[], object], repeats: int = 20) -> float:
        """Of `work` after three rounds that do not count, by the device's own clock."""
        repeats = 1 if self.tiny else repeats
        for _ in range(0 if self.tiny else 3):
            work()
        return statistics.median(self._once_ms(work) for _ in range(repeats))

    def _once_ms(self, work: Callable[[], object]) -> float:
        if not self.is_cuda:
            began_s = time.perf_counter()
            work()
            return (time.perf_counter() - began_s) * 1e3
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    def graph_driver(self) -> GraphDriver:
        return CudaGraphs() if self.is_cuda else _CallAgain()


class _CallAgain:
    """Stands for graphs where there is no GPU."""

    def capture(self, compute: Computation) -> Computation:
        return compute


def _shown(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

"""Recording what a computation launches on a GPU, to launch it all again at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Computation = Callable[[], None]


class GraphDriver(Protocol):
    """Turns a computation over fixed memory into one that repeats it with little effort."""

    def capture(self, compute: Computation) -> Computation:
        """Record `compute`, which has run before; the result repeats it on what memory holds then.

        Raises RuntimeError if it cannot be recorded.
        """


class CudaGraphs:
    """`GraphDriver` on the current GPU.

    The graphs share their scratch memory: never run two of them at the same time.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, compute: Computation) -> Computation:
        """See `GraphDriver.capture`. What other threads do meanwhile is not recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        replay: Computation = graph.replay
        return replay

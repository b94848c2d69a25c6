"""The room of a worker, shared by its lanes: what one is about to lease, the others must not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Places:
    """`free` says how many more requests fit; between the reading of an entry and its lease it does
    not know of it yet."""

    def __init__(self, free: Callable[[], int]) -> None:
        self._free = free
        self._reserved = 0

    def num_free(self) -> int:
        return self._free() - self._reserved

    @contextmanager
    def reserved(self, count: int) -> Iterator[None]:
        """Keep `count` places from the others meanwhile."""
        self._reserved += count
        try:
            yield
        finally:
            self._reserved -= count

"""Arrays with a fixed place on the device that are filled on the host and sent in one copy.

What a CUDA graph reads must lie where it lay at its capture. All inputs of a step share one piece
of memory, so that one transfer brings them over, whatever their number.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import DTypeLike, NDArray

from .transfers import new_event

_ALIGNMENT_BYTES = 64  # kernels are compiled for addresses that 16 divides

HostArrays = Mapping[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Layout:
    """Shape and type of one array."""

    shape: tuple[int, ...]
    dtype: DTypeLike

    @property
    def num_bytes(self) -> int:
        return int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize


class StaticArrays:
    """`host()` gives the arrays to fill, `send()` copies them to `tensors`, which stay in place.

    There are two copies on a host with a GPU: one is filled while the other may still be read.
    """

    def __init__(self, layouts: Mapping[str, Layout], device: torch.device) -> None:
        starts: dict[str, int] = {}
        size = 0
        for name, layout in layouts.items():
            starts[name] = size
            size += -(-layout.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        is_cuda = device.type == "cuda"
        self._copies = [_HostCopy(size, is_cuda) for _ in range(2 if is_cuda else 1)]
        views = {name: _view(self._memory, start, layouts[name]) for name, start in starts.items()}
        self.tensors: Mapping[str, torch.Tensor] = views
        self._hosts = [
            {
                name: _view(copy.memory, start, layouts[name]).numpy()
                for name, start in starts.items()
            }
            for copy in self._copies
        ]
        self._turn = 0

    def host(self) -> HostArrays:
        """The arrays of the next step; what they held before is some earlier step's."""
        self._copies[self._turn].wait()
        return self._hosts[self._turn]

    def send(self) -> None:
        """What `host` returned goes to the device, behind everything that was launched there."""
        self._copies[self._turn].send_to(self._memory)
        self._turn = (self._turn + 1) % len(self._copies)


class _HostCopy:
    """Memory that the device may read on its own, and whether it still does."""

    def __init__(self, size: int, is_pinned: bool) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8, pin_memory=is_pinned)
        self._was_read = new_event() if is_pinned else None

    def wait(self) -> None:
        if self._was_read is not None:
            self._was_read.synchronize()  # returns at once when nothing was recorded

    def send_to(self, memory: torch.Tensor) -> None:
        memory.copy_(self.memory, non_blocking=True)
        if self._was_read is not None:
            self._was_read.record()


def _view(memory: torch.Tensor, start: int, layout: Layout) -> torch.Tensor:
    kind = torch.from_numpy(np.empty(0, layout.dtype)).dtype
    return memory[start : start + layout.num_bytes].view(kind).view(layout.shape)

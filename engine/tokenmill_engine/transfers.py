"""Copies between host and device that wait for nothing, and the event that tells of their end."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def send(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, behind all that was launched there; on a CPU the array itself."""
    host = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return host.to(device)
    # A copy from pageable memory first waits for everything before it.
    return host.pin_memory().to(device, non_blocking=True)


class Fetch:
    """Numbers on their way to the host: `values` waits for them.

    Without a tensor it tells when what was launched before it has ended.
    """

    def __init__(self, tensor: Tensor | None, device: torch.device) -> None:
        self._host = tensor
        self._end: torch.cuda.Event | None = None
        if device.type == "cuda":
            if tensor is not None:
                self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
                self._host.copy_(tensor, non_blocking=True)
            self._end = new_event()
            self._end.record()

    def values(self) -> list[int]:
        """Raises RuntimeError for what went wrong on the device."""
        if self._end is not None:
            self._end.synchronize()
        return [] if self._host is None else self._host.tolist()

    def seconds_since(self, began: torch.cuda.Event) -> float:
        """Between an event recorded earlier and the end; both have happened."""
        if self._end is None:
            raise ValueError("there are no events on a CPU")
        milliseconds: float = began.elapsed_time(self._end)
        return milliseconds / 1000


def new_event() -> torch.cuda.Event:
    """One that tells the time as well."""
    event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event

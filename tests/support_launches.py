"""How many kernels a GPU would launch for a forward, counted on a CPU; and bfloat16 as GPUs round.

Torch's operations are watched as they are dispatched, ours are counted where they are launched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

#: They take memory and leave it as it is.
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class Launches(TorchDispatchMode):
    """`counts` by name: torch's operations as `aten::…`, ours by the name of the kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        if name not in ALLOCATIONS and not _is_view(func, args, result):
            self.counts[f"aten::{name}"] += 1
        return result

    @contextmanager
    def of(self, owner: object, attribute: str) -> Iterator[None]:
        """Also those of the kernels that `owner` holds as `attribute`."""
        kernels: ModuleType = getattr(owner, attribute)
        counted = {
            name: _Counted(name, kernel, self.counts)
            for name, kernel in vars(kernels).items()
            if hasattr(kernel, "run")
        }
        setattr(owner, attribute, SimpleNamespace(**counted))
        try:
            yield
        finally:
            setattr(owner, attribute, kernels)


class _Counted:
    """A kernel whose launch is one thing, however the interpreter goes about it."""

    def __init__(self, name: str, kernel: Any, counts: Counter[str]) -> None:
        self.name, self.kernel, self.counts = name, kernel, counts

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            self.counts[self.name] += 1
            with _disable_current_modes():
                self.kernel[grid](*args, **kwargs)

        return launch


def _is_view(func: Any, args: object, result: object) -> bool:
    if func._schema.is_mutable or not isinstance(result, torch.Tensor):
        return False
    storages = {
        leaf.untyped_storage().data_ptr()
        for leaf in tree_leaves(args)
        if isinstance(leaf, torch.Tensor)
    }
    return result.untyped_storage().data_ptr() in storages


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """As GPUs do; Triton's interpreter cuts float32 off where it becomes bfloat16."""
    import triton.language as tl
    from triton.runtime import interpreter

    cut_off = interpreter._convert_float

    def convert(numbers: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut_off(numbers, source, target, mode)
        bits = np.ascontiguousarray(numbers).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)

"""Paged attention on a GPU by the Triton kernels in `kernels/triton_paged_attention.py`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Protocol

import numpy as np
import torch

from .attention import AttentionMetadata, AttentionRule, AttentionSpec, LayerCache
from .fused_operations import HeadPreparation
from .kernels.build import KernelUnavailable
from .transfers import send
from .triton_tiles import (
    DTYPES,
    MAX_HEAD_DIM,
    CallShape,
    Tile,
    attend_constants,
    decode_tile,
    heads_per_program,
    merge_constants,
    prompt_tile,
)
from .triton_writes import load_elementwise_kernels, write_kv, write_prepared
from .work_list import SPLIT_TOKENS, StepTables, Table, WorkKey, WorkList, plan_work, step_tables

#: Ampere: bfloat16 and asynchronous copies. The kernels were compiled for nothing older.
MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, eq=False)
class DevicePlan:
    """`StepTables` and `WorkList` as int32 tensors on the device."""

    num_parts: int  # room that the parts of split rows need
    sequences: torch.Tensor  # [S, 4]
    block_ids: torch.Tensor  # [N]
    decode_items: torch.Tensor  # [W, 4]
    prompt_items: torch.Tensor  # [V, 4]
    merges: torch.Tensor  # [M, 4]


class PlanSource(Protocol):
    """Where the backend finds the plan of the step that runs."""

    def plan(self, meta: AttentionMetadata, key: WorkKey) -> DevicePlan:
        """The work of a step under `key`; asked once per attention call."""


class FreshPlans:
    """Plans each step anew: one copy to the device for the step, and one per `WorkKey`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._meta: AttentionMetadata | None = None  # the step that the others belong to
        self._tables: list[torch.Tensor] = []
        self._plans: dict[WorkKey, DevicePlan] = {}

    def plan(self, meta: AttentionMetadata, key: WorkKey) -> DevicePlan:
        """See `PlanSource.plan`."""
        if meta is not self._meta:
            self._meta, self._plans = meta, {}
            self._tables = _upload(_arrays(step_tables(meta)), self._device)
        if key not in self._plans:
            work = plan_work(meta, key)
            lists = _upload(_arrays(work), self._device)
            self._plans[key] = DevicePlan(work.num_parts, *self._tables, *lists)
        return self._plans[key]


class TritonPagedAttention:
    """`AttentionBackend` with K as `[block, Hkv, slot, D]` and V as `[block, Hkv, slot, Dv]`.

    `plans` may be set to another source, such as one whose tensors stay where a CUDA graph has seen
    them. Raises KernelUnavailable where the kernels do not run or do not fit a call of `specs`.
    """

    prepares_heads = True

    def __init__(
        self,
        specs: Iterable[AttentionSpec],
        device: torch.device,
        *,
        split_tokens: int = SPLIT_TOKENS,
    ) -> None:
        for spec in specs:
            _check(spec)
        self._kernels, self._elementwise = load_triton_kernels(), load_elementwise_kernels()
        self._interpreted = _check_device(self._kernels, device)
        self._split_tokens = split_tokens
        self.plans: PlanSource = FreshPlans(device)

    def cache_shapes(
        self, spec: AttentionSpec, num_blocks: int, block_size: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        head = (num_blocks, spec.num_kv_heads, block_size)
        return (*head, spec.key_dim), (*head, spec.value_dim)

    def work_key(self, shape: CallShape, rule: AttentionRule) -> WorkKey:
        """Names the work list that calls of `shape` under `rule` share."""
        rows = prompt_tile(shape).rows // shape.groups
        return WorkKey(rule.window, rule.chunk, rows, self._split_tokens)

    def write_and_attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layer: LayerCache,
        meta: AttentionMetadata,
        rule: AttentionRule,
        *,
        heads: HeadPreparation | None = None,
    ) -> torch.Tensor:
        """See `PreparingBackend.write_and_attend`."""
        query, key, value = map(_dense_last, (query, key, value))
        shape = CallShape(
            query.shape[1], key.shape[1], key.shape[2], value.shape[2], dtype=query.dtype
        )
        slots = (meta.slot_blocks, meta.slot_offsets)
        if heads is None:
            write_kv(self._kernels, key, value, layer, slots, shape)
        else:
            rows = (query, key, value)
            query = write_prepared(self._elementwise, rows, heads, layer, slots, shape)
        plan = self.plans.plan(meta, self.work_key(shape, rule))
        call = _Call(self._kernels, shape, rule, layer, plan, meta.block_size, self._interpreted)
        return call.attend(query, self._split_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """One attention call of a step, K and V of whose rows are in the cache."""

    kernels: ModuleType
    shape: CallShape
    rule: AttentionRule
    layer: LayerCache
    plan: DevicePlan
    block_size: int
    interpreted: bool

    def attend(self, query: torch.Tensor, split_tokens: int) -> torch.Tensor:
        """-> `[T, H, Dv]`"""
        shape, plan = self.shape, self.plan
        output = query.new_empty(len(query), shape.num_heads, shape.value_dim)
        padded = shape.dim_constants["VALUE_PADDED"]
        room = max(plan.num_parts, 1) * shape.num_heads
        parts = (
            query.new_empty(room, padded, dtype=torch.float32),
            query.new_empty(room, 2, dtype=torch.float32),
        )
        tensors = (output, *parts, query)
        self._launch(tensors, plan.decode_items, decode_tile(shape), split_tokens)
        self._launch(tensors, plan.prompt_items, prompt_tile(shape), 0)
        if len(plan.merges):
            grid = (len(plan.merges), -(-shape.num_heads // heads_per_program(shape.num_heads)))
            self.kernels.merge[grid](
                output,
                *parts,
                self._sinks(output),
                plan.sequences,
                plan.merges,
                **merge_constants(shape, self.rule),
            )
        return output

    def _launch(
        self, tensors: tuple[torch.Tensor, ...], items: torch.Tensor, tile: Tile, split_tokens: int
    ) -> None:
        """`tensors`: output, values and statistics of parts, query."""
        if not len(items):
            return
        query = tensors[-1]
        constants = attend_constants(
            self.shape,
            self.rule,
            tile,
            block_size=self.block_size,
            split_tokens=split_tokens,
        )
        self.kernels.attend[len(items), self.shape.num_kv_heads](
            *tensors,
            self.layer.key,
            self.layer.value,
            self._sinks(query),
            self.plan.sequences,
            self.plan.block_ids,
            items,
            float(self.rule.scaling),
            float(self.rule.softcap or 0.0),
            *query.stride()[:2],
            *self.layer.key.stride()[:3],
            *self.layer.value.stride()[:3],
            **constants,
            UPCAST=self.interpreted and query.dtype == torch.bfloat16,
            **tile.options,
        )

    def _sinks(self, otherwise: torch.Tensor) -> torch.Tensor:
        """A kernel without sinks still wants a pointer."""
        return otherwise if self.rule.sinks is None else self.rule.sinks.detach().contiguous()


def load_triton_kernels() -> ModuleType:
    """The module of the kernels. Raises KernelUnavailable where there is no Triton."""
    if importlib.util.find_spec("triton") is None:
        raise KernelUnavailable("there is no triton; torch's builds for CUDA bring it along")
    return importlib.import_module(".kernels.triton_paged_attention", __package__)


def _check(spec: AttentionSpec) -> None:
    if spec.dtype not in DTYPES:
        raise KernelUnavailable(f"the kernel does not compute in {spec.dtype}")
    widest = max(spec.key_dim, spec.value_dim)
    if widest > MAX_HEAD_DIM:
        raise KernelUnavailable(f"heads of {widest} numbers are wider than {MAX_HEAD_DIM}")


def _check_device(kernels: ModuleType, device: torch.device) -> bool:
    """Whether Triton's interpreter runs the kernels (tests without a GPU)."""
    if type(kernels.attend).__name__ == "InterpretedFunction":
        return True
    if device.type != "cuda":
        raise KernelUnavailable(f"the kernel does not run on {device.type}")
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        raise KernelUnavailable(
            f"the GPU has compute capability {capability[0]}.{capability[1]}; "
            f"the kernel needs {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]}"
        )
    try_out(kernels, device)
    return False


def try_out(kernels: ModuleType, device: torch.device) -> None:
    """Launch the smallest kernel: Triton needs a C compiler, Python's headers and a cache folder.

    Raises KernelUnavailable where the launch fails or does nothing.
    """
    try:
        numbers = torch.ones(1, 1, 16, device=device)
        cache = torch.zeros(1, 1, 1, 16, device=device)
        slot = torch.zeros(1, dtype=torch.int64, device=device)
        shape = CallShape(1, 1, 16, 16, numbers.dtype)
        write_kv(kernels, numbers, numbers, LayerCache(cache, cache), (slot, slot), shape)
        done = bool((cache == 1).all())
    except Exception as error:  # of the compiler, the driver or the file system
        reason = str(error).strip().partition("\n")[0]
        raise KernelUnavailable(f"Triton cannot run here: {reason}") from error
    if not done:
        raise KernelUnavailable("Triton cannot run here: a kernel wrote nothing")


def _arrays(tables: StepTables | WorkList) -> tuple[Table, ...]:
    if isinstance(tables, StepTables):
        return tables.sequences, tables.block_ids
    return tables.decode_items, tables.prompt_items, tables.merges


def _upload(arrays: tuple[Table, ...], device: torch.device) -> list[torch.Tensor]:
    """All of them in one copy."""
    packed = np.concatenate([array.ravel() for array in arrays])
    on_device = send(packed, device)
    ends = np.cumsum([array.size for array in arrays]).tolist()
    return [
        on_device[end - array.size : end].view(array.shape)
        for end, array in zip(ends, arrays, strict=True)
    ]


def _dense_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

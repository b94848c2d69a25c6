"""What holds for the Triton attention besides its numbers: neighbours, padding, and refusals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the dev extra brings triton on Linux")

from support_paged import CPU, Case, CaseRun
from tokenmill_engine.attention import AttentionMetadata, AttentionSpec, LayerCache
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.kernel_choice import choose_attention
from tokenmill_engine.kernels.build import KernelUnavailable
from tokenmill_engine.paged_attention_reference import TorchPagedAttention
from tokenmill_engine.triton_attention import (
    DevicePlan,
    FreshPlans,
    TritonPagedAttention,
    load_triton_kernels,
    try_out,
)
from tokenmill_engine.triton_tiles import MAX_HEAD_DIM
from tokenmill_engine.work_list import WorkKey

CASE = Case(
    dims=(24, 16),
    groups=3,
    kv_heads=2,
    block_size=16,
    step="mixed",
    kv="long",
    window=None,
    chunk=None,
    softcap=None,
    sinks=True,
    split_tokens=32,
    layout="HND",
    dtype=torch.float32,
    seed=1,
)
LENGTHS = [(1, 70), (7, 40), (1, 5)]


@pytest.fixture
def run() -> CaseRun:
    return CaseRun(CASE, LENGTHS)


def attend(run: CaseRun, chosen: list[int], seed: int = 0) -> torch.Tensor:
    rows, layer, meta = run.step(chosen, seed)
    return run.backend().write_and_attend(*rows, layer, meta, run.rule)


def test_a_sequence_alone_in_other_blocks_has_the_same_bits(run: CaseRun) -> None:
    together = attend(run, [0, 1, 2])

    alone = [attend(run, [i], seed=1) for i in range(3)]

    assert torch.equal(torch.cat(alone), together)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # by the interpreter's maximum
def test_a_neighbour_full_of_nan_harms_nobody(run: CaseRun) -> None:
    healthy = attend(run, [0, 1, 2])
    for numbers in (run.queries, run.keys, run.values):
        numbers[1].fill_(float("nan"))

    output = attend(run, [0, 1, 2])

    assert output[1:8].isnan().all()
    assert torch.equal(output[[0, 8]], healthy[[0, 8]])


def test_only_the_slots_of_the_step_are_written(run: CaseRun) -> None:
    rows, layer, meta = run.step([0, 1, 2])
    before = LayerCache(layer.key.clone(), layer.value.clone())

    run.backend().write_and_attend(*rows, layer, meta, run.rule)

    where = meta.slot_blocks, slice(None), meta.slot_offsets
    assert torch.equal(layer.key[where], rows[1])
    assert torch.equal(layer.value[where], rows[2])
    for now, then in ((layer.key, before.key), (layer.value, before.value)):
        now[where] = float("nan")
        torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)


class PaddedPlans:
    """Plans with room for more than the step has, as a captured graph holds them."""

    def __init__(self) -> None:
        self._fresh = FreshPlans(CPU)

    def plan(self, meta: AttentionMetadata, key: WorkKey) -> DevicePlan:
        plan = self._fresh.plan(meta, key)
        nothing = torch.full((5, 4), -1, dtype=torch.int32)
        longer = {
            name: torch.cat([getattr(plan, name), nothing])
            for name in ("decode_items", "prompt_items", "merges")
        }
        return replace(plan, num_parts=plan.num_parts + 9, **longer)


def test_unused_items_and_padding_rows_leave_others_alone(run: CaseRun) -> None:
    expected = attend(run, [0, 1, 2])
    rows, layer, meta = run.step([0, 1, 2])
    padding = 3  # rows of block 0, each a sequence without tokens
    padded = replace(
        meta,
        cu_rows=np.append(meta.cu_rows, meta.cu_rows[-1] + 1 + np.arange(padding)),
        kv_lens=np.append(meta.kv_lens, [0] * padding),
        cu_blocks=np.append(meta.cu_blocks, [meta.cu_blocks[-1]] * padding),
        slot_blocks=torch.cat([meta.slot_blocks, torch.zeros(padding, dtype=torch.int64)]),
        slot_offsets=torch.cat([meta.slot_offsets, torch.zeros(padding, dtype=torch.int64)]),
    )
    wider = [torch.cat([part, part.new_ones(padding, *part.shape[1:])]) for part in rows]
    backend = run.backend()
    backend.plans = PaddedPlans()

    output = backend.write_and_attend(*wider, layer, padded, run.rule)

    assert torch.equal(output[:-padding], expected)
    assert torch.equal(output[-padding:], torch.zeros_like(output[-padding:]))


def test_a_step_is_planned_once_for_all_calls_that_agree(run: CaseRun) -> None:
    _, _, meta = run.step([0, 1, 2])
    plans = FreshPlans(CPU)
    key = WorkKey(None, None, 4)

    plan, other = plans.plan(meta, key), plans.plan(meta, WorkKey(9, None, 4))

    assert plans.plan(meta, key) is plan
    assert other.sequences is plan.sequences
    assert plans.plan(replace(meta), key) is not plan  # the next step


def spec(**settings: object) -> AttentionSpec:
    return replace(AttentionSpec(None, None, 2, 64, 64, torch.float32), **settings)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"value_dim": MAX_HEAD_DIM + 1}, f"heads of {MAX_HEAD_DIM + 1}"),
    ],
)
def test_calls_that_do_not_fit_are_refused(settings: dict[str, object], why: str) -> None:
    with pytest.raises(KernelUnavailable, match=why):
        TritonPagedAttention([spec(), spec(**settings)], CPU)


def test_a_compiled_kernel_wants_a_gpu_that_it_was_compiled_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = type("JITFunction", (), {})()
    monkeypatch.setattr("tokenmill_engine.kernels.triton_paged_attention.attend", compiled)
    with pytest.raises(KernelUnavailable, match="does not run on cpu"):
        TritonPagedAttention([spec()], CPU)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(KernelUnavailable, match=r"compute capability 7\.5"):
        TritonPagedAttention([spec()], torch.device("cuda"))


def test_a_machine_where_triton_cannot_compile_shows_before_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernels = load_triton_kernels()
    try_out(kernels, CPU)

    def no_compiler(*_: object, **__: object) -> None:
        raise RuntimeError("Failed to find C compiler.")

    for broken, why in ((no_compiler, "find C compiler"), (lambda *_, **__: None, "wrote nothing")):
        monkeypatch.setattr(kernels, "write_kv", {(1, 1): broken})
        with pytest.raises(KernelUnavailable, match=why):
            try_out(kernels, CPU)


def test_without_triton_the_kernel_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(KernelUnavailable, match="no triton"):
        TritonPagedAttention([spec()], CPU)


def test_a_gpu_gets_the_triton_kernel_unless_told_otherwise() -> None:
    gpu = torch.device("cuda")
    for kernels in ("auto", "native"):
        assert isinstance(choose_attention(kernels, [spec()], gpu), TritonPagedAttention)
    assert isinstance(choose_attention("torch", [spec()], gpu), TorchPagedAttention)


def test_what_triton_cannot_do_falls_back_to_torch_or_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = [spec(key_dim=MAX_HEAD_DIM + 1)]
    with caplog.at_level("WARNING"):
        backend = choose_attention("auto", wide, torch.device("cuda"))
    assert isinstance(backend, TorchPagedAttention)
    assert "heads of" in caplog.text

    with pytest.raises(ConfigError, match="heads of"):
        choose_attention("native", wide, torch.device("cuda"))

"""Buckets, the fixed memory of a step's inputs, and the room for its plan."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from support_models import make_step
from tokenmill_engine.graph_buckets import Bucket, Buckets, StepLimits
from tokenmill_engine.graph_plans import StaticPlans, pad_metadata
from tokenmill_engine.static_arrays import Layout, StaticArrays
from tokenmill_engine.step_inputs import build_step_inputs
from tokenmill_engine.work_list import WorkKey, plan_work, step_tables

CPU = torch.device("cpu")
LIMITS = StepLimits(max_rows=48, max_seqs=12, max_model_len=80, num_blocks=60, block_size=4)
KEYS = (WorkKey(None, None, 5, 16), WorkKey(7, None, 16, 8), WorkKey(None, 8, 2, 16))


@pytest.mark.parametrize(
    ("num_rows", "num_seqs", "expected"),
    [
        (1, 1, Bucket(1, is_decode=True)),
        (3, 3, Bucket(4, is_decode=True)),
        (12, 12, Bucket(12, is_decode=True)),
        (2, 1, Bucket(16, is_decode=False)),
        (33, 12, Bucket(48, is_decode=False)),
        (49, 12, None),
    ],
)
def test_a_step_runs_in_the_smallest_bucket(
    num_rows: int, num_seqs: int, expected: Bucket | None
) -> None:
    assert Buckets(LIMITS).choose(num_rows, num_seqs) == expected


def test_every_size_up_to_the_limits_has_a_bucket() -> None:
    for max_seqs in (1, 7, 128, 256):
        buckets = Buckets(
            StepLimits(2048, max_seqs, max_model_len=4096, num_blocks=4096, block_size=16)
        )
        for rows in range(1, max_seqs + 1):
            assert buckets.choose(rows, rows).num_rows >= rows
        for rows in range(max_seqs + 1, 2049):
            assert buckets.choose(rows, 1).num_rows >= rows


def random_step(rng: random.Random) -> list[tuple[list[int], int, int, list[int]]]:
    """As large as the limits allow, blocks not shared."""
    rows, blocks = rng.randint(1, LIMITS.max_rows), LIMITS.num_blocks
    parts = []
    for _ in range(rng.randint(1, LIMITS.max_seqs)):
        count = 1 if rng.random() < 0.6 else rng.randint(1, max(1, rows // 2))
        end = rng.randint(count, LIMITS.max_model_len)
        needed = -(-end // LIMITS.block_size)
        if count > rows or needed > blocks:
            continue
        rows, blocks = rows - count, blocks - needed
        parts.append(([1] * end, end - count, end, list(range(blocks, blocks + needed))))
    return parts or [([1], 0, 1, [0])]


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_without_shared_blocks_has_room_and_arrives(seed: int) -> None:
    step = make_step(random_step(random.Random(seed)))
    buckets = Buckets(LIMITS)
    bucket = buckets.choose(step.num_batched_tokens, len(step.scheduled))
    plans = StaticPlans(bucket, buckets, KEYS)
    arrays = StaticArrays(plans.layouts(), CPU)
    plans.attach(arrays.tensors)
    meta = build_step_inputs(step, block_size=LIMITS.block_size, device=CPU).metadata
    meta = pad_metadata(meta, bucket)
    assert int(meta.cu_rows[-1]) == bucket.num_rows
    for values in arrays.host().values():
        values.fill(77)  # what an earlier step left
    assert plans.fill(meta, arrays.host())
    arrays.send()
    for key in KEYS:
        plan, work = plans.plan(meta, key), plan_work(meta, key)
        check_table(plan.sequences, step_tables(meta).sequences, 0)
        check_table(plan.block_ids, step_tables(meta).block_ids, 0)
        check_table(plan.decode_items, work.decode_items, -1)
        check_table(plan.prompt_items, work.prompt_items, -1)
        check_table(plan.merges, work.merges, -1)
        assert work.num_parts <= plan.num_parts


def check_table(found: torch.Tensor, expected: np.ndarray, rest: int) -> None:
    assert torch.equal(found[: len(expected)], torch.from_numpy(expected))
    assert bool((found[len(expected) :] == rest).all())


def test_a_plan_that_is_too_large_is_refused() -> None:
    """Sequences that share blocks may need more entries than there are blocks."""
    shared = list(range(20))
    step = make_step([([1] * 80, 79, 80, shared)] * 4)
    buckets = Buckets(LIMITS)
    bucket = buckets.choose(4, 4)
    plans = StaticPlans(bucket, buckets, KEYS)
    host = StaticArrays(plans.layouts(), CPU).host()
    meta = build_step_inputs(step, block_size=4, device=CPU).metadata
    assert not plans.fill(meta, host)


def test_arrays_arrive_together_and_stay_in_place() -> None:
    layouts = {
        "ids": Layout((3,), np.int64),
        "flags": Layout((5,), np.bool_),
        "none": Layout((0, 4), np.int32),
        "numbers": Layout((2, 3), np.float64),
    }
    arrays = StaticArrays(layouts, CPU)
    places = {name: tensor.data_ptr() for name, tensor in arrays.tensors.items()}
    for turn in range(3):
        host = arrays.host()
        host["ids"][:] = [turn, 2, 3]
        host["flags"][:] = [True, False, turn == 1, False, True]
        host["numbers"][:] = turn / 7
        before = arrays.tensors["ids"].tolist()
        assert before == ([0, 0, 0] if turn == 0 else [turn - 1, 2, 3])
        arrays.send()
        assert arrays.tensors["ids"].tolist() == [turn, 2, 3]
        assert arrays.tensors["flags"].tolist() == [True, False, turn == 1, False, True]
        assert arrays.tensors["numbers"].tolist() == [[turn / 7] * 3] * 2
        assert arrays.tensors["none"].shape == (0, 4)
    assert {name: tensor.data_ptr() for name, tensor in arrays.tensors.items()} == places
    assert all(place % 16 == 0 for name, place in places.items() if name != "none")

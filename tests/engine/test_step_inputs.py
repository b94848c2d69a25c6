"""From a scheduled step to tensors, against numbers worked out by hand."""

from __future__ import annotations

import torch

from support_models import make_step
from tokenmill_engine.outputs import ScheduledRequest, SchedulerOutput
from tokenmill_engine.request import Request
from tokenmill_engine.sampling_params import SamplingParams
from tokenmill_engine.step_inputs import StepInputs, build_step_inputs


def inputs_of(rope_switch_tokens: int | None = None) -> StepInputs:
    """A decode at position 5, a chunk that ends at a block's border, a chunk that samples."""
    step = make_step(
        [
            ([10, 11, 12, 13, 14, 15], 5, 6, [7, 2]),
            ([20, 21, 22, 23, 24, 25, 26, 27, 28], 2, 8, [4, 0, 9]),
            ([30, 31], 0, 2, [5]),
        ]
    )
    return build_step_inputs(
        step, block_size=4, device=torch.device("cpu"), rope_switch_tokens=rope_switch_tokens
    )


def test_rows_lie_back_to_back() -> None:
    inputs = inputs_of()
    assert inputs.input_ids.tolist() == [[15, 22, 23, 24, 25, 26, 27, 30, 31]]
    assert inputs.position_ids.tolist() == [[5, 2, 3, 4, 5, 6, 7, 0, 1]]
    assert inputs.logits_rows.tolist() == [0, 8]
    assert inputs.metadata.cu_rows.tolist() == [0, 1, 7, 9]
    assert inputs.metadata.kv_lens.tolist() == [6, 8, 2]


def test_every_row_has_its_slot() -> None:
    meta = inputs_of().metadata
    assert meta.slot_blocks.tolist() == [2, 4, 4, 0, 0, 0, 0, 5, 5]
    assert meta.slot_offsets.tolist() == [1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_block_tables_are_cut_to_what_the_step_needs() -> None:
    meta = inputs_of().metadata
    assert meta.block_ids.tolist() == [7, 2, 4, 0, 5]
    assert meta.cu_blocks.tolist() == [0, 2, 4, 5]


def test_rope_regimes_follow_the_request_and_not_the_row() -> None:
    assert inputs_of().long_rows is None
    assert inputs_of(rope_switch_tokens=9).long_rows is None
    long_rows = inputs_of(rope_switch_tokens=8).long_rows
    assert long_rows is not None
    assert long_rows.shape == (1, 9, 1)
    assert long_rows.flatten().tolist() == [False] + [True] * 6 + [False] * 2


def test_an_unread_token_is_named_by_its_place_among_the_last_samples() -> None:
    decode = Request("decode", [10, 11, 12, 13, 14], SamplingParams())
    decode.block_ids, decode.num_unread_tokens, decode.unread_place = [7, 2], 1, 3
    chunk = Request("chunk", [20, 21, 22], SamplingParams())
    chunk.block_ids = [4]
    after = Request("after", [30], SamplingParams())
    after.block_ids, after.num_unread_tokens, after.unread_place = [5], 1, 0
    step = SchedulerOutput(
        (
            ScheduledRequest(decode, 5, 1),
            ScheduledRequest(chunk, 0, 2),
            ScheduledRequest(after, 0, 2),
        )
    )
    inputs = build_step_inputs(step, block_size=4, device=torch.device("cpu"))
    assert inputs.input_ids.tolist() == [[0, 20, 21, 30, 0]]
    assert inputs.position_ids.tolist() == [[5, 0, 1, 0, 1]]
    assert inputs.sources is not None
    assert inputs.sources.tolist() == [3, -1, -1, -1, 0]
    assert inputs.logits_rows.tolist() == [0, 4]
    assert inputs_of().sources is None

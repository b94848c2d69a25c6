"""LongRoPE per row. That whole generations are exact, the zoo shows."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from support_models import make_step, tiny_model, tiny_runner
from support_zoo import SERVED
from tokenmill_engine.errors import UnsupportedModel
from tokenmill_engine.long_rope import install_long_rope

SWITCH_TOKENS = 24


def phi3() -> PreTrainedModel:
    variant = SERVED["phi3 longrope mixed"]
    return tiny_model(variant.class_name, **variant.config)


def rotations(model: PreTrainedModel, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin `[1, length, D]` as the model uses them for one sequence."""
    positions = torch.arange(length)[None]
    return model.model.rotary_emb(torch.zeros(1, length, 8), positions)


def test_a_model_without_long_rope_is_left_alone() -> None:
    assert install_long_rope(tiny_model()) is None


def test_outside_the_engine_everything_is_as_transformers_has_it() -> None:
    ours, theirs = phi3(), phi3()
    runner = tiny_runner(ours)
    assert runner.rope_switch_tokens == SWITCH_TOKENS
    # A short and a long request in one step, so that both sets of frequencies were used.
    step = make_step([([5, 6], 0, 2, [0]), (range(5, 45), 0, 40, range(1, 11))])
    before = runner.compute_logits(step)
    for length in (30, 10, SWITCH_TOKENS, SWITCH_TOKENS + 1, 3):
        for got, want in zip(rotations(ours, length), rotations(theirs, length), strict=True):
            assert torch.equal(got, want)
    assert torch.equal(runner.compute_logits(step), before)


def test_rows_of_both_regimes_in_one_step() -> None:
    runner = tiny_runner(phi3())
    short, long = list(range(5, 15)), list(range(20, 50))
    together = runner.compute_logits(
        make_step([(short, 0, 10, range(3)), (long, 0, 30, range(3, 11))])
    )
    runner.model.set_attn_implementation("eager")
    for got, prompt in zip(together, (short, long), strict=True):
        want = runner.model(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)


def test_layers_that_disagree_are_refused() -> None:
    model = phi3()
    model.model.layers[1].rope_type = {"full_attention": "longrope", "sliding_attention": "default"}
    with pytest.raises(UnsupportedModel, match="LongRoPE in some layers only"):
        install_long_rope(model)


def test_two_switch_points_are_refused() -> None:
    model = phi3()
    other = SERVED["phi3 longrope short"]
    model.model.second = tiny_model(other.class_name, **other.config).model.rotary_emb
    with pytest.raises(UnsupportedModel, match="several LongRoPE switch points"):
        install_long_rope(model)

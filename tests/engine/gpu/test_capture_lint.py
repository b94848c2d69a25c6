"""The capture lint: each kind of hazard once, and every family of the zoo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support_models import tiny_model
from support_zoo import SERVED
from tokenmill_engine.attention import IMPLEMENTATION
from tokenmill_engine.capture_lint import _Watch, capture_hazards
from tokenmill_engine.long_rope import install_long_rope
from tokenmill_engine.probe import probe, switch_attention

#: Where transformers asks the device for a number, or sends some: these run without graphs.
EAGER = {
    "llama rope dynamic": "modeling_rope_utils.py",
    "gemma3n": "modeling_gemma3n.py",
    "dbrx": "modeling_dbrx.py",
    "longcat flash": "modeling_longcat_flash.py",
}
FAST = {"llama", "phi4 longrope partial", "gemma2", "gpt oss", "mixtral", "llama rope dynamic"}

NUMBERS = torch.tensor([1.0, 0.0, 2.0])
ROWS = torch.tensor([2, 0])


@pytest.mark.parametrize(
    ("operation", "work"),
    [
        ("aten::item", lambda: NUMBERS.sum().item()),
        ("aten::is_nonzero", lambda: bool(NUMBERS[0] > 0)),
        ("aten::nonzero", lambda: NUMBERS.nonzero()),
        ("aten::index", lambda: NUMBERS[NUMBERS > 0]),
        ("aten::lift_fresh", lambda: torch.tensor([1.0, 2.0])),
        ("aten::repeat_interleave", lambda: torch.repeat_interleave(ROWS)),
        ("aten::to", lambda: NUMBERS.to("meta")),
    ],
)
def test_each_hazard_is_seen_with_its_place(operation: str, work: Callable[[], object]) -> None:
    with torch.inference_mode(), _Watch() as watch:
        work()
    (hazard,) = watch.hazards
    assert hazard.operation == operation
    assert hazard.place.startswith("test_capture_lint.py:")


@pytest.mark.parametrize(
    "work",
    [
        lambda: NUMBERS[ROWS] + 1,
        lambda: torch.where(NUMBERS > 0, NUMBERS, 0.0),
        lambda: NUMBERS.repeat_interleave(2),
        lambda: NUMBERS.new_zeros(4).index_copy_(0, ROWS, NUMBERS[:2]),
        lambda: torch.topk(NUMBERS, 2),
    ],
)
def test_what_a_graph_can_hold_is_let_through(work: Callable[[], object]) -> None:
    with torch.inference_mode(), _Watch() as watch:
        work()
    assert watch.hazards == []


@pytest.mark.parametrize(
    "name",
    [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SERVED],
)
def test_families(name: str) -> None:
    variant = SERVED[name]
    model = tiny_model(variant.class_name, **variant.config)
    specs = probe(model).specs
    has_long_rope = install_long_rope(model) is not None
    switch_attention(model, IMPLEMENTATION)
    hazards = capture_hazards(model, specs, has_long_rope=has_long_rope)
    assert bool(hazards) == (name in EAGER), hazards
    assert all(EAGER[name] in hazard.place for hazard in hazards)

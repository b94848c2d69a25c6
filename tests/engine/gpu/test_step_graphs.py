"""Steps through graphs, by a driver that needs no GPU and Triton's interpreter, and `generate`.

The stand-in cannot show what a real capture refuses; `test_capture_lint` is for that.
"""

from __future__ import annotations

import logging

import pytest
import torch

from support_graphs import CallAgain, GraphsFirst, Refuses, graph_runner, worst
from support_models import (
    make_step,
    random_prompts,
    reference,
    run_batched,
    tiny_config,
    tiny_model,
)
from support_zoo import SERVED
from tokenmill_engine.outputs import SampledToken, ScheduledRequest, SchedulerOutput
from tokenmill_engine.packed_settings import pack_settings

TOLERANCE = 2e-3
SMALL = tiny_config(num_hidden_layers=1)
#: Windows, experts under NaN from padding rows, and a switch of frequencies within the step.
FAMILIES = {
    "gemma2": {"num_hidden_layers": 2},
    "mixtral": {"num_hidden_layers": 1},
    "phi4 longrope partial": {"num_hidden_layers": 1},
}


def decode(length: int, blocks: list[int]) -> tuple[list[int], int, int, list[int]]:
    return ([7 + length] * length, length - 1, length, blocks)


def test_the_first_step_is_plain_the_second_warm_the_third_recorded() -> None:
    driver = CallAgain()
    runner = graph_runner(tiny_model(**SMALL), driver)
    steps = [make_step([decode(1, [number]), decode(1, [9])]) for number in (1, 2, 3, 4)]
    ran = [runner.graphs.run(step) is not None for step in steps]
    assert ran == [False] * 4  # nothing is known of the attention before a forward
    runner.compute_logits(steps[0])
    counts = []
    for step in steps:
        assert runner.graphs.run(step) is not None
        counts.append((len(driver.captured), driver.num_replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert runner.graphs.num_graphs == 1


def test_a_batch_of_chunks_and_decodes_equals_generate() -> None:
    check_family(tiny_model(**SMALL), rope_switch_tokens=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_equal_generate(name: str) -> None:
    variant = SERVED[name]
    config = variant.config | FAMILIES[name]
    model = tiny_model(variant.class_name, **config)
    check_family(model, rope_switch_tokens=config.get("original_max_position_embeddings"))


def check_family(model: torch.nn.Module, rope_switch_tokens: int | None) -> None:
    prompts = random_prompts(model, (11, 4, 1))
    wanted = [reference(model, prompt, 3) for prompt in prompts]
    driver = CallAgain()
    runner = graph_runner(model, driver)
    graphs_first = GraphsFirst(runner)
    logits = run_batched(
        graphs_first,
        prompts,
        [generation.token_ids for generation in wanted],
        rope_switch_tokens=rope_switch_tokens,
    )
    assert worst(logits, [generation.logits for generation in wanted]) < TOLERANCE
    assert graphs_first.num_graphed > graphs_first.num_steps // 2
    assert driver.num_replays > 0


def test_padding_rows_change_nothing() -> None:
    """A step of three in its bucket of four, also where a fuller step left its traces."""
    runner = graph_runner(tiny_model(**SMALL), CallAgain())
    rows = [decode(1, [3]), decode(1, [8]), decode(1, [5])]
    plain = runner.compute_logits(make_step(rows))
    fresh = runner.graphs.run(make_step(rows)).logits.clone()
    torch.testing.assert_close(fresh, plain)  # torch multiplies three rows otherwise than four
    runner.graphs.run(make_step([*rows, decode(1, [7])]))
    assert torch.equal(runner.graphs.run(make_step(rows)).logits, fresh)


def test_what_the_sampler_needs_travels_with_the_step() -> None:
    runner = graph_runner(tiny_model(**SMALL), CallAgain())
    step = make_step([decode(1, [3]), ([5, 6, 7, 8], 0, 2, [4]), ([9, 9], 0, 2, [6])])
    seen: list[torch.Tensor] = []

    def sampler(
        logits: torch.Tensor,
        requests: tuple[ScheduledRequest, ...],
        *,
        settings: torch.Tensor | None = None,
    ) -> tuple[SampledToken, ...]:
        if settings is not None:
            packed = pack_settings([item.request for item in requests])
            assert torch.equal(settings, torch.from_numpy(packed))
            seen.append(settings)
        return tuple(SampledToken(int(token)) for token in logits.argmax(-1))

    results = [runner.execute(step, sampler).sampled for _ in range(3)]
    assert len(seen) == 2
    assert len(results[0]) == 2
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize(
    "step",
    [
        make_step([([1] * 60, 0, 60, list(range(15)))]),  # more rows than any bucket has
        make_step([decode(17 * 4, list(range(17)))]),  # longer than the limits say
    ],
)
def test_what_does_not_fit_is_left_to_the_plain_way(step: SchedulerOutput) -> None:
    runner = graph_runner(tiny_model(**SMALL), CallAgain())
    runner.compute_logits(make_step([decode(1, [0])]))
    assert runner.graphs.run(step) is None


def test_a_failed_capture_switches_graphs_off(caplog: pytest.LogCaptureFixture) -> None:
    runner = graph_runner(tiny_model(**SMALL), Refuses())
    step = make_step([decode(1, [3])])
    runner.compute_logits(step)
    with caplog.at_level(logging.WARNING):
        ran = [runner.graphs.run(step) is not None for _ in range(3)]
    assert ran == [True, False, False]
    assert caplog.text.count("no CUDA graphs from here on") == 1
    assert runner.compute_logits(step).isfinite().all()

"""The scale runs at a small size, and the model that is fitted to them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CALL_US, EVENT_US, REQUEST_US, IDLE_MS_S = 100.0, 6.0, 400.0, 2.0


@pytest.fixture
def scale(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY)
    from benchmarks import scale, scale_model, scale_picture, scale_run

    monkeypatch.setattr(scale_run, "IDLE_S", 0.1)
    return SimpleNamespace(main=scale, model=scale_model, picture=scale_picture, run=scale_run)


def row(scale: Any, *, workers: int, streams: int, tokens: int, per_event: float) -> Any:
    """What the formula gives with the constants above."""
    batch = min(streams / workers, 128)
    redis_us = (CALL_US / batch + EVENT_US) / per_event + REQUEST_US / tokens
    scenario = scale.run.Scenario("made up", workers, streams, tokens, step_ms=1)
    return scale.run.Row(
        scenario=scenario, duration_s=1, tok_s=1, tokens_per_event=per_event, redis_us=redis_us,
        busiest_node=1, workers_us=1, client_us=1, redis_mb=1, peak_streams=1,
        idle_redis_ms_s=IDLE_MS_S * workers, idle_workers_ms_s=1, ttft_p50_s=1, gap_p50_s=1,
        longest_gap_s=1, recovery_p50_s=0, affected=0,
    )  # fmt: skip


@pytest.fixture
def made_up(scale: Any) -> list[Any]:
    return [
        row(scale, workers=workers, streams=streams, tokens=tokens, per_event=per_event)
        for workers, streams, tokens, per_event in (
            (1, 64, 40, 1.0), (4, 1024, 40, 1.0), (4, 1024, 10, 1.0), (64, 1024, 40, 1.0),
            (2, 256, 200, 4.0),
        )
    ]  # fmt: skip


def test_the_model_finds_what_the_runs_were_made_of(scale: Any, made_up: list[Any]) -> None:
    model = scale.model.fit(made_up)
    found = (model.call_us, model.event_us, model.request_us, model.idle_ms_s)
    assert found == pytest.approx((CALL_US, EVENT_US, REQUEST_US, IDLE_MS_S))
    assert model.worst_error == pytest.approx(0, abs=1e-9)
    assert model.redis_us(batch=50, tokens=100) == pytest.approx(2 + 6 + 4)
    # 16 workers of 2 ms leave 96.8 % of the core.
    ends = model.tok_s_of_a_core(workers=16, batch=50, tokens=100)
    assert ends == pytest.approx(0.968 * 1e6 / 12)


def test_a_cost_is_never_below_zero(scale: Any, made_up: list[Any]) -> None:
    falling = [replace(each, redis_us=each.scenario.tokens / 10.0) for each in made_up]
    model = scale.model.fit(falling)
    assert min(model.call_us, model.event_us, model.request_us) >= 0


def test_the_picture_has_a_dot_for_each_run(scale: Any, made_up: list[Any]) -> None:
    model = scale.model.fit(made_up)
    root = ElementTree.fromstring(scale.picture.picture("a & b", model, made_up))
    dots = [element for element in root.iter() if element.tag.endswith("circle")]
    ends = len(scale.picture.BATCHES) * len(scale.picture.TOKENS_PER_EVENT)
    assert len(dots) == len(made_up) + ends


def test_a_run_counts_every_token_of_every_stream(scale: Any) -> None:
    scenario = scale.run.Scenario("small", workers=2, streams=20, tokens=6, step_ms=20)
    measured = scale.run.measure(scenario)
    # `measure` itself refuses a run with other than 20 × 6 tokens.
    assert measured.tok_s * measured.duration_s == pytest.approx(120)
    assert 1 <= measured.tokens_per_event <= 6
    assert measured.affected == 0
    assert 1 <= measured.peak_streams <= 20
    again = scale.main._rows(json.loads(json.dumps([asdict(measured)])))
    assert again == [measured]


@pytest.mark.slow
def test_the_streams_of_a_killed_worker_are_told_from_the_others(scale: Any) -> None:
    scenario = scale.run.Scenario(
        "recovery", workers=2, streams=8, tokens=30, step_ms=50, lease_ms=1500, kills=True
    )
    measured = scale.run.measure(scenario)
    assert 0 < measured.affected <= 8
    assert 0.75 < measured.recovery_p50_s <= measured.longest_gap_s


def test_the_plan_covers_one_to_64_workers_and_16384_streams(scale: Any) -> None:
    plan = scale.main.plan()
    assert {1, 64} <= {each.workers for each in plan}
    assert max(each.streams for each in plan) == 16_384
    assert [each.name for each in scale.main.plan(parts="flush")] == ["flush"] * 4


@pytest.mark.slow
def test_a_run_over_a_cluster_tells_how_evenly_its_nodes_are_used(scale: Any) -> None:
    scenario = scale.run.Scenario(
        "nodes", workers=1, streams=16, tokens=6, step_ms=20, partitions=4, nodes=2
    )
    measured = scale.run.measure(scenario)
    assert measured.tok_s * measured.duration_s == pytest.approx(96)
    assert 0.5 <= measured.busiest_node <= 1

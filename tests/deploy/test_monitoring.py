"""Dashboards, alerts and scrape configuration, held against the metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy.dashboards.__main__ import FOLDER, as_text, dashboards
from deploy.dashboards.rules import TARGET, prometheus_rule
from deploy.validate import find_promtool
from prometheus_client import CollectorRegistry

from tokenmill._backlog import MemoryReading, PoolReading
from tokenmill_worker.exporter import Snapshot
from tokenmill_worker.metrics import Metrics
from tokenmill_worker.queue_metrics import QueueCollector

REPOSITORY = Path(__file__).resolve().parents[2]
MONITORING = REPOSITORY / "deploy" / "monitoring"
#: Names as they stand in an expression: with a namespace of ours, or vLLM's.
METRIC = re.compile(r"\b(?:vllm:|tokenmill_)\w+")
#: What Grafana replaces before Prometheus sees it.
GRAFANA = {"$__rate_interval": "1m", "$pool": ".*", "$worker": ".*"}


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((MONITORING / "rules.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def alerts() -> list[str]:
    return [rule["alert"] for rule in rules() if "alert" in rule]


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def expressions() -> list[str]:
    """Every expression of a dashboard, as Prometheus gets it."""
    found = []
    for dashboard in dashboards().values():
        for panel in panels(dashboard):
            found += [target["expr"] for target in panel["targets"]]
    for name, value in GRAFANA.items():
        found = [expression.replace(name, value) for expression in found]
    return found


@pytest.fixture(scope="module")
def exposed() -> set[str]:
    """The names of all samples that a worker and an exporter expose."""
    registry = CollectorRegistry()
    snapshot = Snapshot(PoolReading(memory=MemoryReading(0, 0)), "", 0.0, 0.0)
    registry.register(QueueCollector("default", lambda: snapshot, lambda _reading: 0.0))
    names = set()
    for source in (Metrics("model", 2048).registry, registry):
        for family in source.collect():
            names |= {sample.name for sample in family.samples}
    return names


def promtool(*arguments: str) -> None:
    found = find_promtool()
    if found is None:
        pytest.skip("promtool is not here; `make deploy-check` gets it")
    done = subprocess.run([found, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_those_that_the_program_writes() -> None:
    made = {name: as_text(dashboard) for name, dashboard in dashboards().items()}
    assert {file.name: file.read_text() for file in FOLDER.glob("*.json")} == made
    assert TARGET.read_text() == prometheus_rule()


def test_every_metric_of_a_dashboard_exists(exposed: set[str]) -> None:
    named = {name for expression in expressions() for name in METRIC.findall(expression)}
    assert named
    assert named <= exposed


def test_every_metric_of_an_alert_exists(exposed: set[str]) -> None:
    named = {name for rule in rules() for name in METRIC.findall(rule["expr"])}
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    assert {name for name in named if not any(name in each for each in recorded)} <= exposed


def test_variables_ask_for_metrics_that_exist(exposed: set[str]) -> None:
    for dashboard in dashboards().values():
        source, *others = dashboard["templating"]["list"]
        assert source["query"] == "prometheus"
        for variable in others:
            assert {*METRIC.findall(variable["query"]["query"])} <= exposed


@pytest.mark.parametrize("name", dashboards())
def test_grafana_can_tell_panels_and_dashboards_apart(name: str) -> None:
    dashboard = dashboards()[name]
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    assert dashboard["uid"] not in {
        other["uid"] for file, other in dashboards().items() if file != name
    }
    for panel in panels(dashboard):
        assert panel["datasource"]["uid"] == "${DS_PROMETHEUS}"


@pytest.mark.parametrize("name", dashboards())
def test_no_two_panels_lie_on_each_other(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboards()[name]["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (place["x"] + across, place["y"] + down)
            for across in range(place["w"])
            for down in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_prometheus_reads_every_expression_of_a_dashboard(tmp_path: Path) -> None:
    group = {
        "name": "dashboards",
        "rules": [
            {"record": f"expression:{number}", "expr": expression}
            for number, expression in enumerate(expressions())
        ],
    }
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [group]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))


def test_prometheus_reads_the_alerts_and_they_pass_their_tests() -> None:
    promtool("check", "rules", str(MONITORING / "rules.yml"))
    promtool("test", "rules", str(MONITORING / "rules_test.yml"))
    promtool("check", "config", str(MONITORING / "prometheus.yml"))


def test_every_alert_is_seen_to_fire() -> None:
    document = yaml.safe_load((MONITORING / "rules_test.yml").read_text())
    fired = {
        case["alertname"]
        for test in document["tests"]
        for case in test["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert fired == set(alerts())


def test_every_alert_says_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "action"}


def test_what_alerts_call_a_worker_is_what_is_scraped() -> None:
    document = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    jobs = {job["job_name"] for job in document["scrape_configs"]}
    named = {name for rule in rules() for name in re.findall(r'job="([^"]+)"', rule["expr"])}
    assert named <= jobs
    (worker,) = (job for job in document["scrape_configs"] if job["job_name"] in named)
    assert "pool" in {relabel["target_label"] for relabel in worker["relabel_configs"]}


def test_grafana_finds_what_compose_mounts() -> None:
    provider = yaml.safe_load(
        (MONITORING / "grafana/provisioning/dashboards/tokenmill.yml").read_text()
    )["providers"][0]
    compose = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    mounted = dict(
        reversed(volume.split(":")[:2])
        for volume in compose["services"]["grafana"]["volumes"]
        if volume.startswith("./")
    )
    folder = REPOSITORY / mounted[provider["options"]["path"]]
    assert {json.loads(file.read_text())["uid"] for file in folder.glob("*.json")} == {
        dashboard["uid"] for dashboard in dashboards().values()
    }

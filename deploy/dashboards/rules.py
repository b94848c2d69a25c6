"""The alerts as an object of the Prometheus operator, for deploy/k8s/components/monitoring."""

from __future__ import annotations

from pathlib import Path

import yaml

DEPLOY = Path(__file__).resolve().parent.parent
SOURCE = DEPLOY / "monitoring" / "rules.yml"
TARGET = DEPLOY / "k8s" / "components" / "monitoring" / "rules.yaml"
HEAD = "# Made from deploy/monitoring/rules.yml by `python -m deploy.dashboards`.\n"


def prometheus_rule() -> str:
    """The object as YAML."""
    document = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "tokenmill"},
        "spec": yaml.safe_load(SOURCE.read_text()),
    }
    return HEAD + yaml.safe_dump(document, sort_keys=False, width=100)

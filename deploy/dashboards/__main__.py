"""Write the dashboards that Grafana loads, and the alerts for the Prometheus operator:

`python -m deploy.dashboards`.
"""

from __future__ import annotations

import json
from pathlib import Path

from .fleet import fleet
from .panels import Json
from .queue import queue
from .rules import TARGET, prometheus_rule
from .worker import worker

FOLDER = Path(__file__).resolve().parent.parent / "monitoring" / "grafana" / "dashboards"


def dashboards() -> dict[str, Json]:
    """By the name of the file."""
    return {"fleet.json": fleet(), "queue.json": queue(), "worker.json": worker()}


def as_text(dashboard: Json) -> str:
    return json.dumps(dashboard, indent=1) + "\n"


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, dashboard in dashboards().items():
        (FOLDER / name).write_text(as_text(dashboard))
    TARGET.write_text(prometheus_rule())


if __name__ == "__main__":
    main()

"""A real Prometheus that scrapes a pool: workers with the fake engine, an exporter, some load."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import yaml
from deploy.validate import find_promtool

from support_worker_process import Pool, clean_environment, eventually

MONITORING = Path(__file__).resolve().parent.parent / "deploy" / "monitoring"
WEB = "usr/share/prometheus/web"


def find_prometheus() -> Path | None:
    """The server beside promtool, which comes in the same package."""
    promtool = find_promtool()
    beside = Path(promtool).with_name("prometheus") if promtool else None
    return beside if beside is not None and beside.exists() else None


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Prometheus:
    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        return self._get("query", query=expression)["result"]  # type: ignore[no-any-return]

    def targets_up(self) -> int:
        return sum(series["value"][1] == "1" for series in self.query("up"))

    def is_ready(self) -> bool:
        try:
            with urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except URLError:
            return False

    def _get(self, route: str, **arguments: str) -> dict[str, Any]:
        with urlopen(f"{self.url}/api/v1/{route}?{urlencode(arguments)}", timeout=10) as reply:
            data: dict[str, Any] = json.load(reply)["data"]
        return data


@contextmanager
def exporter(pool: Pool, port: int) -> Iterator[None]:
    """`tokenmill exporter` for this pool."""
    command = [
        sys.executable, "-m", "tokenmill", "--redis-url", pool.server.url,
        "--namespace", pool.keys.namespace, "--pool", pool.keys.pool,
        "exporter", "--port", str(port), "--max-age-s", "0.5",
    ]  # fmt: skip
    with (pool.folder / "exporter.log").open("wb") as log:
        process = subprocess.Popen(command, env=clean_environment(), stderr=log)
    try:
        yield
    finally:
        process.terminate()
        process.wait(timeout=30)


def configuration(workers: list[int], exporter_port: int) -> dict[str, Any]:
    """deploy/monitoring/prometheus.yml with addresses of this machine, scraping every second."""
    document: dict[str, Any] = yaml.safe_load((MONITORING / "prometheus.yml").read_text())
    document["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    document["rule_files"] = [str(MONITORING / "rules.yml")]
    for job in document["scrape_configs"]:
        job.pop("dns_sd_configs", None)
        ports = workers if job["job_name"] == "tokenmill-worker" else [exporter_port]
        job["static_configs"] = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    return document


@contextmanager
def prometheus(binary: Path, folder: Path, document: dict[str, Any]) -> Iterator[Prometheus]:
    config, port = folder / "prometheus.yml", free_port()
    config.write_text(yaml.safe_dump(document))
    web = binary.parent.parent.parent / WEB
    command = [
        str(binary), f"--config.file={config}", f"--storage.tsdb.path={folder / 'tsdb'}",
        f"--web.listen-address=127.0.0.1:{port}", f"--web.console.templates={web / 'templates'}",
    ]  # fmt: skip
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stderr=log, stdout=log)
    try:
        server = Prometheus(f"http://127.0.0.1:{port}")
        eventually(server.is_ready)
        yield server
    finally:
        process.terminate()
        process.wait(timeout=30)

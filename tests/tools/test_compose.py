"""The compose file and the Dockerfile, read and not run: `make compose-test` runs them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill_worker.settings import Settings

REPOSITORY = Path(__file__).resolve().parents[2]
WORKER_OPTIONS = {f"TOKENMILL_{name.upper()}" for name in Settings.model_fields}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())
    return document


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """(instruction, arguments) of each line, continuation lines joined."""
    text = (REPOSITORY / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^\s*#.*\n", "", text))
    lines = [line.strip() for line in joined.splitlines() if line.strip()]
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines]


def of(dockerfile: list[tuple[str, str]], instruction: str) -> list[str]:
    return [arguments for name, arguments in dockerfile if name == instruction]


def environment_of_image(dockerfile: list[tuple[str, str]]) -> dict[str, str]:
    pairs = " ".join(of(dockerfile, "ENV")).split()
    return dict(pair.split("=", 1) for pair in pairs)


def test_both_generations_of_compose_read_the_file(compose: dict[str, Any]) -> None:
    # docker-compose 1.29 takes a file with a version for format 3, which has no conditions.
    assert set(compose) == {"services", "volumes"}


def test_named_volumes_are_declared(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            assert source in compose["volumes"], (name, volume)


def test_the_worker_can_be_scaled(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert not {"container_name", "ports", "hostname"} & set(worker)


def test_the_worker_waits_for_redis_and_the_model(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["worker"]["depends_on"] == {
        "redis": {"condition": "service_healthy"},
        "model": {"condition": "service_completed_successfully"},
    }
    assert services["redis"]["healthcheck"]["test"] == ["CMD", "redis-cli", "ping"]
    # Restarted after its end, it would never have completed.
    assert services["model"]["restart"] == "no"


def test_the_image_is_built_once_before_anyone_needs_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [name for name, service in services.items() if "build" in service] == ["model"]
    assert services["worker"]["image"] == services["model"]["image"]


def test_redis_keeps_what_it_accepted(compose: dict[str, Any]) -> None:
    command = compose["services"]["redis"]["command"]
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert options["--appendonly"] == "yes"
    assert options["--maxmemory-policy"] == "noeviction"
    assert options["--protected-mode"] == "no"  # its peers are other containers
    assert any(volume.endswith(f":{options['--dir']}") for volume in redis_volumes(compose))


def redis_volumes(compose: dict[str, Any]) -> list[str]:
    volumes: list[str] = compose["services"]["redis"]["volumes"]
    return volumes


def test_redis_is_published_on_the_loopback_only(compose: dict[str, Any]) -> None:
    published = [port for each in compose["services"].values() for port in each.get("ports", [])]
    assert published == ["127.0.0.1:${TOKENMILL_REDIS_PORT:-6379}:6379"]


def test_nobody_gains_privileges_or_writes_to_the_root(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
    assert compose["services"]["worker"]["cap_drop"] == ["ALL"]


def test_a_worker_may_take_its_time_to_hand_over(compose: dict[str, Any]) -> None:
    assert compose["services"]["worker"]["stop_grace_period"] == "40s"
    assert compose["services"]["worker"]["init"] is True


def test_every_variable_of_the_worker_is_one_of_its_options(
    compose: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    # The worker refuses to start with a TOKENMILL_ variable that it does not know.
    given = {*compose["services"]["worker"]["environment"], *environment_of_image(dockerfile)}
    unknown = {name for name in given if name.startswith("TOKENMILL_")} - WORKER_OPTIONS
    assert not unknown


def test_the_image_runs_as_an_ordinary_user(dockerfile: list[tuple[str, str]]) -> None:
    (user,) = of(dockerfile, "USER")
    assert user.split(":")[0] not in ("0", "root")


def test_signals_reach_the_command(dockerfile: list[tuple[str, str]]) -> None:
    # In the shell form the process would be a child of a shell that forwards nothing.
    assert [json.loads(line) for line in of(dockerfile, "ENTRYPOINT")] == [["tokenmill"]]
    assert [json.loads(line) for line in of(dockerfile, "CMD")] == [["worker"]]


def test_the_health_check_asks_the_port_that_the_worker_listens_on(
    dockerfile: list[tuple[str, str]],
) -> None:
    port = environment_of_image(dockerfile)["TOKENMILL_METRICS_PORT"]
    (check,) = of(dockerfile, "HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/healthz" in check
    assert of(dockerfile, "EXPOSE") == [port]


def test_the_base_image_can_be_replaced_but_is_never_latest(
    dockerfile: list[tuple[str, str]],
) -> None:
    assert {line.split()[0] for line in of(dockerfile, "FROM")} == {"${PYTHON_IMAGE}"}
    assert "ARG PYTHON_IMAGE=python:3.11-slim-bookworm" in (REPOSITORY / "Dockerfile").read_text()


def test_the_build_context_holds_all_that_is_copied_and_nothing_else(
    dockerfile: list[tuple[str, str]],
) -> None:
    patterns = (REPOSITORY / ".dockerignore").read_text().split("\n")
    sent = {line[1:] for line in patterns if line.startswith("!")}
    copied = {
        source
        for line in of(dockerfile, "COPY")
        if "--from" not in line
        for source in line.split()[:-1]
    }
    assert "*" in patterns
    assert copied == sent
    assert all((REPOSITORY / source).exists() for source in copied)


def test_requirements_of_resolves_the_extras_that_extras_name() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    printed = subprocess.run(
        [sys.executable, "deploy/requirements_of.py", "worker"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    wanted = {*project["dependencies"], *optional["cli"], *optional["worker"]}
    assert set(printed) == wanted - {"tokenmill[cli]"}
    assert len(printed) == len(set(printed))

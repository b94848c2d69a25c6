"""The compose files and the Dockerfile, read and not run: `make compose-test` runs them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tokenmill_worker.settings import READ_ELSEWHERE, Settings

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
    assert set(compose) == {"services", "volumes", "secrets"}


def test_named_volumes_are_declared(compose: dict[str, Any]) -> None:
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", volume).split(":")[0]
            is_there = source.startswith("./") and (REPOSITORY / source).exists()
            assert is_there or source in compose["volumes"], (name, volume)


def test_the_worker_can_be_scaled(compose: dict[str, Any]) -> None:
    worker = compose["services"]["worker"]
    assert not {"container_name", "ports", "hostname"} & set(worker)


def test_the_worker_waits_for_redis_and_the_model(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert services["worker"]["depends_on"] == {
        "redis": {"condition": "service_healthy"},
        "model": {"condition": "service_completed_successfully"},
    }
    # Restarted after its end, it would never have completed.
    assert services["model"]["restart"] == "no"


def test_the_image_is_built_once_before_anyone_needs_it(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert [name for name, service in services.items() if "build" in service] == ["model"]
    assert services["worker"]["image"] == services["model"]["image"] == services["cli"]["image"]


def test_redis_keeps_what_it_accepted(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    assert any(
        volume.startswith("./deploy/redis/redis.conf:" + redis["command"][1])
        for volume in redis["volumes"]
    )
    options = dict(zip(redis["command"][2::2], redis["command"][3::2], strict=True))
    assert f"redis-data:{options['--dir']}" in redis["volumes"]
    settings = (REPOSITORY / "deploy" / "redis" / "redis.conf").read_text().splitlines()
    assert {"appendonly yes", "maxmemory-policy noeviction", "protected-mode yes"} <= {*settings}


def test_redis_knows_users_by_their_passwords_only(compose: dict[str, Any]) -> None:
    redis = compose["services"]["redis"]
    options = dict(zip(redis["command"][2::2], redis["command"][3::2], strict=True))
    assert options["--aclfile"] == "/run/secrets/redis_users"
    assert "--user metrics" in redis["healthcheck"]["test"][1]


@pytest.mark.parametrize(
    ("service", "user"), [("worker", "worker"), ("cli", "producer"), ("exporter", "metrics")]
)
def test_each_service_is_a_user_of_its_own(
    compose: dict[str, Any], service: str, user: str
) -> None:
    described = compose["services"][service]
    assert described["secrets"] == [user]
    assert described["environment"]["TOKENMILL_REDIS_URL"] == f"redis://{user}@redis:6379/0"
    assert described["environment"]["TOKENMILL_REDIS_PASSWORD_FILE"] == f"/run/secrets/{user}"


def make_secrets(folder: Path, **environment: str) -> str:
    return subprocess.run(
        ["sh", str(REPOSITORY / "deploy" / "secrets.sh"), str(folder)],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_the_script_makes_every_secret_that_compose_mounts(
    compose: dict[str, Any], tmp_path: Path
) -> None:
    make_secrets(tmp_path / "secrets")
    default = "${TOKENMILL_SECRETS_DIR:-./secrets}/"
    files = {secret["file"].removeprefix(default) for secret in compose["secrets"].values()}
    for name in files:
        # Readable for the user in a container, behind a folder that is not for other users here.
        assert (tmp_path / "secrets" / name).stat().st_mode & 0o777 == 0o444
    assert (tmp_path / "secrets").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("rules", ["users.acl", "users-6.2.acl"])
def test_the_acl_file_holds_the_hash_of_each_password(tmp_path: Path, rules: str) -> None:
    printed = make_secrets(tmp_path, REDIS_ACL=rules)
    lines = (tmp_path / "users.acl").read_text().splitlines()
    shipped = (REPOSITORY / "deploy" / "redis" / rules).read_text().splitlines()
    for line, original in zip(lines, shipped, strict=True):
        user = original.split()[1]
        if user == "default":
            assert line == original
            continue
        password = (tmp_path / user).read_text()
        assert len(password) == 64
        assert password not in printed
        digest = hashlib.sha256(password.encode()).hexdigest()
        assert line == original.replace(" on ", f" on #{digest} ", 1)


def test_passwords_stay_when_the_script_runs_again(tmp_path: Path) -> None:
    make_secrets(tmp_path)
    before = {file.name: file.read_text() for file in tmp_path.iterdir()}
    make_secrets(tmp_path)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == before


def test_with_a_gpu_only_image_device_and_reservation_differ(compose: dict[str, Any]) -> None:
    override = yaml.safe_load((REPOSITORY / "docker-compose.gpu.yml").read_text())["services"]
    assert set(override) <= set(compose["services"])
    assert len({service["image"] for service in override.values()}) == 1
    assert override["model"]["build"]["args"] == {"VARIANT": "cuda"}
    assert set(override["worker"]["environment"]) <= WORKER_OPTIONS
    (device,) = override["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "count" not in device  # excludes device_ids


def test_what_is_published_is_on_the_loopback_only(compose: dict[str, Any]) -> None:
    published = [port for each in compose["services"].values() for port in each.get("ports", [])]
    assert len(published) == 3
    for port in published:
        assert re.fullmatch(r"127\.0\.0\.1:\$\{TOKENMILL_\w+_PORT:-\d+\}:\d+", port)


def test_everybody_but_redis_and_workers_must_be_asked_for(compose: dict[str, Any]) -> None:
    services = compose["services"]
    assert {name for name, each in services.items() if "profiles" not in each} == {
        "redis",
        "model",
        "worker",
    }
    for name in ("exporter", "prometheus", "grafana"):
        assert services[name]["profiles"] == ["monitoring"]


def test_nobody_gains_privileges_or_writes_to_the_root(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]
    user, _ = compose["services"]["redis"]["user"].removeprefix("${REDIS_USER:-").split(":")
    assert user not in ("0", "root")


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


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_a_worker_started_by_hand_knows_whose_the_variables_of_compose_are(file: str) -> None:
    # They may be exported in the shell of whoever runs both.
    named = set(re.findall(r"\$\{(TOKENMILL_\w+)", (REPOSITORY / file).read_text()))
    assert named <= WORKER_OPTIONS | {f"TOKENMILL_{name}" for name in READ_ELSEWHERE}


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


def test_a_worker_is_healthy_when_it_serves(
    compose: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    port = environment_of_image(dockerfile)["TOKENMILL_METRICS_PORT"]
    check = compose["services"]["worker"]["healthcheck"]["test"]
    assert f"http://127.0.0.1:{port}/readyz" in check[-1]


def test_compose_passes_every_build_argument(
    compose: dict[str, Any], dockerfile: list[tuple[str, str]]
) -> None:
    declared = {line.split("=")[0] for line in of(dockerfile, "ARG")}
    assert set(compose["services"]["model"]["build"]["args"]) == declared


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

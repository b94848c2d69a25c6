"""deploy/roll.sh with stand-ins for docker and compose that keep their containers in a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
#: A container is a file that is named like it and holds its health; new ones are listed last.
DOCKER = """#!/bin/sh
echo "docker $*" >>"$CALLS"
for last; do :; done
case "$1" in
    inspect)
        case "$3" in
            *Health*) cat "$CONTAINERS/$last" ;;
            *) echo "${STATE:-running}" ;;
        esac ;;
    stop) ls "$CONTAINERS" | wc -l >>"$COUNTS" ;;
    rm) rm "$CONTAINERS/$last" ;;
esac
"""
COMPOSE = """#!/bin/sh
echo "compose $*" >>"$CALLS"
case "$*" in
    *"ps --quiet worker") ls "$CONTAINERS" ;;
    *"up "*"--no-recreate --scale worker="*)
        number=${*##*worker=}; number=${number%% *}
        while [ "$(ls "$CONTAINERS" | wc -l)" -lt "$number" ]; do
            next=$(($(cat "$CONTAINERS.next") + 1)); echo $next >"$CONTAINERS.next"
            echo "${HEALTH:-healthy}" >"$CONTAINERS/young-$next"
        done ;;
esac
"""


class Host:
    """Three workers, and what was called."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.containers = folder / "containers"
        self.containers.mkdir()
        for name in ("old-1", "old-2", "old-3"):
            (self.containers / name).write_text("healthy\n")
        (folder / "containers.next").write_text("0\n")
        for name, script in (("docker", DOCKER), ("compose", COMPOSE)):
            file = folder / name
            file.write_text(script)
            file.chmod(0o755)

    def roll(self, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["sh", str(REPOSITORY / "deploy" / "roll.sh"), "project"],
            env={
                "PATH": f"{self.folder}:{os.environ['PATH']}",
                "COMPOSE": str(self.folder / "compose"),
                "CONTAINERS": str(self.containers),
                "CALLS": str(self.folder / "calls"),
                "COUNTS": str(self.folder / "counts"),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    def names(self) -> list[str]:
        return sorted(file.name for file in self.containers.iterdir())


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_every_worker_is_replaced_by_a_new_one(host: Host) -> None:
    done = host.roll()
    assert done.returncode == 0, done.stderr
    assert host.names() == ["young-1", "young-2", "young-3"]


def test_there_is_one_more_whenever_one_is_stopped(host: Host) -> None:
    host.roll()
    assert (host.folder / "counts").read_text().split() == ["4", "4", "4"]


def test_a_new_one_that_does_not_come_up_ends_it_before_any_harm(host: Host) -> None:
    done = host.roll(HEALTH="starting", STATE="exited")
    assert done.returncode != 0
    assert "see its log" in done.stderr
    assert {"old-1", "old-2", "old-3"} < set(host.names())


def test_all_calls_are_about_the_project(host: Host) -> None:
    host.roll()
    calls = (host.folder / "calls").read_text().splitlines()
    assert all("--project-name project" in call for call in calls if call.startswith("compose"))
